"""What a tuning job gives back, as text."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.core.schedule import sequential
from autosched.device.compiled_baseline import ModelSource, from_zoo
from autosched.pipeline.result import BUILT_BATCH, Tuned
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_program


@pytest.mark.parametrize("unstable", [False, True])
def test_the_summary_has_what_the_command_line_says_below_its_table(unstable: bool) -> None:
    report = two_branches_bundle(TwoBranches()).evidence.report
    outcome: Any = SimpleNamespace(report=dataclasses.replace(report, notes=("other processes had 71% of the cores",), unstable=unstable))
    options: Any = None
    lines = Tuned(outcome, options).summary().splitlines()
    assert "  note: other processes had 71% of the cores" in lines
    assert any("too noisy" in line for line in lines) == unstable


@pytest.mark.parametrize(
    ("source", "built"),
    [(from_zoo("autosched:toy", batch=4), "4"), (from_zoo("autosched:toy"), None), (ModelSource("model.pt2"), None), (None, None)],
)
def test_the_file_says_which_batch_its_model_was_built_for(source: ModelSource | None, built: str | None) -> None:
    program, constants = two_branches_program(TwoBranches(), 4)
    made = two_branches_bundle(TwoBranches())
    captured = SimpleNamespace(
        program=program, constants={binding.value: constants.get(binding.name) for binding in program.bindings}, rewrites=()
    )
    device = SimpleNamespace(key=made.key.device, software=made.key.software)
    outcome: Any = SimpleNamespace(
        report=made.evidence.report, captured=captured, schedule=sequential(program.graph), device=device, trace=None,
        planned_us=((), ()), solo_us=(),
    )  # fmt: skip
    options: Any = SimpleNamespace(dtype=None, effort="quick", name="autosched:toy", seed=0, source=source)
    environment = dict(Tuned(outcome, options).bundle.evidence.environment)
    assert environment.get(BUILT_BATCH) == built
    assert "batch" not in environment
