"""The lane executor: the same numbers as in order, errors once and never a hang, the caller's settings left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from autosched.core.graph import OpGraph
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.runtime.calls import Slots
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.lanes import LaneExecutor, LanePool, Signals, Trace
from autosched.runtime.plan import make_plan
from tests.conformance.programs import branches_program
from tests.conformance.waiting import wait_until


@pytest.fixture
def bound() -> BoundProgram:
    return bind(*branches_program(branches=4, depth=4))


def _random_schedule(graph: OpGraph, lanes: int, seed: int, widths: tuple[int, ...] = (1,)) -> Schedule:
    chooser = random.Random(seed)
    return make_schedule(
        graph,
        range(len(graph)),
        [chooser.randrange(lanes) for _ in range(len(graph))],
        width=[chooser.choice(widths) for _ in range(len(graph))],
    )


def _with_kernel(bound: BoundProgram, index: int, kernel: object) -> BoundProgram:
    kernels = list(bound.kernels)
    kernels[index] = kernel  # type: ignore[call-overload]
    return dataclasses.replace(bound, kernels=tuple(kernels))


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_lanes_compute_what_order_computes(bound: BoundProgram, lanes: int, seed: int) -> None:
    graph = bound.program.graph
    inputs = random_inputs(bound.program, seed)
    pool = LanePool()
    executor = LaneExecutor(bound, make_plan(graph, _random_schedule(graph, lanes, seed)), pool)
    in_order = LaneExecutor(bound, make_plan(graph, sequential(graph)))
    for _ in range(5):
        got = executor.run(inputs)
        for ours, theirs in zip(got, in_order.run(inputs), strict=True):
            assert torch.equal(ours, theirs)
    pool.close()


@pytest.mark.parametrize("lane", [0, 1])
def test_an_error_surfaces_once_and_the_executor_lives_on(bound: BoundProgram, lane: int) -> None:
    graph = bound.program.graph
    schedule = _random_schedule(graph, 3, 1)
    victim = next(index for index in range(len(graph)) if schedule.lane[index] == lane)
    broken = [True]
    original = bound.kernels[victim]

    def explode(slots: Slots) -> None:
        if broken[0]:
            raise ValueError("the operator broke")
        original(slots)

    executor = LaneExecutor(_with_kernel(bound, victim, explode), make_plan(graph, schedule))
    inputs = random_inputs(bound.program, 0)
    for _ in range(3):
        with pytest.raises(ValueError, match="the operator broke"):
            executor.run(inputs)
    broken[0] = False
    assert torch.equal(executor.run(inputs)[0], bound.run(inputs)[0])


def test_an_interrupt_in_the_callers_lane_stops_the_others(bound: BoundProgram) -> None:
    graph = bound.program.graph
    schedule = _random_schedule(graph, 2, 2)
    victim = next(index for index in range(len(graph)) if schedule.lane[index] == 0)
    ran: list[int] = []

    def interrupt(slots: Slots) -> None:
        time.sleep(0.02)
        raise KeyboardInterrupt

    probed = _with_kernel(bound, victim, interrupt)
    last = len(graph) - 1
    probed = _with_kernel(probed, last, lambda slots: ran.append(last))
    with pytest.raises(KeyboardInterrupt):
        LaneExecutor(probed, make_plan(graph, schedule)).run(random_inputs(bound.program, 0))
    assert ran == []


def test_an_interrupt_while_tasks_are_handed_out_leaves_no_lane_waiting(bound: BoundProgram) -> None:
    graph = bound.program.graph
    pool = LanePool()
    executor = LaneExecutor(bound, make_plan(graph, _random_schedule(graph, 3, 4)), pool)
    inputs = random_inputs(bound.program, 0)
    expected = executor.run(inputs)

    class Interrupted:
        def put(self, task: Any) -> None:
            pool._queues[1] = own
            raise KeyboardInterrupt

    own = pool._queues[1]
    pool._queues[1] = Interrupted()  # type: ignore[call-overload]
    with pytest.raises(KeyboardInterrupt):
        executor.run(inputs)
    answers: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: answers.extend(executor.run(inputs)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert all(torch.equal(one, other) for one, other in zip(answers, expected, strict=True))
    pool.close()


def test_an_error_keeps_no_tensor_of_its_run(bound: BoundProgram) -> None:
    graph = bound.program.graph
    victim = len(graph) - 1

    def explode(slots: Slots) -> None:
        raise ValueError("the operator broke")

    executor = LaneExecutor(_with_kernel(bound, victim, explode), make_plan(graph, _random_schedule(graph, 2, 5)))
    inputs = random_inputs(bound.program, 0)
    probe = weakref.ref(inputs[0])
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            executor.run(inputs)
        del inputs
        # The other lane's thread lets go a moment after its end is told.
        assert wait_until(lambda: probe() is None)
    finally:
        gc.enable()


def test_thread_count_and_inference_mode_of_the_caller_are_restored(bound: BoundProgram) -> None:
    graph = bound.program.graph
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for lanes in (1, 2):
            LaneExecutor(bound, make_plan(graph, _random_schedule(graph, lanes, 3, widths=(1, 2)))).run(random_inputs(bound.program, 0))
            assert torch.get_num_threads() == 3
            assert not torch.is_inference_mode_enabled()
            inherited: list[int] = []
            thread = threading.Thread(target=lambda found=inherited: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert inherited == [3]
    finally:
        torch.set_num_threads(before)


def test_widths_reach_the_operators_of_every_lane(bound: BoundProgram) -> None:
    graph = bound.program.graph
    schedule = _random_schedule(graph, 3, 4, widths=(1, 2, 3))
    seen: dict[int, int] = {}

    def watch(index: int) -> object:
        original = bound.kernels[index]

        def kernel(slots: Slots) -> None:
            seen[index] = torch.get_num_threads()
            assert torch.is_inference_mode_enabled()
            original(slots)

        return kernel

    watched = dataclasses.replace(bound, kernels=tuple(watch(index) for index in range(len(graph))))
    executor = LaneExecutor(watched, make_plan(graph, schedule))
    for _ in range(3):
        seen.clear()
        executor.run(random_inputs(bound.program, 0))
        assert seen == dict(enumerate(schedule.width))


def test_nothing_is_kept_between_runs(bound: BoundProgram) -> None:
    graph = bound.program.graph
    executor = LaneExecutor(bound, make_plan(graph, _random_schedule(graph, 3, 5)))
    inputs = random_inputs(bound.program, 0)
    outputs = executor.run(inputs)
    watched = [weakref.ref(outputs[0]), weakref.ref(inputs[0])]
    del outputs, inputs
    assert wait_until(lambda: [item() for item in watched] == [None, None])


def test_intermediates_are_dropped_as_the_plan_says(bound: BoundProgram) -> None:
    graph = bound.program.graph
    seen: list[int] = []
    last = len(graph) - 1
    original = bound.kernels[last]

    def count(slots: Slots) -> None:
        seen.append(sum(slots[operator.writes[0]] is not None for operator in graph.operators))
        original(slots)

    LaneExecutor(_with_kernel(bound, last, count), make_plan(graph, sequential(graph))).run(random_inputs(bound.program, 0))
    assert seen == [4]


def test_trace_holds_every_operator_in_dependency_order(bound: BoundProgram) -> None:
    graph = bound.program.graph
    executor = LaneExecutor(bound, make_plan(graph, _random_schedule(graph, 2, 6)))
    trace = Trace(len(graph))
    executor.run(random_inputs(bound.program, 0), trace)
    assert all(trace.begin_ns <= start <= end <= trace.finish_ns for start, end in zip(trace.start_ns, trace.end_ns, strict=True))
    for edge in graph.edges:
        assert trace.end_ns[edge.before] <= trace.start_ns[edge.after]


def test_concurrent_callers_share_one_pool(bound: BoundProgram) -> None:
    graph = bound.program.graph
    executor = LaneExecutor(bound, make_plan(graph, _random_schedule(graph, 3, 7)))
    sets = [random_inputs(bound.program, seed) for seed in range(4)]
    expected = [bound.run(inputs)[0] for inputs in sets]
    results: list[torch.Tensor | None] = [None] * len(sets)

    def call(place: int) -> None:
        for _ in range(5):
            results[place] = executor.run(sets[place])[0]

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(results, expected, strict=True):
        assert got is not None
        assert torch.equal(got, wanted)


def test_threads_end_with_the_pool() -> None:
    pool = LanePool()
    threads: list[threading.Thread] = []
    pool.run(lambda lane: threads.append(threading.current_thread()), 3, Signals(3), 0)
    others = [thread for thread in threads if thread is not threading.current_thread()]
    assert len(others) == 2
    del pool
    for thread in others:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_a_sleeping_lane_is_woken_by_success_and_by_failure() -> None:
    for fail in (False, True):
        signals = Signals(4)
        woken: list[int] = []

        def task(lane: int, signals: Signals = signals, woken: list[int] = woken, fail: bool = fail) -> None:
            if lane == 0:
                time.sleep(0.05)
                if fail:
                    raise RuntimeError("no signal will come")
                signals.set(0)
            else:
                signals.wait(0)
                woken.append(lane)

        pool = LanePool()
        if fail:
            with pytest.raises(RuntimeError, match="no signal"):
                pool.run(task, 3, signals, 1)
            assert woken == []
        else:
            pool.run(task, 3, signals, 1)
            assert sorted(woken) == [1, 2]
        pool.close()
