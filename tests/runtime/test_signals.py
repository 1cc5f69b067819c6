"""A signal while a model is loaded or called: its handler's exception is the caller's and costs no schedule, nor does it wait for ever."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autosched
from autosched.capture.dynamo import alone
from autosched.core import custom_operators
from autosched.core.errors import InTheMidst
from autosched.export.bundle import encode_bundle
from autosched.runtime import float32, quick_check, shape_table, thread_count
from autosched.runtime.cuda.streams import no_garbage_collection
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.load import load
from autosched.runtime.shape_table import ShapeTable
from tests.conformance.interruptions import ends_whatever_interrupts
from tests.conformance.stateful import KeyValueCache, bundle_bytes, bundled, example, made


class Expired(RuntimeError):
    """A request has had its time: of a kind that operators raise, too."""


class Late(nn.Module):
    """Its time is over in the call ``strikes`` calls from now."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.clock = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.clock[0] -= 1
        if self.clock[0] == 0:
            signal.raise_signal(signal.SIGUSR1)
        return torch.relu(self.layer(x))


@pytest.fixture
def model() -> Iterator[Late]:
    def expire(number: int, frame: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGUSR1, expire)
    yield Late().eval()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_of_a_signal_comes_out_of_load(model: Late, strict: bool) -> None:
    x = torch.randn(2, 4)
    data = bundle_bytes(model, (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.clock[0] = 1
        with pytest.raises(Expired):
            load(data, model, strict=strict)
        assert load(data, model, strict=strict).report().scheduled


def test_an_exception_of_a_signal_at_the_first_call_costs_no_schedule(model: Late) -> None:
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model, prepare="first-use")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model.clock[0] = 1
        with pytest.raises(Expired):
            fast(x)
        torch.testing.assert_close(fast(x), model(x))
    assert fast.report().calls == 1


def test_an_exception_of_a_signal_after_a_change_of_the_model_costs_no_schedule(model: Late) -> None:
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        fast(x)
        model.layer = nn.Linear(4, 3).eval()
        model.clock[0] = 1
        with pytest.raises(Expired):
            fast(x)
        torch.testing.assert_close(fast(x), model(x))
    assert fast.report().calls == 2


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
@pytest.mark.parametrize("within", [False, True])
def test_an_exception_of_a_signal_leaves_the_modes_of_its_thread_as_they_were(
    model: Late, event: str, mode: Any, method: str, within: bool
) -> None:
    """Whatever context of PyTorch's it comes in the middle of, where there are any."""
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    code = getattr(mode, method).__code__

    def trace(frame: FrameType, now: str, argument: object) -> Any:
        if now == event and frame.f_code is code:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    with contextlib.suppress(Expired), torch.inference_mode() if within else contextlib.nullcontext():
        fast(x)
        try:
            sys.settrace(trace)
            fast(x)
        finally:
            sys.settrace(None)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


_CONTEXTS = (torch.no_grad, torch.inference_mode, TorchDispatchMode, contextlib._GeneratorContextManager)


@pytest.mark.parametrize("event", ["call", "return"])
def test_an_exception_of_a_signal_while_a_schedule_is_bound_leaves_its_thread_as_it_was(model: Late, event: str) -> None:
    """Wherever something is put in place for a while, and put back."""
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    codes = {getattr(context, method).__code__ for context in _CONTEXTS for method in ("__enter__", "__exit__")}
    codes.add(thread_count.use_threads.__code__)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        for place in itertools.count():
            left = [None] * place

            def trace(frame: FrameType, now: str, argument: object, left: list[None] = left) -> Any:
                if now == event and frame.f_code in codes:
                    if not left:
                        signal.raise_signal(signal.SIGUSR1)
                    left.pop()
                return trace

            struck: list[Expired] = []
            try:
                sys.settrace(trace)
                fast.refresh()
            except Expired as error:
                # Kept for a while, as by a log.
                struck.append(error)
            finally:
                sys.settrace(None)
            assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (threads + 1, True, False)
            calls = fast.report().calls
            fast(x)
            assert (fast.report().calls, fast.report().stepped_aside) == (calls + 1, ())
            if not struck:
                break
        assert place > 20
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("moment", ["_borrow", "_give_back"])
def test_an_exception_of_a_signal_pins_no_shape_in_memory(model: Late, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    x, y = torch.randn(2, 4), torch.randn(3, 4)
    data = encode_bundle(*(bundled(model, (given,))[1] for given in (x, y)))
    fast = load(data, model, max_shapes=1)
    real = getattr(ShapeTable, moment)

    def struck(self: ShapeTable, *args: object) -> None:
        # At its end, or where its first instruction would have been.
        if moment == "_borrow":
            real(self, *args)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)

    with torch.no_grad():
        monkeypatch.setattr(ShapeTable, moment, struck)
        with pytest.raises(Expired):
            fast(x)
        fast(y)
        assert [shape.ready for shape in fast.report().shapes] == [False, True]
        fast(x)
        assert [shape.ready for shape in fast.report().shapes] == [True, False]


def test_refresh_within_a_call_of_its_thread_waits_for_the_next_call(model: Late) -> None:
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    assert fast._table is not None
    prepared = fast._table.slots[0].prepared
    assert prepared is not None
    real, seen = prepared.runner, prepared.seen
    refreshed: list[bool] = []

    def handled(tensors: Sequence[Tensor]) -> list[Tensor]:
        # As a handler does that a signal calls in the midst of the run.
        fast.refresh()
        refreshed.append(prepared.seen is not seen)
        return real(tensors)

    prepared.runner = handled
    caller = threading.Thread(target=lambda: [fast(x), fast(x)], daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert refreshed == [False]
    assert prepared.seen is not seen
    assert fast.report().calls == 2


def test_a_refresh_that_is_interrupted_is_made_up_for_at_the_next_call(model: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    assert fast._table is not None
    prepared = fast._table.slots[0].prepared
    assert prepared is not None
    seen = [prepared.seen]

    def struck(self: ShapeTable, *args: object) -> None:
        monkeypatch.undo()
        raise Expired

    monkeypatch.setattr(ShapeTable, "refresh", struck)
    with pytest.raises(Expired):
        fast.refresh()
    for _ in range(3):
        fast(x)
        seen.append(prepared.seen)
    # Once.
    assert [after is before for before, after in itertools.pairwise(seen)] == [False, True, True]
    assert fast.report().calls == 3


def test_a_call_that_interrupts_the_counting_of_fallbacks_does_not_wait_for_it(model: Late) -> None:
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    model.train()
    with pytest.warns(match="another mode"):
        # Outside of a call: it is refresh() that warns.
        assert ends_whatever_interrupts(fast.refresh, {LoadedModel._warn.__code__}, lambda: fast(x))


@pytest.mark.parametrize("when", ["first call", "later", "new weights", "state"])
def test_a_schedule_that_waits_for_no_call_of_its_own_thread_runs_again_afterwards(
    model: Late, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """On a GPU two models take turns, and a signal's handler may call one of them in a call of the other."""
    kept: Any = made(KeyValueCache) if when == "state" else model
    x = example() if when == "state" else torch.randn(2, 4)
    data = bundle_bytes(kept, (x,))
    fast, other = load(data, kept, prepare="first-use" if when == "first call" else "all"), copy.deepcopy(kept)
    if when == "new weights":
        for each in (kept, other):
            each.layer.bias = nn.Parameter(torch.ones(3))
    assert fast._table is not None
    prepared: Any = fast._table.slots[0].prepared

    def busy(*args: object) -> list[Tensor]:
        if when == "state":
            # As where a graph is about to be launched on the caller's memory.
            prepared.overwriting.begun.set(True)
        raise InTheMidst("its thread is in the midst of a call")

    with torch.no_grad():
        with monkeypatch.context() as patch:
            # Of one that is made now, or of the one there is.
            patch.setattr(LaneExecutor, "run", busy)
            if when in ("later", "state"):
                patch.setattr(prepared, "runner", busy)
            with pytest.warns(FallbackWarning, match="in the midst of a call") as said:
                answers = [fast(x) for _ in range(3)]
        torch.testing.assert_close(answers, [other(x) for _ in range(3)])
        assert (len(said), fast.report().calls) == (1, 0)
        for _ in range(3):
            torch.testing.assert_close(fast(x), other(x))
    assert fast.report().calls == 3


def test_a_refresh_that_would_wait_for_a_call_of_its_own_thread_is_made_up_for(model: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    assert fast._table is not None
    prepared = fast._table.slots[0].prepared
    assert prepared is not None
    seen = prepared.seen

    def busy(*args: object) -> list[Tensor]:
        raise InTheMidst("its thread is in the midst of a call")

    with monkeypatch.context() as patch:
        patch.setattr(LaneExecutor, "run", busy)
        fast.refresh()
    assert prepared.seen is seen
    fast(x)
    assert prepared.seen is not seen
    assert fast.report().calls == 1


class _Struck:
    """As ``real``, but for a method after which the time is over."""

    def __init__(self, real: Any, method: str) -> None:
        self._real, self._method = real, method

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)

        def then_over(*args: Any, **kwargs: Any) -> None:
            found(*args, **kwargs)
            signal.raise_signal(signal.SIGUSR1)

        return then_over if name == self._method else found


def test_an_exception_of_a_signal_when_something_was_just_set_does_not_leave_it_set(model: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(context: Any) -> None:
        with pytest.raises(Expired), context:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(custom_operators, "_trusted", _Struck(custom_operators._trusted, "set"))
        # What puts it back is interrupted as well, when that was done.
        refused(custom_operators.trusting(("mine",)))
    assert custom_operators.trusted() == frozenset()
    with monkeypatch.context() as patch:
        patch.setattr(float32._turn, "lock", _Struck(float32._turn.lock, "acquire"))
        refused(float32.as_it_is_set())
    assert not float32.has_turn()
    with monkeypatch.context() as patch:
        patch.setattr(gc, "disable", _Struck(gc, "disable").disable)
        refused(no_garbage_collection())
    assert gc.isenabled()
    precisions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for owner, name, context in (
        (torch, "set_float32_matmul_precision", float32.full_float32),
        (float32, "round_convolutions", float32.full_convolutions),
    ):
        torch.set_float32_matmul_precision("high")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, getattr(_Struck(owner, name), name))
            refused(context())
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", precisions[1])
    torch.set_float32_matmul_precision(precisions[0])


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("work", ["load", "compile"])
def test_an_exception_of_a_signal_while_a_model_is_loaded_or_compiled_leaves_its_thread_as_it_was(
    model: Late, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: str, event: str
) -> None:
    """Where what lasts as long as that is put in place, and put back."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    x = torch.randn(2, 4)
    data = bundle_bytes(model, (x,))
    codes = {getattr(context, method).__code__ for context in _CONTEXTS for method in ("__enter__", "__exit__")}
    owner = {"load": "autosched.runtime.load", "compile": "autosched.compiled"}[work]
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads(), custom_operators.trusted()
    lock: Any = alone()
    for place in itertools.count():
        left = [None] * place

        def trace(frame: FrameType, now: str, argument: object, left: list[None] = left) -> Any:
            if now == event and frame.f_code in codes and frame.f_back is not None and frame.f_back.f_globals["__name__"] == owner:
                if not left:
                    signal.raise_signal(signal.SIGUSR1)
                left.pop()
            return trace

        struck: list[Expired] = []
        try:
            sys.settrace(trace)
            if work == "load":
                load(data, model, custom_operators=("mine",))
            else:
                autosched.compile(model, (x,), custom_operators=("mine",))
        except Expired as error:
            # Kept for a while, as by a log.
            struck.append(error)
        finally:
            sys.settrace(None)
        now = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads(), custom_operators.trusted()
        assert now == state
        assert not lock._is_owned()
        assert not float32.has_turn()
        if not struck:
            break
    assert place >= 2


@pytest.mark.parametrize(("owner", "name"), [(shape_table, "leaf_key"), (quick_check, "_made")])
def test_an_exception_of_a_signal_while_a_call_is_recognised_comes_out_of_it(
    model: Late, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """A tensor that nothing can be asked of raises errors of the same kind."""
    x = torch.randn(2, 4)
    fast = load(bundle_bytes(model, (x,)), model)
    quick_check._guard.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, getattr(_Struck(owner, name), name))
        with pytest.raises(Expired):
            fast(x)
    fast(x)
    assert (fast.report().calls, fast.report().stepped_aside) == (1, ())
