"""For how many queries and keys attention is computed by a kernel of our own."""

from __future__ import annotations

import re
from importlib.resources import files

from autosched.core.own_attention import fit_own_kernel


def test_few_queries_are_as_many_to_the_kernel() -> None:
    header = (files("autosched.runtime.cpu_kernels") / "few_queries.h").read_text(encoding="utf-8")
    (stated,) = re.findall(r"\bkFewQueries = (\d+);", header)
    few = int(stated)
    assert fit_own_kernel(few - 1, 32768)
    assert fit_own_kernel(few, 4096)
    assert not fit_own_kernel(few, 32768)
