"""A process forked from one that loaded a model runs it: OpenMP's threads, lanes and locks do not keep it waiting."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from autosched.capture import dynamo
from autosched.core import decoding, forks
from autosched.core.errors import AutoschedError
from autosched.export.bundle import encode_bundle
from autosched.runtime import cache, forking, state
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.inductor import cpp_kernels
from autosched.runtime.load import load
from autosched.runtime.state import turn_of
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.forked import run_forked
from tests.conformance.graphs import TwoBranches, two_branches_inputs
from tests.conformance.stateful import Recurrent, bundle_bytes, example, made

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="forks, and PyTorch brings GNU's OpenMP")

# The parent's threads call all the time where BUSY, and a parallel region of OpenMP has run in the thread that forks.
_SERVER = """
import os, sys, threading, warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
import autosched
from tests.conformance.graphs import TwoBranches, two_branches_inputs

torch.set_num_threads(2)
torch.manual_seed(0)
model = TwoBranches().eval()
args, kwargs = two_branches_inputs()
square = torch.randn(512, 512)
data = open(sys.argv[1], "rb").read()
fast = autosched.load(data, model, strict=True)

def answer(loaded):
    return loaded(*args, **kwargs)["sum"]

assert fast.report().lanes == 2
with torch.inference_mode():
    expected, wide = answer(fast), square.exp()
leaving = threading.Event()

def call():
    while not leaving.is_set():
        answer(fast)

busy = [threading.Thread(target=call, daemon=True) for _ in range(int(sys.argv[2]))]
for thread in busy:
    thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        with torch.inference_mode():
            same = [torch.equal(answer(fast), expected), torch.equal(square.exp(), wide)]
            same.append(torch.equal(answer(autosched.load(data, model, strict=True)), expected))
        os._exit(0 if all(same) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
leaving.set()
for thread in busy:
    thread.join()
with torch.inference_mode():
    assert torch.equal(answer(fast), expected) and torch.equal(square.exp(), wide)
print("all answered")
"""


@needs_fork
@pytest.mark.parametrize("callers", [0, 2])
def test_a_forked_process_runs_what_its_parent_loaded(tmp_path: Path, callers: int) -> None:
    _serve_and_fork(tmp_path, callers)


@needs_fork
@pytest.mark.usefixtures("native")
def test_a_forked_process_runs_native_lanes(tmp_path: Path) -> None:
    _serve_and_fork(tmp_path, 2)


def _serve_and_fork(tmp_path: Path, callers: int) -> None:
    torch.manual_seed(0)
    bundle = tmp_path / "two.autosched"
    bundle.write_bytes(encode_bundle(two_branches_bundle(TwoBranches().eval(), lanes=2)))
    said = run_forked(_SERVER, str(bundle), str(callers), timeout_s=200)
    assert said.stdout == "all answered\n", said.stderr


def test_after_a_fork_nothing_waits_for_calls_of_the_parent() -> None:
    model = TwoBranches().eval()
    fast = load(encode_bundle(two_branches_bundle(model, lanes=2)), model, strict=True)
    table = fast._table
    assert table is not None
    args, kwargs = two_branches_inputs()
    expected = fast(*args, **kwargs)["sum"]
    (slot,) = table.slots
    slot._lock.acquire()
    table._lock.acquire()
    table._used[0] = slot
    forks.tell_all()
    answers: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: answers.append(fast(*args, **kwargs)["sum"]), daemon=True)
    caller.start()
    caller.join(60)
    assert len(answers) == 1
    assert torch.equal(answers[0], expected)
    assert not table._used


def _held_for_ever(lock: AbstractContextManager[object]) -> None:
    """Take a lock on a thread that ends without giving it back, as one does that a forked process does not have."""
    taker = threading.Thread(target=lock.__enter__)
    taker.start()
    taker.join()


def _opens(lock: Any) -> bool:
    if found := lock.acquire(blocking=False):
        lock.release()
    return bool(found)


def _ends(work: Callable[[], object]) -> bool:
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(20)
    return not worker.is_alive()


def test_after_a_fork_a_model_with_state_does_not_wait_for_its_turn() -> None:
    model, x = made(Recurrent), example()
    fast = load(bundle_bytes(model, (x,)), model, strict=True)
    _held_for_ever(turn_of(model).lock)
    forks.tell_all()
    answers: list[torch.Tensor] = []
    assert _ends(lambda: answers.append(fast(x)))
    model.reset()
    assert torch.allclose(answers[0], fast(x))


def test_after_a_fork_a_call_that_steps_aside_does_not_wait_to_note_it() -> None:
    model, x = made(Recurrent), example()
    fast = load(bundle_bytes(model, (x,)), model)
    _held_for_ever(fast._notes.lock)
    forks.tell_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert _ends(lambda: fast(x.double().float().requires_grad_()))
    assert len(fast.report().stepped_aside) == 1


def test_after_a_fork_nothing_is_left_that_only_a_thread_of_the_parent_could_open() -> None:
    locks = [decoding._lock, cache._lock, state._making, cpp_kernels._patching, dynamo._tracing]
    before = [renewed.lock for renewed in locks]
    try:
        for lock in before:
            _held_for_ever(lock)
        forks.tell_all()
        assert all(_opens(renewed.lock) for renewed in locks)
        assert not any(_opens(lock) for lock in before)
    finally:
        for renewed in locks:
            renewed.lock = threading.RLock()


def test_after_a_fork_nobody_waits_for_a_compilation_of_the_parents() -> None:
    convert_frame = pytest.importorskip("torch._dynamo.convert_frame")
    before = convert_frame.compile_lock

    def traces() -> None:
        with dynamo.alone():
            pass

    try:
        with before:
            forks.tell_all()
            # Whoever forks within it gives it back in both processes.
            assert convert_frame.compile_lock is before
        _held_for_ever(before)
        forks.tell_all()
        assert _ends(traces)
        assert not _opens(before)
    finally:
        convert_frame.compile_lock = threading.RLock()


_COMPILED_BEFORE = """
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from autosched.runtime.inductor import hung

torch._inductor.config.compile_threads = 2
AsyncCompile.pool().submit(int).result()
child = os.fork()
if child == 0:
    threading.Timer(30, os._exit, [3]).start()
    AsyncCompile.pool().submit(int).result()
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
print("compiles")
"""


@needs_fork
def test_a_process_whose_parent_has_compiled_compiles() -> None:
    said = run_forked(_COMPILED_BEFORE, timeout_s=200)
    assert said.stdout == "compiles\n", said.stderr


def test_a_block_that_was_forked_in_ends_in_both_processes() -> None:
    renewed = forks.RenewedLock()
    with renewed.lock:
        forks.tell_all()
        with renewed.lock:
            pass
    with renewed.lock:
        pass


_BUSY_STATE = """
import os, sys, threading, time, warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
import autosched
from tests.conformance.stateful import Recurrent, bundle_bytes, example, made

torch.set_num_threads(1)
model, x = made(Recurrent), example()
data = bundle_bytes(model, (x,))
fast = autosched.load(data, model, strict=True)
inside, go_on = threading.Event(), threading.Event()
runner = fast._table.slots[0].prepared.runner

def slow(inputs):
    inside.set()
    assert go_on.wait(60)
    return runner(inputs)

fast._table.slots[0].prepared.runner = slow
busy = threading.Thread(target=fast, args=(x,))
busy.start()
assert inside.wait(60)
child = os.fork()
if child == 0:
    fast._table.slots[0].prepared.runner = runner
    threading.Timer(30, os._exit, [3]).start()
    fast(x)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
busy.join()
assert status == 0, status
print("all answered")
"""


@needs_fork
def test_a_process_forked_during_a_call_of_a_model_with_state_answers() -> None:
    said = run_forked(_BUSY_STATE, timeout_s=200)
    assert said.stdout == "all answered\n", said.stderr


def test_a_schedule_on_cuda_is_refused_after_a_fork_and_given_back_by_nobody() -> None:
    model = TwoBranches().eval()
    fast = load(encode_bundle(two_branches_bundle(model, lanes=2)), model, strict=True)
    table = fast._table
    assert table is not None
    args, kwargs = two_branches_inputs()
    closed: list[object] = []
    prepared = table.slots[0].prepared
    assert prepared is not None
    prepared.close = lambda: closed.append(prepared)  # type: ignore[method-assign]
    table.kind = "cuda"
    # In a process that a forked one has forked, too.
    for _ in range(2):
        table.after_fork()
        assert table.slots[0]._of_parent is prepared
    table.kind = "cpu"
    with pytest.raises(AutoschedError, match="load in each process"):
        fast(*args, **kwargs)
    assert not closed
    assert not fast.report().scheduled


def test_an_openmp_that_cannot_rest_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r--p 00000000 00:00 1 /no/such/libgomp.so.1\n7f02-7f03 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr(forking, "_MAPS", maps)
    forking._openmp_pauses.cache_clear()
    try:
        assert forking._openmp_pauses() == ()
    finally:
        forking._openmp_pauses.cache_clear()
