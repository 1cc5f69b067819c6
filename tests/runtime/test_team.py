"""Lanes as threads of one team: where these wake up after a pause, and what follows when one has lost its core."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autosched.runtime import lanes
from autosched.runtime.cores import usable_cores
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor, Trace
from autosched.runtime.plan import make_plan
from tests.conformance.graphs import random_program
from tests.conformance.lanes_suite import random_schedule
from tests.conformance.probes import with_hook
from tests.conformance.programs import branches_program

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.skipif(sys.platform != "linux", reason="native lanes are built on Linux only")]

PAUSE_S = 0.02  # longer than OpenMP's threads spin


def _team(*hooks: Callable[[], None], widths: tuple[int, ...] = (1,)) -> tuple[LaneExecutor, list[torch.Tensor], torch.Tensor]:
    """Two lanes, whose first operators call one of ``hooks`` each; inputs and the answer."""
    bound = bind(*branches_program(branches=4, depth=4))
    graph = bound.program.graph
    schedule = random_schedule(graph, 2, 2, widths=widths)
    inputs = random_inputs(bound.program, 0)
    expected = bound.run(inputs)[0]
    for lane, hook in enumerate(hooks):
        bound = with_hook(bound, next(index for index in schedule.order if schedule.lane[index] == lane), hook)
    executor = LaneExecutor(bound, make_plan(graph, schedule))
    assert executor.one_team
    return executor, inputs, expected


def _cores_allowed() -> dict[int, set[int]]:
    return {int(thread): os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")}


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
@pytest.mark.parametrize("widths", [(1,), (1, 1, 2), (2,)])
def test_after_a_pause_every_thread_may_run_where_it_might_before(widths: tuple[int, ...]) -> None:
    executor, inputs, expected = _team(widths=widths)
    executor.run(inputs)
    before = _cores_allowed()
    for _ in range(5):
        time.sleep(PAUSE_S)
        assert torch.equal(executor.run(inputs)[0], expected)
    after = _cores_allowed()
    assert before.items() <= after.items()


# On which cores two lanes ran, after pauses, and how often these were two.
_WOKEN = """
import ctypes, sys, time
import torch
sys.path.append(sys.argv[1])
from autosched.runtime.instructions import Allocate, RunKernel, scratch
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.native.build import native_library
from autosched.runtime.native.code import NativeCode, NativeStep
from autosched.runtime.native.lanes import NativeProgram

libc = ctypes.CDLL(None)
address = ctypes.cast(libc.getcpu, ctypes.c_void_p).value  # (unsigned *core, unsigned *node)

def where(into):
    made = tuple(Allocate(place, (1,), (1,), "int32") for place in (into, scratch(0)))
    return NativeStep(into, 1, (*made, RunKernel("getcpu", address, (into, scratch(0)), libc)))

lanes = (((where(0),), (where(1),)),)
program, pool, apart = NativeProgram(native_library(), NativeCode(lanes, 2, 1000.0, (None, None), outputs=(0, 1), team=2)), LanePool(), 0
for _ in range(40):
    time.sleep(float(sys.argv[2]))
    with torch.inference_mode():
        one, other = program.run([], None, pool)
    apart += one.item() != other.item()
print(apart)
"""


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_after_a_pause_the_lanes_wake_up_on_different_cores() -> None:
    """Under a hypervisor, Linux leaves them on the caller's without help; other work on the machine may move one of them at any time.

    In a process of their own: where another thread has a team too, OpenMP's threads sleep wherever they wait, and wake up where they like.
    """
    root = Path(__file__).resolve().parents[2]
    asked = [sys.executable, "-P", "-c", _WOKEN, str(root), str(PAUSE_S)]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=200, check=False)
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) >= 26


def test_a_team_that_is_late_is_left_alone_for_some_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    absent, walked = [False], []
    executor, inputs, expected = _team(lambda: None, lambda: time.sleep(0.05 if absent[0] else 0.0))
    native = executor._native
    assert native is not None
    executor.run(inputs)  # the first run decides nothing
    absent[0] = True
    for who, program in (("threads", native._of_lanes), ("alone", native._of_caller)):
        monkeypatch.setattr(program, "run", lambda *given, who=who, run=program.run: walked.append(who) or run(*given))
    # A thread that sleeps looks like one without a core.
    executor.run(inputs)
    absent[0] = False
    for _ in range(8):
        assert torch.equal(executor.run(inputs)[0], expected)
    assert sorted(set(walked)) == ["alone", "threads"]
    assert len(walked) == 8
    assert torch.equal(executor.run(inputs)[0], expected)
    assert len(walked) == 8
    assert executor.one_team


@pytest.mark.parametrize("seed", range(12))
def test_the_caller_alone_gives_what_lanes_give(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 3)
    program, constants = random_program(random.Random(seed), 24)
    bound = bind(program, constants)
    inputs = random_inputs(program, seed)
    plan = make_plan(program.graph, random_schedule(program.graph, 3, seed, widths=(1, 1, 2)))
    native = LaneExecutor(bound, plan)._native
    assert native is not None
    with torch.inference_mode():
        expected = native._of_lanes.run([item.clone() for item in inputs], None, LanePool())
        got = native._of_caller.run([item.clone() for item in inputs], None, LanePool())
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_whoever_measures_gets_the_team_however_late_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: 2)
    executor, inputs, expected = _team(lambda: None, lambda: time.sleep(0.05))
    for _ in range(2):  # the first decides nothing
        executor.run(inputs)
    native = executor._native
    assert native is not None
    for program in (native._of_lanes, native._of_caller):
        monkeypatch.setattr(program, "run", lambda *given: pytest.fail("without the team"))
    trace = Trace(len(executor._bound.program.graph))
    assert torch.equal(executor.run(inputs, trace)[0], expected)
    assert all(trace.end_ns)
