"""What a report says of the circumstances it was measured in. The records are made up."""

from __future__ import annotations

import pytest

from autosched.core.records import Contamination, DeviceKey, Failure, FailureKind, Samples, ScheduleRecord
from autosched.datasets.facts import device_facts
from autosched.pipeline.final import disturbance_note

CPU = device_facts(DeviceKey("cpu", "double", (("cores", "2"),)))
GPU = device_facts(DeviceKey("cuda", "double", (("sm_count", "132"),)))


def taken_beside(load: float) -> ScheduleRecord:
    return ScheduleRecord("key", Samples(1.0, 1.0, 1.0, 1.0, 1.0, 5), 0, Contamination(load))


@pytest.mark.parametrize(("loads", "share"), [((0.9, 0.85), "85%"), ((0.5, 0.2), "20%"), ((0.9, 0.02), ""), ((-1.0,), ""), ((), "")])
def test_a_machine_that_others_had_is_named_and_a_moment_of_it_is_not(loads: tuple[float, ...], share: str) -> None:
    answers = [*map(taken_beside, loads), Failure(FailureKind.CRASH, "boom")]
    note = disturbance_note(answers, CPU)
    assert bool(note) == bool(share)
    assert share in note
    # A GPU does not wait for the cores.
    assert disturbance_note(answers, GPU) == ""
