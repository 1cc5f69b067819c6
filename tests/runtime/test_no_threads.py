"""A process that may start no more threads (``ulimit -u``, a container's limit) runs what it has: on the calling thread, the same bits."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from autosched.core.records import Engine
from autosched.runtime import lane_pool
from autosched.runtime.calling_threads import CallingThreads
from autosched.runtime.cores import usable_cores
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lane_pool import LanePool, NoThreads, Signals, threads_can_start
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.native.build import native_library
from autosched.runtime.native.lanes import team_comes
from autosched.runtime.plan import make_plan
from tests.conformance.lanes_suite import random_schedule
from tests.conformance.programs import branches_program


class _Limit:
    """How many threads may still be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        usual = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.left <= 0:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            usual(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> _Limit:
    return _Limit(monkeypatch)


@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.usefixtures("native")
def test_lanes_without_threads_are_run_by_the_caller(engine: Engine, left: int, limit: _Limit) -> None:
    bound = bind(*branches_program(branches=4, depth=4))
    schedule = random_schedule(bound.program.graph, 3, 3, widths=(1,))
    executor = LaneExecutor(bound, make_plan(bound.program.graph, schedule), engine=engine, as_team=False)
    assert (executor.engine, executor.one_team, executor.lanes) == (engine, False, 3)
    inputs = random_inputs(bound.program, 0)
    expected = bound.run(inputs)[0]
    limit.left = left
    for _ in range(2):
        assert torch.equal(executor.run(inputs)[0], expected)
    limit.left = 2
    assert torch.equal(executor.run(inputs)[0], expected)
    assert limit.left == left  # none of those that were there is started anew


def test_nothing_has_run_where_a_thread_is_missing(limit: _Limit) -> None:
    limit.left = 0
    ran: list[int] = []
    with pytest.raises(NoThreads):
        LanePool().run(ran.append, 2, Signals(2), 0)
    assert ran == []


def test_no_lane_is_started_for_a_finalizer_at_the_interpreters_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never run, and Python 3.11 waits for ever for it to begin."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    ran: list[int] = []
    with pytest.raises(NoThreads):
        LanePool().run(ran.append, 2, Signals(2), 0)
    assert ran == []


@pytest.mark.usefixtures("native")
def test_openmp_is_not_asked_for_threads_that_there_are_not(limit: _Limit) -> None:
    """GNU's ends the process."""
    library = native_library()
    assert library is not None
    team_comes.cache_clear()
    limit.left = 0
    try:
        assert not team_comes(library, 2)
        assert team_comes(library, 1)
    finally:
        team_comes.cache_clear()


_LIMITED_LATER = """
import os, resource, sys, threading
sys.path.append(sys.argv[1])
import torch
from autosched.runtime.forking import rest_openmp
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import make_plan
from tests.conformance.lanes_suite import random_schedule
from tests.conformance.programs import branches_program

bound = bind(*branches_program(branches=4, depth=4))
executor = LaneExecutor(bound, make_plan(bound.program.graph, random_schedule(bound.program.graph, 2, 2, widths=(1,))))
assert executor.one_team
inputs = random_inputs(bound.program, 0)
expected = executor.run(inputs)[0]
# As at the end of load().
rest_openmp()
if os.getuid() == 0:
    os.setuid(65534)  # root has no such limit
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    assert torch.equal(executor.run(inputs)[0], expected)
    print("the same")
else:
    print("no limit")
"""


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(sys.platform != "linux" or usable_cores() < 2, reason="no team")
def test_a_team_that_cannot_be_started_any_more_is_not_asked_for() -> None:
    """Threads came when it was loaded, and others of this user have taken their places since."""
    root = str(Path(__file__).resolve().parents[2])
    asked = [sys.executable, "-P", "-c", _LIMITED_LATER, root]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=200, check=False)
    if "no limit" in ended.stdout:
        pytest.skip("this user's threads are not limited")
    assert "the same" in ended.stdout, ended.stderr


def test_a_trial_leaves_no_thread(limit: _Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    limit.left = 2
    assert not threads_can_start(3)
    limit.left = 2
    assert threads_can_start(2)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) == before
    monkeypatch.setattr(lane_pool, "threads_are_real", lambda: False)
    assert threads_can_start(1)


def test_callers_run_themselves_what_no_other_thread_can(limit: _Limit) -> None:
    calls = CallingThreads()
    ran: list[int] = []

    def run(inputs: object) -> list[torch.Tensor]:
        ran.append(threading.get_ident())
        return []

    def take_turns() -> None:
        limited.wait()
        calls.run(run, ())

    limited = threading.Event()
    calls.run(run, ())
    other = threading.Thread(target=take_turns)
    other.start()
    limit.left = 0
    limited.set()
    other.join()
    calls.run(run, ())
    assert ran == [threading.get_ident(), other.ident, threading.get_ident()]
