"""Where a plan that overwrites its inputs is recorded on a GPU: on its caller's memory once that comes again, else on copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from autosched.core.errors import DeviceError
from autosched.runtime.cuda.in_place import InPlaceRunner
from autosched.runtime.kernels import Begun


class Recorded:
    """Adds 1 to its first input, where it was recorded to, and closes."""

    peak_bytes = 5

    def __init__(self, callers: Collection[int], log: list[str]) -> None:
        self.callers = callers
        self._buffer = torch.zeros(3)
        self._log = log

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        target = inputs[0] if 0 in self.callers else self._buffer.copy_(inputs[0])
        self._log.append("in place" if 0 in self.callers else "on copies")
        return [target.add_(1), inputs[1] * 2]

    def close(self) -> None:
        self._log.append("closed")


class Device:
    """Records plans, or refuses to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refuses: Exception | None = None

    def record(self, inputs: Sequence[torch.Tensor], callers: Collection[int]) -> Recorded:
        if callers and self.refuses is not None:
            raise self.refuses
        self.log.append("recorded")
        return Recorded(callers, self.log)


def runner_on(device: Device, *, anywhere: bool = True) -> tuple[InPlaceRunner, Begun]:
    begun = Begun()
    made = InPlaceRunner(device.record, [torch.zeros(3), torch.ones(1)], [0], begun, anywhere=anywhere)  # type: ignore[arg-type]
    device.log.clear()
    return made, begun


def test_memory_that_comes_again_is_overwritten_where_it_lies() -> None:
    device = Device()
    runner, begun = runner_on(device)
    state, x = torch.zeros(3), torch.ones(1)
    first = runner([state, x])
    assert not begun.yes
    assert state.tolist() == [0.0] * 3
    assert first[0].tolist() == [1.0] * 3
    second = runner([state, x])
    assert begun.yes
    assert second[0] is state
    assert state.tolist() == [1.0] * 3
    runner([state, x])
    assert device.log == ["on copies", "recorded", "in place", "in place"]
    assert runner.peak_bytes == 5


def test_memory_that_kernels_may_not_expect_is_copied() -> None:
    device = Device()
    runner, begun = runner_on(device)
    state = torch.zeros(4)[1:]
    for _ in range(3):
        runner([state, torch.ones(1)])
    assert device.log == ["on copies"] * 3
    assert not begun.yes


def test_copies_that_nobody_needs_are_given_back_once() -> None:
    device = Device()
    runner, begun = runner_on(device)
    state, x = torch.zeros(3), torch.ones(1)
    for _ in range(60):
        runner([state, x])
    # Other memory, while there are still copies.
    runner([torch.zeros(3), x])
    assert "closed" not in device.log
    for _ in range(150):
        runner([state, x])
    assert device.log.count("closed") == 1
    assert state.tolist() == [209.0] * 3
    # Other memory again: recorded on copies once more, which stay.
    device.log.clear()
    for _ in range(3):
        other = torch.zeros(3)
        made = runner([other, x])
        assert made[0].tolist() == [1.0] * 3
        assert other.tolist() == [0.0] * 3
        assert not begun.yes
        for _ in range(120):
            runner([state, x])
    assert device.log.count("recorded") == 1
    assert "closed" not in device.log
    assert runner.peak_bytes == 5
    runner.close()
    assert device.log.count("closed") == 2


def test_memory_that_changes_at_each_call_is_copied_and_nothing_is_recorded() -> None:
    device = Device()
    runner, _ = runner_on(device)
    states = [torch.zeros(3) for _ in range(6)]
    for state in states:
        runner([state, torch.ones(1)])
    assert device.log == ["on copies"] * 6


def test_few_graphs_are_kept_and_not_many_recorded_in_all() -> None:
    device = Device()
    runner, _ = runner_on(device)
    held = [torch.zeros(3) for _ in range(30)]
    for state in held:
        for _ in range(2):
            runner([state, torch.ones(1)])
    assert runner.recorded == 4
    assert device.log.count("recorded") == 16
    assert device.log.count("closed") == 12
    device.log.clear()
    runner.close()
    assert device.log == ["closed"] * 5


@pytest.mark.parametrize("why", [DeviceError("no"), torch.OutOfMemoryError("of buffers for the other inputs")])
def test_a_device_that_will_not_record_there_is_asked_once(why: Exception) -> None:
    device = Device()
    device.refuses = why
    runner, begun = runner_on(device)
    state = torch.zeros(3)
    for _ in range(4):
        runner([state, torch.ones(1)])
    assert device.log == ["on copies"] * 4
    assert not begun.yes
    assert state.tolist() == [0.0] * 3


@pytest.mark.parametrize("anywhere", [True, False])
def test_it_can_be_told_to_stay_on_copies(anywhere: bool) -> None:
    device = Device()
    runner, _ = runner_on(device, anywhere=anywhere)
    state = torch.zeros(3)
    for _ in range(3):
        runner([state, torch.ones(1)])
    assert ("in place" in device.log) is anywhere
    device.log.clear()
    runner.on_copies([state, torch.ones(1)])
    assert device.log == ["on copies"]
