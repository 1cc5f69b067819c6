"""The lane executor on either engine, and the threads that outlive its runs."""

from __future__ import annotations

import _thread
import dataclasses
import random
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosched.core.records import Engine
from autosched.core.schedule import sequential
from autosched.runtime import lanes
from autosched.runtime.calls import Slots
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lane_pool import LanePool, Signals
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_placement
from tests.conformance.lanes_suite import LanesSuite, ThreadsSuite, assert_computes_what_order_computes
from tests.conformance.programs import branches_program


@pytest.fixture
def no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP never gives enough threads."""
    monkeypatch.setattr(lanes, "team_comes", lambda library, threads: False)


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for every lane: whether a team is worth it is not what is tested."""
    monkeypatch.setattr(lanes, "usable_cores", lambda: 64)


class TestPythonLanes(ThreadsSuite):
    engine = Engine.PYTHON


@pytest.mark.usefixtures("native", "no_team")
class TestNativeLanes(ThreadsSuite):
    engine = Engine.NATIVE


@pytest.mark.usefixtures("native", "many_cores")
class TestTeams(LanesSuite):
    engine = Engine.NATIVE


@given(seed=st.integers(0, 2**31), count=st.integers(1, 4))
@settings(max_examples=30)
def test_python_lanes_compute_what_order_computes(seed: int, count: int) -> None:
    assert_computes_what_order_computes(Engine.PYTHON, seed, count)


@pytest.mark.usefixtures("native", "no_team")
@given(seed=st.integers(0, 2**31), count=st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_native_lanes_compute_what_order_computes(seed: int, count: int) -> None:
    assert_computes_what_order_computes(Engine.NATIVE, seed, count)


@pytest.mark.usefixtures("native", "many_cores")
@given(seed=st.integers(0, 2**31), count=st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_teams_compute_what_order_computes(seed: int, count: int) -> None:
    assert_computes_what_order_computes(Engine.NATIVE, seed, count, one_team=True)


def test_intermediates_are_dropped_as_the_plan_says() -> None:
    bound = bind(*branches_program(branches=4, depth=4))
    graph = bound.program.graph
    seen: list[int] = []
    last = len(graph) - 1
    original = bound.kernels[last]

    def count(slots: Slots) -> None:
        seen.append(sum(slots[operator.writes[0]] is not None for operator in graph.operators))
        original(slots)

    probed = dataclasses.replace(bound, kernels=(*bound.kernels[:-1], count))
    LaneExecutor(probed, make_plan(graph, sequential(graph))).run(random_inputs(bound.program, 0))
    assert seen == [4]


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


def test_a_lane_that_cannot_be_started_is_started_for_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit of processes counts threads, and may be reached for a moment only."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool, ran = LanePool(), list[int]()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            pool.run(ran.append, 2, Signals(2), 0)
    assert not ran
    caller = threading.Thread(target=pool.run, args=(ran.append, 2, Signals(2), 0), daemon=True)
    caller.start()
    caller.join(20)
    assert sorted(ran) == [0, 1]
    assert not caller.is_alive()
    pool.close()


@pytest.mark.usefixtures("native", "no_team")
@pytest.mark.parametrize("engine", [Engine.PYTHON, Engine.NATIVE])
def test_where_threads_are_turns_of_one_the_caller_walks_all_lanes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gevent has it: a lane that waited for another one's turn would keep it from coming."""

    def spawn(*given: object) -> None:
        pytest.fail("a lane that waits for its turn")

    bound = bind(*branches_program())
    graph = bound.program.graph
    inputs = random_inputs(bound.program, 0)
    executor = LaneExecutor(bound, make_plan(graph, random_placement(random.Random(0), graph, 2)), None, engine)
    assert (executor.engine, executor.lanes) == (engine, 2)
    monkeypatch.setattr(_thread, "start_new_thread", spawn)
    monkeypatch.setattr(threading.Thread, "start", spawn)
    assert torch.equal(executor.run(inputs)[0], bound.run(inputs)[0])


def test_a_caller_that_is_interrupted_again_and_again_leaves_no_lane_at_work() -> None:
    class Interrupted(Signals):
        left = 3

        def join(self, index: int) -> None:
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt(self.left)
            done.set()
            super().join(index)

    done, ended = threading.Event(), []

    def task(lane: int) -> None:
        if lane:
            assert done.wait(60)
            time.sleep(0.05)
            ended.append(lane)

    pool = LanePool()
    with pytest.raises(KeyboardInterrupt, match="2"):
        pool.run(task, 3, Interrupted(3), 0)
    assert sorted(ended) == [1, 2]
    # And the next run is like any other.
    pool.run(ended.append, 3, Signals(3), 0)
    assert sorted(ended) == [0, 1, 1, 2, 2]
    pool.close()


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
