"""Where code that tests compile is kept, and for how many threads it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@contextlib.contextmanager
def compiling(cache: Path, threads: int) -> Iterator[None]:
    """Within the block ``cache`` is the cache folder, and code is written for ``threads`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", str(cache))
        yield
    torch.set_num_threads(before)
