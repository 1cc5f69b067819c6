"""What a tuning job gives back, as text."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.pipeline.result import Tuned
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


@pytest.mark.parametrize("unstable", [False, True])
def test_the_summary_has_what_the_command_line_says_below_its_table(unstable: bool) -> None:
    report = two_branches_bundle(TwoBranches()).evidence.report
    outcome: Any = SimpleNamespace(report=dataclasses.replace(report, notes=("other processes had 71% of the cores",), unstable=unstable))
    options: Any = None
    lines = Tuned(outcome, options).summary().splitlines()
    assert "  note: other processes had 71% of the cores" in lines
    assert any("too noisy" in line for line in lines) == unstable
