"""Example inputs out of real use: the forms of a model's calls, as they were when they were made."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched import recording
from autosched.capture.export import capture
from autosched.core.errors import UsageError
from autosched.recording import record_calls


class Step(nn.Module):
    """Adds a token to the cache that it is given, in place."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        cache[0] += 1
        return x * scale + cache.sum()


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        cache = torch.zeros(3)
        for _ in range(steps):
            x = self.step(x[-1:], cache, scale=0.5) if len(x) == 1 else self.step(x, cache=cache)[-1:]
        return x


@pytest.fixture
def loop() -> Loop:
    return Loop().eval()


def test_each_form_of_call_is_recorded_once_in_the_order_in_which_it_came(loop: Loop) -> None:
    first, later = record_calls(loop.step, lambda: loop(torch.arange(4.0), 5))
    assert (first.times, later.times) == (1, 4)
    assert [tuple(item.shape) for item in first.args] == [(4,)]
    assert tuple(first.kwargs) == ("cache",)
    assert later.kwargs == {"scale": 0.5}


def test_what_a_call_changes_is_recorded_as_it_was_before(loop: Loop) -> None:
    first, later = record_calls(loop.step, lambda: loop(torch.arange(4.0), 5))
    assert first.kwargs["cache"].tolist() == [0, 0, 0]
    assert later.args[1].tolist() == [1, 0, 0]


def test_the_recorded_call_is_one_to_tune_for(loop: Loop) -> None:
    _, later = record_calls(loop.step, lambda: loop(torch.arange(4.0), 5))
    tuned = autosched.tune(loop.step, later.args, later.kwargs, device="cpu", effort="quick", budget_s=3)
    expected = loop(torch.arange(4.0), 5)
    fast = loop.step.forward = autosched.load(tuned.to_bytes(), loop.step)  # type: ignore[method-assign]
    with torch.no_grad(), pytest.warns(autosched.FallbackWarning, match=r"input 0 is \[4\]"):
        torch.testing.assert_close(loop(torch.arange(4.0), 5), expected)
    assert fast.report().calls == 4


def test_plain_values_and_dtypes_make_another_form() -> None:
    step = Step()
    x, cache = torch.ones(2), torch.zeros(2)

    def run() -> None:
        for given, scale in ((x, 1.0), (x, 2.0), (x.double(), 1.0), (x, 1.0)):
            step(given, cache, scale=scale)

    assert [call.times for call in record_calls(step, run)] == [2, 1, 1]


def test_objects_that_hold_tensors_are_copied_as_the_call_is_made() -> None:
    class Appending(nn.Module):
        def forward(self, x: torch.Tensor, state: Holder) -> Holder:
            state.value += x
            return state

    model = Appending()
    mine = Holder(torch.zeros(2))
    (call,) = record_calls(model, lambda: [model(torch.ones(2), mine) for _ in range(3)])
    assert call.times == 3
    assert type(call.args[1]) is Holder
    assert call.args[1] is not mine
    assert call.args[1].value.tolist() == [0, 0]
    assert mine.value.tolist() == [3, 3]


@dataclass
class Holder:
    value: torch.Tensor


def test_forms_beyond_the_most_are_let_through_and_forgotten(loop: Loop) -> None:
    calls = record_calls(loop.step, lambda: [loop.step(torch.ones(size), torch.zeros(1)) for size in (1, 2, 3, 1)], most=2)
    assert [(tuple(call.args[0].shape), call.times) for call in calls] == [((1,), 2), ((2,), 1)]


def test_calls_of_several_threads_are_all_counted(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the threads take turns: they meet at every copy, which is where one call is noted while another comes."""
    threads, calls, meeting = 4, 6, threading.Barrier(4)
    copied = recording._copy

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)
        return copied(tensor)

    monkeypatch.setattr(recording, "_copy", copy)

    def serve(_: int) -> None:
        for length in range(1, calls + 1):
            loop.step(torch.zeros(length), torch.zeros(3))

    def run() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(serve, range(threads)))

    recorded = record_calls(loop.step, run)
    assert [len(call.args[0]) for call in recorded] == list(range(1, calls + 1))
    assert [call.times for call in recorded] == [threads] * calls


def test_a_model_that_was_not_called_is_named(loop: Loop) -> None:
    with pytest.raises(UsageError, match=r"no call of the Loop.*expected one.*a part of the model"):
        record_calls(loop, lambda: loop.step(torch.ones(1), torch.zeros(1)))


class Encoder(nn.Module):
    """Calls a part as sentence-transformers does: its ``forward``, past the hooks, with those arguments that this names."""

    def __init__(self) -> None:
        super().__init__()
        self.step = Step()

    def forward(self, **given: Any) -> torch.Tensor:
        takes = inspect.signature(self.step.forward).parameters
        return self.step.forward(**{name: value for name, value in given.items() if name in takes})


def test_a_part_whose_forward_is_called_past_its_hooks_is_recorded() -> None:
    model = Encoder().eval()
    given = {"x": torch.ones(2), "cache": torch.zeros(3), "labels": None}
    (call,) = record_calls(model.step, lambda: [model(**given) for _ in range(2)])
    assert call.times == 2
    assert call.kwargs["cache"].tolist() == [0, 0, 0]
    assert sorted(call.kwargs) == ["cache", "x"]
    assert "forward" not in vars(model.step)


def test_a_call_through_the_hooks_is_counted_once_and_as_it_came() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda module, args: (args[0][:1],))
    mine = model.forward = functools.partial(model.forward)  # type: ignore[method-assign]
    (call,) = record_calls(model, lambda: model(torch.ones(3, 2)))
    assert (call.times, tuple(call.args[0].shape)) == (1, (3, 2))
    assert vars(model)["forward"] is mine


def test_a_call_past_the_hooks_is_counted_after_one_that_a_hook_refused() -> None:
    model = nn.Linear(4, 4).eval()

    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args[0]) > 2:
            raise ValueError("too many rows")

    model.register_forward_pre_hook(refuse)

    def run() -> None:
        with pytest.raises(ValueError, match="too many rows"):
            model(torch.ones(3, 4))
        model.forward(torch.ones(2, 4))
        model.forward(torch.ones(2, 4))

    refused, direct = autosched.record_calls(model, run)
    assert (refused.times, direct.times) == (1, 2)


def test_nothing_is_left_on_the_model_even_if_what_ran_failed(loop: Loop) -> None:
    def fails() -> None:
        loop(torch.ones(1), 1)
        raise ValueError("enough")

    before: Mapping[str, Any] = dict(vars(loop))
    with pytest.raises(ValueError, match="enough"):
        record_calls(loop, fails)
    assert not loop._forward_pre_hooks
    assert not loop._forward_pre_hooks_with_kwargs
    assert vars(loop).keys() == before.keys()


def test_calls_within_code_that_was_compiled_before_are_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    (call,) = record_calls(model[1], lambda: [compiled(x) for _ in range(3)])
    assert call.times == 3
    assert torch.equal(call.args[0], model[0](x))


def test_what_was_made_in_inference_mode_is_recorded_as_tensors_that_can_be_written_to() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
            return total.add_(x) * 2

    model = Adds().eval()

    @torch.inference_mode()
    def run() -> None:
        model(torch.ones(3), torch.zeros(3))

    (call,) = record_calls(model, run)
    assert not any(tensor.is_inference() for tensor in call.args)
    assert len(capture(model, call.args).program.writes) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.ReLU().forward, print), r"got a method as model; expected a torch\.nn\.Module"),
        ((nn.ReLU(), torch.ones(1)), r"got a Tensor as run.*lambda"),
        ((nn.ReLU(), print, 0), "most=0; expected a whole number, 1 or more"),
        ((nn.ReLU(), print, "3"), "most='3'; expected a whole number"),
    ],
)
def test_arguments_that_are_something_else_are_refused_with_what_to_write(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        record_calls(*arguments)


@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1))])  # type: ignore[no-untyped-call]
def test_of_a_module_that_was_scripted_or_traced_the_module_of_python_is_asked_for(make: Any) -> None:
    with pytest.raises(UsageError, match=r"Module as model, .*Give the one that was scripted or traced"):
        record_calls(make(nn.ReLU()), print)
