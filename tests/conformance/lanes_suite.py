"""What every engine of CPU lanes must do: the same numbers as in order, errors once and never a hang, the caller's settings left alone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from autosched.core.graph import OpGraph
from autosched.core.records import Engine
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor, Trace
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_placement, random_program
from tests.conformance.probes import with_hook
from tests.conformance.programs import branches_program
from tests.conformance.waiting import wait_until


def random_schedule(graph: OpGraph, lanes: int, seed: int, widths: tuple[int, ...] = (1,)) -> Schedule:
    chooser = random.Random(seed)
    return make_schedule(
        graph,
        range(len(graph)),
        [chooser.randrange(lanes) for _ in range(len(graph))],
        width=[chooser.choice(widths) for _ in range(len(graph))],
    )


def assert_computes_what_order_computes(engine: Engine, seed: int, lanes: int, *, one_team: bool = False) -> None:
    """A random program of real operators, with views, changes in place and several results, on a random schedule."""
    rng = random.Random(seed)
    program, constants = random_program(rng, rng.randrange(1, 24))
    bound = bind(program, constants)
    placed = random_placement(rng, program.graph, lanes)
    schedule = dataclasses.replace(placed, width=tuple(rng.choice((1, 1, 2)) for _ in placed.width))
    executor = LaneExecutor(bound, make_plan(program.graph, schedule), None, engine)
    assert executor.engine is engine
    assert executor.one_team is (one_team and executor.lanes > 1)
    expected = bound.run([tensor.clone() for tensor in random_inputs(program, seed)])
    for ours, theirs in zip(executor.run(random_inputs(program, seed)), expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours, theirs)


def _break() -> None:
    raise ValueError("the operator broke")


class LanesSuite:
    """Inherit from it and say which engine."""

    engine: Engine

    @pytest.fixture
    def bound(self) -> BoundProgram:
        return bind(*branches_program(branches=4, depth=4))

    def executor(self, bound: BoundProgram, schedule: Schedule, pool: LanePool | None = None) -> LaneExecutor:
        made = LaneExecutor(bound, make_plan(bound.program.graph, schedule), pool, self.engine)
        assert made.engine is self.engine
        return made

    @pytest.mark.parametrize("lanes", [1, 2, 3, 5])
    @pytest.mark.parametrize("seed", range(4))
    def test_lanes_compute_what_order_computes(self, bound: BoundProgram, lanes: int, seed: int) -> None:
        graph = bound.program.graph
        inputs = random_inputs(bound.program, seed)
        pool = LanePool()
        executor = self.executor(bound, random_schedule(graph, lanes, seed), pool)
        for _ in range(5):
            for ours, theirs in zip(executor.run(inputs), bound.run(inputs), strict=True):
                assert torch.equal(ours, theirs)
        pool.close()

    @pytest.mark.parametrize("lane", [0, 1])
    def test_an_error_surfaces_once_and_the_executor_lives_on(self, bound: BoundProgram, lane: int) -> None:
        graph = bound.program.graph
        schedule = random_schedule(graph, 3, 1)
        victim = next(index for index in range(len(graph)) if schedule.lane[index] == lane)
        broken = [True]

        def explode() -> None:
            if broken[0]:
                raise ValueError("the operator broke")

        executor = self.executor(with_hook(bound, victim, explode), schedule)
        inputs = random_inputs(bound.program, 0)
        for _ in range(3):
            with pytest.raises(ValueError, match="the operator broke"):
                executor.run(inputs)
        broken[0] = False
        assert torch.equal(executor.run(inputs)[0], bound.run(inputs)[0])

    @pytest.mark.parametrize("lanes", [1, 2])
    def test_an_operators_own_error_is_what_pytorch_raises(self, bound: BoundProgram, lanes: int) -> None:
        executor = self.executor(bound, random_schedule(bound.program.graph, lanes, 1))
        (given_input,) = random_inputs(bound.program, 0)
        with pytest.raises(RuntimeError) as expected:
            bound.run([given_input[:, :-1]])
        with pytest.raises(RuntimeError) as found:
            executor.run([given_input[:, :-1]])
        assert type(found.value) is type(expected.value)
        assert str(found.value) == str(expected.value)
        assert torch.equal(executor.run([given_input])[0], bound.run([given_input])[0])

    def test_an_interrupt_in_the_callers_lane_stops_the_others(self, bound: BoundProgram) -> None:
        graph = bound.program.graph
        schedule = random_schedule(graph, 2, 2)
        victim = next(index for index in range(len(graph)) if schedule.lane[index] == 0)
        ran: list[int] = []

        def interrupt() -> None:
            time.sleep(0.02)
            raise KeyboardInterrupt

        last = len(graph) - 1
        probed = with_hook(with_hook(bound, victim, interrupt), last, lambda: ran.append(last))
        with pytest.raises(KeyboardInterrupt):
            self.executor(probed, schedule).run(random_inputs(bound.program, 0))
        assert ran == []

    @pytest.mark.parametrize("lanes", [1, 2])
    def test_an_error_keeps_no_tensor_of_its_run(self, bound: BoundProgram, lanes: int) -> None:
        graph = bound.program.graph
        broken = with_hook(bound, len(graph) - 1, _break)
        executor = self.executor(broken, random_schedule(graph, lanes, 5))
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

    def test_thread_count_and_inference_mode_of_the_caller_are_restored(self, bound: BoundProgram) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            for lanes in (1, 2):
                self.executor(bound, random_schedule(bound.program.graph, lanes, 3, widths=(1, 2))).run(random_inputs(bound.program, 0))
                assert torch.get_num_threads() == 3
                assert not torch.is_inference_mode_enabled()
                inherited: list[int] = []
                thread = threading.Thread(target=lambda found=inherited: found.append(torch.get_num_threads()))
                thread.start()
                thread.join()
                assert inherited == [3]
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("lanes", [1, 2])
    def test_threads_that_first_use_pytorch_during_a_run_have_the_users_count(self, bound: BoundProgram, lanes: int) -> None:
        graph = bound.program.graph
        inherited: set[int] = set()

        def look() -> None:
            thread = threading.Thread(target=lambda: inherited.add(torch.get_num_threads()))
            thread.start()
            thread.join()

        watched = bound
        for index in range(len(graph)):
            watched = with_hook(watched, index, look)
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            self.executor(watched, random_schedule(graph, lanes, 3, widths=(1, 2))).run(random_inputs(bound.program, 0))
            assert inherited == {3}
        finally:
            torch.set_num_threads(before)

    def test_a_caller_does_not_undo_what_another_thread_has_set(self, bound: BoundProgram) -> None:
        graph = bound.program.graph
        executor = self.executor(bound, random_schedule(graph, 2, 3, widths=(1, 2)))
        counts: list[int] = []
        before = torch.get_num_threads()

        def call() -> None:
            executor.run(random_inputs(bound.program, 0))
            counts.append(torch.get_num_threads())

        with ThreadPoolExecutor(1) as caller:
            torch.set_num_threads(2)
            try:
                caller.submit(call).result()
                torch.set_num_threads(3)
                # Its own count is the one that it began with.
                caller.submit(call).result()
                with ThreadPoolExecutor(1) as new:
                    counts.append(new.submit(torch.get_num_threads).result())
            finally:
                torch.set_num_threads(before)
        assert counts == [2, 2, 3]

    def test_widths_reach_the_operators_of_every_lane(self, bound: BoundProgram) -> None:
        graph = bound.program.graph
        schedule = random_schedule(graph, 3, 4, widths=(1, 2, 3))
        seen: dict[int, int] = {}

        def watch(index: int) -> Callable[[], None]:
            def hook() -> None:
                seen[index] = torch.get_num_threads()
                assert torch.is_inference_mode_enabled()

            return hook

        watched = bound
        for index in range(len(graph)):
            watched = with_hook(watched, index, watch(index))
        executor = self.executor(watched, schedule)
        for _ in range(3):
            seen.clear()
            executor.run(random_inputs(bound.program, 0))
            assert seen == dict(enumerate(schedule.width))

    @pytest.mark.parametrize("lanes", [1, 3])
    def test_nothing_is_kept_between_runs(self, bound: BoundProgram, lanes: int) -> None:
        executor = self.executor(bound, random_schedule(bound.program.graph, lanes, 5))
        inputs = random_inputs(bound.program, 0)
        outputs = executor.run(inputs)
        watched = [weakref.ref(outputs[0]), weakref.ref(inputs[0])]
        del outputs, inputs
        assert wait_until(lambda: [item() for item in watched] == [None, None])

    def test_an_output_is_the_callers_own(self, bound: BoundProgram) -> None:
        executor = self.executor(bound, random_schedule(bound.program.graph, 2, 5))
        inputs = random_inputs(bound.program, 0)
        (first,) = executor.run(inputs)
        kept = first.clone()
        (second,) = executor.run(inputs)
        with torch.inference_mode():
            second.zero_()
        assert torch.equal(first, kept)
        assert first.is_inference()

    @pytest.mark.parametrize("lanes", [1, 2])
    def test_trace_holds_every_operator_in_dependency_order(self, bound: BoundProgram, lanes: int) -> None:
        graph = bound.program.graph
        executor = self.executor(bound, random_schedule(graph, lanes, 6))
        trace = Trace(len(graph))
        executor.run(random_inputs(bound.program, 0), trace)
        assert all(trace.begin_ns <= start <= end <= trace.finish_ns for start, end in zip(trace.start_ns, trace.end_ns, strict=True))
        for edge in graph.edges:
            assert trace.end_ns[edge.before] <= trace.start_ns[edge.after]

    def test_a_trace_of_a_run_that_failed_has_no_time_of_what_did_not_run(self, bound: BoundProgram) -> None:
        graph = bound.program.graph
        last = len(graph) - 1
        executor = self.executor(with_hook(bound, last, _break), sequential(graph))
        trace = Trace(len(graph))
        with pytest.raises(ValueError, match="broke"):
            executor.run(random_inputs(bound.program, 0), trace)
        assert trace.end_ns[last] == 0
        assert all(trace.end_ns[:last])

    def test_concurrent_callers_share_one_pool(self, bound: BoundProgram) -> None:
        for lanes in (1, 3):
            executor = self.executor(bound, random_schedule(bound.program.graph, lanes, 7))
            sets = [random_inputs(bound.program, seed) for seed in range(4)]
            expected = [bound.run(inputs)[0] for inputs in sets]
            results: list[torch.Tensor | None] = [None] * len(sets)

            def call(
                place: int,
                executor: LaneExecutor = executor,
                sets: list[list[torch.Tensor]] = sets,
                results: list[torch.Tensor | None] = results,
            ) -> None:
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

    def test_a_run_much_longer_than_a_turn_ends_well(self, bound: BoundProgram) -> None:
        graph = bound.program.graph
        for lanes in (1, 2):
            schedule = random_schedule(graph, lanes, 8)
            slow = with_hook(bound, 1, lambda: time.sleep(0.12))
            inputs = random_inputs(bound.program, 0)
            assert torch.equal(self.executor(slow, schedule).run(inputs)[0], bound.run(inputs)[0])


class ThreadsSuite(LanesSuite):
    """Of lanes that have threads of their own."""

    def test_an_interrupt_while_tasks_are_handed_out_leaves_no_lane_waiting(self, bound: BoundProgram) -> None:
        pool = LanePool()
        executor = self.executor(bound, random_schedule(bound.program.graph, 3, 4), pool)
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
