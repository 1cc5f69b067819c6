"""Interrupts of native runs: in whatever function one comes it is raised, and what the run has made and changed is given back."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import weakref
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from autosched.core.records import Engine
from autosched.runtime import lanes
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.native.build import native_library
from autosched.runtime.native.lanes import NativePlan
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_placement
from tests.conformance.lanes_suite import random_schedule
from tests.conformance.programs import branches_program

pytestmark = pytest.mark.usefixtures("native")


def test_a_run_whose_beginning_is_interrupted_is_given_back() -> None:
    library = native_library()
    assert library is not None
    begun: list[int] = []

    def begin(*given: object) -> None:
        begun.append(library.begin(*given).data_ptr())
        raise KeyboardInterrupt

    bound = bind(*branches_program())
    graph = bound.program.graph
    plan = make_plan(graph, random_placement(random.Random(0), graph, 2))
    native = NativePlan(library, bound, [plan.of_lane(lane) for lane in range(2)], 0.0, plan.steps)._of_lanes
    native._library = dataclasses.replace(library, begin=begin)
    inputs = random_inputs(bound.program, 0)
    held = [weakref.ref(tensor) for tensor in inputs]
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        native.run(inputs, None, LanePool())
    del inputs
    gc.collect()
    assert begun
    assert not any(tensor() is not None for tensor in held)


def _interrupted(work: Callable[[], object], place: int) -> bool:
    """Whether ``work`` calls so many functions of autosched's: it is interrupted in that one, for the interpreter hears signals there."""
    before, left = sys.gettrace(), [place]

    def count(frame: FrameType, event: str, argument: object) -> None:
        if "autosched" in frame.f_globals.get("__name__", ""):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return left[0] <= 0


@pytest.mark.parametrize(
    ("engine", "lane_count", "one_team"),
    [(Engine.NATIVE, 1, False), (Engine.NATIVE, 2, False), (Engine.NATIVE, 2, True), (Engine.PYTHON, 1, False), (Engine.PYTHON, 2, False)],
)
def test_an_interrupt_in_any_function_is_raised_and_the_thread_keeps_its_settings(
    engine: Engine, lane_count: int, one_team: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "team_comes", lambda library, threads: one_team)
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    bound = bind(*branches_program(branches=4, depth=4))
    plan = make_plan(bound.program.graph, random_schedule(bound.program.graph, lane_count, 2))
    executor = LaneExecutor(bound, plan, None, engine)
    assert executor.one_team is one_team
    inputs = random_inputs(bound.program, 0)
    (expected,) = executor.run(inputs)
    threads, place, ends = torch.get_num_threads(), 0, False
    torch.set_num_threads(3)
    try:
        while not ends:
            place += 1
            try:
                # An interrupt that something swallows is not raised, and the function was called all the same.
                assert not _interrupted(lambda: executor.run(inputs), place)
                ends = True
            except KeyboardInterrupt:
                pass
            assert torch.get_num_threads() == 3
            assert not torch.is_inference_mode_enabled()
        assert torch.equal(executor.run(inputs)[0], expected)
    finally:
        torch.set_num_threads(threads)
    assert place > 3
