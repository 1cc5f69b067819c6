"""Whether other processes work on the device that a job measures on. A CPU stands in for a GPU of which NVML tells that."""

from __future__ import annotations

from pathlib import Path

import pytest

import autosched
from autosched.device.cpu import CpuDevice
from autosched.device.registry import DEVICES
from autosched.pipeline.collecting import Subject, collect
from autosched.pipeline.other_work import other_work_note
from tests.conformance.graphs import TwoBranches, two_branches_inputs


class Shared(CpuDevice):
    """Others have 42 % of it, or ``share``."""

    share: float | None = 0.42

    def other_work(self) -> float | None:
        return self.share


@pytest.mark.parametrize(("share", "said"), [(0.42, "42%"), (0.1, ""), (0.0, ""), (None, "")])
def test_more_than_a_tenth_is_noted(share: float | None, said: str) -> None:
    device = Shared()
    device.share = share
    note = other_work_note(device, "when this job began")
    assert bool(note) == bool(said)
    assert said in note


def test_a_device_that_does_not_tell_is_not_asked() -> None:
    assert other_work_note(CpuDevice(), "when this job began") == ""


def test_a_job_asks_before_and_after_and_leaves_no_times_to_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES._places, "cpu", f"{__name__}:Shared")
    left = []
    monkeypatch.setattr("autosched.pipeline.final.timed_schedules", lambda *given: left.append(given[4]) or [])
    args, kwargs = two_branches_inputs()
    report = autosched.tune(TwoBranches().eval(), args, kwargs, device="cpu", effort="quick", budget_s=1.0, lowering="aten").report
    when = [note.split("of the time ")[1].split(":")[0] for note in report.notes if "other processes kept" in note]
    assert when == ["at the end of this job", "when this job began"]
    assert left == [{}]


def test_who_collects_beside_others_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(DEVICES._places, "cpu", f"{__name__}:Shared")
    args, kwargs = two_branches_inputs()
    said = collect([Subject("two", TwoBranches().eval(), args, kwargs)], tmp_path / "runs", device="cpu", budget_s=1.0).summary()
    for when in ("at the beginning", "at the end"):
        assert f"busy 42% of the time {when}: runs taken beside them" in said
