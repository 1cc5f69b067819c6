"""Who runs what several threads call, and that it is for them as if they had run it themselves."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from autosched.capture.export import capture
from autosched.core.custom_operators import trusting
from autosched.core.schedule import make_schedule, sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime import calling_threads, runners
from autosched.runtime.calling_threads import CallingThreads
from autosched.runtime.guard import LoadedModel
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.lane_pool import LanePool, Signals
from autosched.runtime.load import load
from tests.conformance.bundles import evidence_for, two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs, two_branches_program
from tests.conformance.interruptions import ends_whatever_interrupts
from tests.conformance.stateful import SIZE, ReadBeforeAndAfter, bundle_bytes
from tests.conformance.waiting import wait_until


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs a call does not depend on how busy the machine is."""
    monkeypatch.setattr(calling_threads, "_PATIENCE_S", 60.0)


@pytest.fixture
def callers() -> CallingThreads:
    return CallingThreads()


@pytest.fixture
def others() -> Iterator[list[ThreadPoolExecutor]]:
    """Two threads of their own, to be called on."""
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.shutdown()


def _who(inputs: Sequence[torch.Tensor]) -> Any:
    return [threading.get_ident()]


def _ident(pool: ThreadPoolExecutor) -> int:
    return pool.submit(threading.get_ident).result()


def _share(callers: CallingThreads, others: Sequence[ThreadPoolExecutor]) -> int:
    """Let threads take turns until one thread runs all; that one."""
    for pool in others * 2:
        (ran,) = pool.submit(callers.run, _who, []).result()
    assert ran not in {threading.get_ident(), *map(_ident, others)}
    return int(ran)


def test_a_thread_that_calls_alone_runs_its_calls(callers: CallingThreads, others: list[ThreadPoolExecutor]) -> None:
    for _ in range(1000):
        assert callers.run(_who, []) == [threading.get_ident()]
    # One that serves what another has loaded.
    ran = [others[0].submit(callers.run, _who, []).result()[0] for _ in range(1000)]
    assert _ident(others[0]) not in ran[:64]
    assert ran[64:] == [_ident(others[0])] * 936


def test_threads_that_take_turns_have_one_that_runs_all(callers: CallingThreads, others: list[ThreadPoolExecutor]) -> None:
    owner = _share(callers, others)
    assert {callers.run(_who, [])[0], *(pool.submit(callers.run, _who, []).result()[0] for pool in others)} == {owner}


def test_a_thread_of_few_cores_starts_none_that_runs_all(
    callers: CallingThreads, others: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = _ident(others[0])
    monkeypatch.setattr(calling_threads, "cores_of_thread", lambda: 1 if threading.get_ident() == pinned else 2)

    def ran(pool: ThreadPoolExecutor) -> int:
        return int(pool.submit(callers.run, _who, [], threads=2).result()[0])

    callers.run(_who, [], threads=2)
    # What it starts has its cores, too.
    assert ran(others[0]) == pinned
    owner = ran(others[1])
    assert owner not in {pinned, _ident(others[1])}
    assert ran(others[0]) == owner


def test_where_threads_are_turns_of_one_each_runs_its_calls(
    callers: CallingThreads, others: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    idents = [_ident(pool) for pool in others]
    monkeypatch.setattr(_thread, "start_new_thread", lambda *given: pytest.fail("a thread that would wait for its turn"))
    assert [pool.submit(callers.run, _who, []).result()[0] for pool in others * 2] == idents * 2


def test_one_that_calls_for_long_runs_its_calls_again_and_turns_begin_anew(
    callers: CallingThreads, others: list[ThreadPoolExecutor]
) -> None:
    owner = _share(callers, others)
    runs = [callers.run(_who, [])[0] for _ in range(80)]
    assert runs == [owner] * 64 + [threading.get_ident()] * 16
    assert _share(callers, others) == owner


def test_a_finalizer_at_the_interpreters_end_waits_for_no_thread(
    callers: CallingThreads, others: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _share(callers, others)
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert callers.run(_who, []) == [threading.get_ident()]


def test_teams_are_let_go_by_those_who_do_not_run(
    callers: CallingThreads, others: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[int] = []
    monkeypatch.setattr(calling_threads, "rest_openmp", lambda: gone.append(threading.get_ident()))
    callers.run(_who, [])
    owner = _share(callers, others)
    for _ in range(3):
        callers.run(_who, [])
    # The only one that had any, once.
    assert gone == [threading.get_ident()]
    for _ in range(80):
        callers.run(_who, [])
    _share(callers, others)
    callers.run(_who, [])
    assert sorted(gone[1:]) == sorted([owner, threading.get_ident()])


def test_what_a_run_raises_is_raised_where_it_was_called_and_nothing_is_held(
    callers: CallingThreads, others: list[ThreadPoolExecutor]
) -> None:
    _share(callers, others)

    def fail(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise IndexError("out of range")

    given = torch.ones(2)
    held = weakref.ref(given)
    with pytest.raises(IndexError, match="out of range"):
        callers.run(fail, [given])
    (made,) = callers.run(lambda inputs: [inputs[0] + 1], [given])
    assert torch.equal(made, torch.full((2,), 2.0))
    result = weakref.ref(made)
    del given, made
    gc.collect()
    assert held() is None
    assert result() is None


def test_a_schedule_that_a_run_calls_does_not_wait_for_it(callers: CallingThreads, others: list[ThreadPoolExecutor]) -> None:
    owner = _share(callers, others)
    assert callers.run(lambda inputs: callers.run(_who, []), []) == [owner]


def test_a_call_that_interrupts_the_choice_of_a_thread_does_not_wait_for_it(
    callers: CallingThreads, others: list[ThreadPoolExecutor]
) -> None:
    _share(callers, others)
    ran: list[Any] = []
    # As a signal's handler, or a finalizer, calls another schedule.
    choosing = {CallingThreads._owner_for.__code__}
    assert ends_whatever_interrupts(lambda: ran.append(callers.run(_who, [])), choosing, lambda: callers.run(_who, []))
    assert len(ran) == 1


# The system may give a signal to any thread. One that waits, and is not the one that got it, hears of it when it waits no longer.
@pytest.mark.parametrize("who", ["caller", "owner"])
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no such signals")
def test_an_interrupt_comes_when_the_run_has_ended(callers: CallingThreads, others: list[ThreadPoolExecutor], who: str) -> None:
    owner = _share(callers, others)
    ended: list[float] = []

    def slow(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        signal.pthread_kill(owner if who == "owner" else threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        ended.append(time.monotonic())
        return []

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            callers.run(slow, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended
    # The answer that nobody took is not the next call's.
    assert len(callers.run(_who, [])) == 1


def test_an_interrupt_comes_before_the_run_is_handed_over(
    callers: CallingThreads, others: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _share(callers, others)
    owner = callers._owner
    assert owner is not None
    jobs, left = owner._jobs, [KeyboardInterrupt("first"), KeyboardInterrupt("second")]

    class Interrupted:
        get = jobs.get

        def put(self, job: Any) -> None:
            if left:
                raise left.pop(0)
            jobs.put(job)

    monkeypatch.setattr(owner, "_jobs", Interrupted())
    ran: list[int] = []
    with pytest.raises(KeyboardInterrupt, match="first"):
        callers.run(lambda inputs: ran.append(1) or [], [])  # type: ignore[func-returns-value]
    assert not left
    assert not ran
    assert len(callers.run(_who, [])) == 1


def test_a_run_does_not_wait_for_a_long_one_of_another_model(
    callers: CallingThreads, others: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = _share(callers, others)
    monkeypatch.setattr(calling_threads, "_PATIENCE_S", 0.005)
    begun, go_on = threading.Event(), threading.Event()

    def long(inputs: Sequence[torch.Tensor]) -> Any:
        begun.set()
        assert go_on.wait(60)
        return [threading.get_ident()]

    running = others[0].submit(callers.run, long, [])
    assert begun.wait(60)
    given = torch.ones(2)
    held = weakref.ref(given)
    assert others[1].submit(callers.run, _who, [given]).result(60) == [_ident(others[1])]
    # What is begun is waited for, however long it takes.
    assert not running.done()
    go_on.set()
    assert running.result(60) == [owner]
    # What was taken back is run by nobody else, and held by nobody.
    monkeypatch.setattr(calling_threads, "_PATIENCE_S", 60.0)
    ran: list[int] = []
    others[1].submit(callers.run, lambda inputs: ran.append(1) or [], []).result(60)  # type: ignore[func-returns-value]
    assert ran == [1]
    del given
    gc.collect()
    assert held() is None


def test_a_finalizer_that_calls_a_schedule_on_the_thread_that_runs_all_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, others: list[ThreadPoolExecutor]
) -> None:
    fresh = CallingThreads()
    monkeypatch.setattr(runners, "calling_threads", fresh)
    monkeypatch.setattr(runners, "usable_cores", lambda: 2)
    model, (args, kwargs) = TwoBranches().eval(), two_branches_inputs()
    schedule = sequential(two_branches_program(model)[0].graph, width=2)
    fast = load(encode_bundle(two_branches_bundle(model, schedule=schedule)), model, strict=True)
    owner = _share(fresh, others)
    prepared = fast._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    runner, ran = prepared.runner, list[bool]()

    def collected() -> None:
        ran.append(threading.get_ident() == owner)
        fast(*args, **kwargs)

    class Garbage:
        pass

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weakref.finalize(Garbage(), collected)
        return runner(inputs)

    prepared.runner = lambda inputs: fresh.run(run, inputs)
    caller = threading.Thread(target=fast, args=args, kwargs=kwargs, daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert ran == [True]


@pytest.mark.parametrize("asked", ["call", "refresh"])
@pytest.mark.parametrize("thread", ["one that runs all", "a lane"])
def test_a_finalizer_on_a_thread_of_ours_waits_for_nobody_who_changes_the_models_state(thread: str, asked: str) -> None:
    model, x = ReadBeforeAndAfter().eval(), torch.randn(4, SIZE)
    fast = load(bundle_bytes(model, (x,)), model, strict=True)
    prepared = fast._table.slots[0].prepared  # type: ignore[union-attr]
    assert prepared is not None
    runner, owner, pool, ran = prepared.runner, calling_threads._Owner(), LanePool(users_code=False), list[str]()

    class Garbage:
        pass

    def collected() -> None:
        ran.append(threading.current_thread().name)
        fast.refresh() if asked == "refresh" else fast(x)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weakref.finalize(Garbage(), collected)
        return runner(inputs)

    def run_on_a_lane(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        pool.run(lambda lane: made.extend(run(inputs)) if lane else None, 2, Signals(2), 0)
        return made

    prepared.runner = run_on_a_lane if thread == "a lane" else lambda inputs: owner.run(run, inputs) or []
    caller = threading.Thread(target=fast, args=(x,), daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert ran == ["autosched-lane-1" if thread == "a lane" else "autosched-calls"]
    prepared.runner = runner
    count = int(model.count)
    fast(x)
    assert int(model.count) == count + 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_runs_its_calls(callers: CallingThreads, others: list[ThreadPoolExecutor]) -> None:
    _share(callers, others)
    if (child := os.fork()) == 0:
        os._exit(0 if callers.run(_who, []) == [threading.get_ident()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert callers.run(_who, []) != [threading.get_ident()]


@pytest.mark.parametrize(("cores", "handed_over"), [(2, True), (3, True), (4, False)])
def test_schedules_that_want_most_cores_are_run_by_one_thread(
    monkeypatch: pytest.MonkeyPatch, others: list[ThreadPoolExecutor], cores: int, handed_over: bool
) -> None:
    runs: list[Callable[..., Any]] = []
    fresh = CallingThreads()
    original = fresh.run
    monkeypatch.setattr(fresh, "run", lambda run, inputs, **how: runs.append(run) or original(run, inputs, **how))
    monkeypatch.setattr(runners, "calling_threads", fresh)
    monkeypatch.setattr(runners, "usable_cores", lambda: cores)
    model = TwoBranches().eval()
    graph = two_branches_program(model)[0].graph
    files = (encode_bundle(two_branches_bundle(model, schedule=sequential(graph, width=width))) for width in (2, 1))
    wide, narrow = (load(file, model, strict=True) for file in files)
    runs.clear()
    args, kwargs = two_branches_inputs()

    def call(fast: LoadedModel) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [leaf for leaf in pytree.tree_leaves(fast(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]

    expected = call(wide)
    for pool in others * 3:
        assert all(map(torch.equal, pool.submit(call, wide).result(), expected))
    assert len(runs) == (7 if handed_over else 0)
    runs.clear()
    call(narrow)
    assert not runs


class _CallsAnother(torch.nn.Module):
    """Two branches, each with an operator that a schedule calls another one from."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nested = getattr(torch.ops.testlib, self.operator)
        return torch.tanh(nested(x)) + torch.sigmoid(nested(x + 1))


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_schedule_that_a_custom_operator_calls_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    monkeypatch.setattr(runners, "calling_threads", CallingThreads())
    monkeypatch.setattr(runners, "usable_cores", lambda: 2)
    model, (args, kwargs) = TwoBranches().eval(), two_branches_inputs()
    inner = load(encode_bundle(two_branches_bundle(model, schedule=sequential(two_branches_program(model)[0].graph, width=2))), model)
    library = torch.library.Library("testlib", "FRAGMENT")
    # PyTorch 2.11 does not get over an operator that is defined again.
    name = f"nested_{lanes}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * inner(*args, **kwargs)["sum"].mean(), "CPU")
    torch.library.register_fake(f"testlib::{name}", torch.empty_like, lib=library)
    outer, x = _CallsAnother(name).eval(), torch.randn(8, 32)
    with trusting(["testlib"]):
        program = capture(outer, (x,)).program
        graph, device = program.graph, cpu_device_key()
        second = [operator.index for operator in graph.operators if operator.kind == f"testlib::{name}"][1]
        placed = [int(lanes > 1 and index == second) for index in range(len(graph))]
        schedule = make_schedule(graph, range(len(graph)), placed, width=[2 // lanes] * len(graph))
        evidence = evidence_for(len(graph), device, graph.hash)
        file = encode_bundle(make_bundle(program, schedule, evidence, {}, device, software_key()))
    fast, expected = load(file, outer, strict=True, custom_operators=("testlib",)), outer(x)
    same: list[bool] = []

    def call(loaded: LoadedModel, *args: Any, **kwargs: Any) -> None:
        for _ in range(10):
            made = loaded(*args, **kwargs)
            same.append(loaded is inner or torch.equal(made, expected))

    callers = [threading.Thread(target=call, args=(fast, x), daemon=True) for _ in range(2)]
    callers += [threading.Thread(target=call, args=(inner, *args), kwargs=kwargs, daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    assert wait_until(lambda: len(same) == 40)
    assert all(same)
