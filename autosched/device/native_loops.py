"""Loops of operators on lanes without the interpreter: their times are those of operators in a plan that runs so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from autosched.core.records import Engine
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.cores import usable_cores
from autosched.runtime.instructions import Instruction, instructions_of, slots_of
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import SPIN_OWN_CORE_US
from autosched.runtime.native.build import native_library
from autosched.runtime.native.code import NativeCode, NativeStep, NotNative
from autosched.runtime.native.lanes import NativeProgram, team_comes

_NOTHING: tuple[Instruction, ...] = ()


class Repeated(Protocol):
    """A loop, as ``cpu_loops`` has it."""

    width: int
    repeats: int
    start_us: float
    end_us: float

    @property
    def kernel(self) -> Kernel:
        """What is repeated."""

    @property
    def slots(self) -> Slots:
        """What it works on."""


class NativeLoops:
    """Some loops, made for one run and timed by it.

    Each lane says that it is ready; the first loop begins when all are, every other when the one before it has begun.
    """

    def __init__(self, program: NativeProgram, loops: Sequence[Repeated]) -> None:
        self._program = program
        self._loops = loops

    def run(self, pool: LanePool) -> None:
        """Run them; notes when each started and ended."""
        size = len(self._loops)
        times = torch.zeros(2, 3 * size, dtype=torch.int64)
        threads = torch.get_num_threads()
        with torch.inference_mode():
            self._program.run([], times, pool)
        torch.set_num_threads(threads)
        starts_ns, ends_ns = times.tolist()
        for place, loop in enumerate(self._loops):
            # The clock runs before the next one may begin: a lane without a core of its own can lose it in between.
            loop.start_us, loop.end_us = starts_ns[_started(place, size)] / 1000.0, ends_ns[_loop(place, size)] / 1000.0


def native_loops(loops: Sequence[Repeated], lanes: Sequence[int], lane_count: int, engine: Engine) -> NativeLoops | None:
    """``loops`` as a program, each on its lane; ``None`` where they are to be run, or can only be run, from Python.

    Args:
        lanes: the lane of each; those that have none do nothing.
        lane_count: how many threads there are.
    """
    library = native_library() if engine is Engine.NATIVE else None
    todo = [instructions_of(loop.kernel) for loop in loops]
    if library is None or any(item is None for item in todo):
        return None
    size = len(loops)
    steps: list[tuple[NativeStep, ...]] = [()] * lane_count
    constants: list[torch.Tensor | None] = []
    for place, (loop, item, lane) in enumerate(zip(loops, todo, lanes, strict=True)):
        # Values of its own: two lanes never write the same slot. And only those: a large program has tens of thousands, and to hand over
        # all of them takes many times as long as a loop.
        named = sorted({slot for instruction in item or () for slot in slots_of(instruction) if slot >= 0})
        places = {slot: len(constants) + number for number, slot in enumerate(named)}
        constants += [loop.slots[slot] for slot in named]
        before = tuple(_ready(other) for other in range(1, size)) if place == 0 else (_started(place - 1, size),)
        steps[lane] = (
            NativeStep(_ready(place), loop.width, _NOTHING, records=place > 0),
            NativeStep(_started(place, size), loop.width, _NOTHING, waits=before, records=True),
            NativeStep(_loop(place, size), loop.width, item or _NOTHING, repeats=loop.repeats, places=places),
        )
    # As lanes of a plan are: operators of several threads have nobody beside them there, but may be asked for.
    narrow = all(loop.width == 1 for loop in loops)
    team = lane_count if narrow and 1 < lane_count <= usable_cores() and team_comes(library, lane_count) else 0
    # A lane that waits for the end alone sleeps: it has nothing to be in time for.
    spin_us = SPIN_OWN_CORE_US if 1 < size <= usable_cores() else 0.0
    try:
        return NativeLoops(NativeProgram(library, NativeCode((tuple(steps),), 3 * size, spin_us, constants, team=team)), loops)
    except NotNative:
        return None


def _ready(place: int) -> int:
    return place


def _started(place: int, size: int) -> int:
    return size + place


def _loop(place: int, size: int) -> int:
    return 2 * size + place
