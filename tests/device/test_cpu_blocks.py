"""Schedules that are compared are timed in blocks that last as long: shorter ones are spared more of what else the machine does."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from autosched.core.records import Failure
from autosched.core.schedule import sequential
from autosched.device.cpu_measure import SHORTEST_BLOCK_US, CpuMeasurer, runs_lasting
from autosched.runtime.kernels import random_inputs
from autosched.runtime.widths import WidePrograms
from tests.conformance.programs import branches_program

RUN_US = 900.0
INTERRUPTED_US = 12_000.0


@pytest.mark.parametrize("interrupted", [0, 1])
def test_what_interrupts_the_first_runs_of_a_schedule_makes_none_of_its_later_blocks_shorter(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    program, constants = branches_program()
    measurer = CpuMeasurer(WidePrograms(program, constants), random_inputs(program, 0), lambda item: None)
    made: dict[int, list[int]] = defaultdict(list)

    def block_us(self: CpuMeasurer, executor: Any, runs: int) -> float:
        place = list(made).index(id(executor)) if id(executor) in made else len(made)
        blocks = made[id(executor)]
        blocks.append(runs)
        return INTERRUPTED_US if place == interrupted and len(blocks) <= 2 else RUN_US

    monkeypatch.setattr(CpuMeasurer, "_block_us", block_us)
    # On this machine's cores the two are one after the other all the same.
    schedules = [sequential(program.graph), sequential(program.graph, width=2)]
    for _ in range(2):
        assert not isinstance(measurer.paired(schedules, 3, 0), Failure)
    assert len(made) == len(schedules)
    wanted = runs_lasting(SHORTEST_BLOCK_US, RUN_US)
    # Of each, two runs before the rounds, then one that does not count and a block in each of six.
    counted = [blocks[3::2] for blocks in made.values()]
    assert [len(blocks) for blocks in counted] == [6, 6]
    assert all(runs == wanted for blocks in counted for runs in blocks[1:])
