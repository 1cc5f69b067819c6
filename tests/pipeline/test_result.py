"""What a tuning job gives back, as text and as a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autosched
from autosched.core.errors import UsageError
from autosched.core.schedule import sequential
from autosched.device.compiled_baseline import ModelSource, from_zoo
from autosched.pipeline.request import mode_note
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
    environment = dict(_tuned(source).bundle.evidence.environment)
    assert environment.get(BUILT_BATCH) == built
    assert "batch" not in environment


@pytest.mark.parametrize("cached", ["/cache/schedules/0-1-2-3.autosched", None])
def test_where_the_file_cannot_be_written_it_is_said_where_the_schedule_is(cached: str | None, tmp_path: Path) -> None:
    tuned = _tuned(None)
    tuned.report = dataclasses.replace(tuned.report, cached=cached)
    with pytest.raises(UsageError, match="cannot write") as said:
        tuned.save(tmp_path / "absent" / "model.autosched")
    assert str(said.value).endswith(cached or "has room.")


def _tuned(source: ModelSource | None) -> Tuned:
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
    return Tuned(outcome, options)


def test_who_tunes_a_model_in_training_mode_is_told_what_load_will_do() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    assert mode_note(model) == ""
    model[1].train()
    report = autosched.tune(model, (torch.randn(2, 4),), device="cpu", effort="quick", budget_s=1.0, lowering="aten").report
    (note,) = [note for note in report.notes if "training mode" in note]
    assert note.startswith("1 is in training mode")
    assert mode_note(model.train()).startswith("the model is in training mode")
