"""A schedule in its model's place (``part.forward = loaded``), and what libraries do with the module that it is then a part of."""

from __future__ import annotations

import copy
import functools
import gc
import io
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched.capture.export import capture
from autosched.core.errors import AutoschedError, UsageError
from autosched.core.standing_aside import schedule_within
from autosched.export.bundle import encode_bundle
from autosched.recording import record_calls
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.load import load
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches
from tests.conformance.stateful import bundle_bytes


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = TwoBranches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.part(x, **more(x))["sum"] * 2
        return answer


def more(x: torch.Tensor) -> dict[str, Any]:
    return {"more": {"shift": x + 1, "flag": True}}


def pickled(model: nn.Module) -> nn.Module:
    back: nn.Module = ForkingPickler.loads(ForkingPickler.dumps(model))
    return back


def saved(model: nn.Module) -> nn.Module:
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    back: nn.Module = torch.load(kept, weights_only=False)
    return back


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


@pytest.fixture
def outer() -> Outer:
    return Outer().eval()


@pytest.fixture
def fast(outer: Outer) -> LoadedModel:
    loaded = load(encode_bundle(two_branches_bundle(outer.part)), outer.part)
    outer.part.forward = loaded  # type: ignore[method-assign]
    return loaded


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, averaged])
def test_a_copy_is_the_model_as_it_came_with_weights_of_its_own(
    outer: Outer, fast: LoadedModel, x: torch.Tensor, copied: Callable[[Outer], Outer]
) -> None:
    with pytest.warns(FallbackWarning, match="a copy of TwoBranches without a schedule.*load the file for the copy"):
        other = copied(outer)
    with torch.no_grad():
        expected = outer(x)
        torch.testing.assert_close(other(x), expected)
        assert fast.report().calls == 1
        other.part.left.weight = nn.Parameter(other.part.left.weight * 3)
        assert not torch.allclose(other(x), expected)
        torch.testing.assert_close(outer(x), expected)
    assert fast.report().calls == 2
    theirs = load(encode_bundle(two_branches_bundle(other.part)), other.part, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x, **more(x))["sum"] * 2, other(x))


def test_who_wants_an_error_gets_one_for_a_copy(outer: Outer) -> None:
    outer.part.forward = load(encode_bundle(two_branches_bundle(outer.part)), outer.part, strict=True)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"cannot be pickled or copied.*del model\.forward"):
        copy.deepcopy(outer)


def test_a_newer_file_is_compared_with_the_model_and_nothing_of_the_older_is_kept(outer: Outer, x: torch.Tensor) -> None:
    fast = outer.part.forward = load(encode_bundle(two_branches_bundle(outer.part)), outer.part)  # type: ignore[method-assign]
    gone = weakref.ref(fast)
    newer = load(encode_bundle(two_branches_bundle(outer.part)), outer.part, strict=True)
    assert fast.report().calls == 0
    assert fast.report().stepped_aside == ()
    outer.part.forward = newer  # type: ignore[method-assign]
    with torch.no_grad():
        outer(x)
    assert newer.report().calls == 1
    del fast
    gc.collect()
    assert gone() is None
    # Where the newer one steps aside, the model itself answers.
    newer.__init__(outer.part, None, newer.report(), strict=False)  # type: ignore[misc]
    with torch.no_grad():
        assert outer(x).shape == x.shape


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_captured_is_the_model_itself(outer: Outer, x: torch.Tensor, strict: bool) -> None:
    kept = encode_bundle(two_branches_bundle(outer.part))
    fast = load(kept, outer.part, strict=strict)
    before = capture(outer, (x,)), capture(outer.part, (x,), more(x))
    outer.part.forward = fast  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = capture(outer, (x,)), capture(outer.part, (x,), more(x))
    assert [each.program.graph.hash for each in now] == [each.program.graph.hash for each in before]
    assert (fast.report().calls, fast.report().stepped_aside) == (0, ())
    with torch.no_grad():
        outer(x)
    assert fast.report().calls == 1


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_tuned_or_compiled_is_the_model_itself(outer: Outer, x: torch.Tensor, strict: bool) -> None:
    fast = load(encode_bundle(two_branches_bundle(outer.part)), outer.part, strict=strict)
    outer.part.forward = fast  # type: ignore[method-assign]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FallbackWarning)
        tuned = autosched.tune(outer, (x,), device="cpu", effort="quick", budget_s=3)
        compiled = autosched.compile(outer, (x,))
        assert (fast.report().calls, fast.report().stepped_aside) == (0, ())
        expected = outer(x)
        torch.testing.assert_close(autosched.load(tuned.to_bytes(), outer, strict=True)(x), expected)
        torch.testing.assert_close(compiled(x), expected)


@pytest.mark.timeout(60)
def test_refresh_asks_the_model_in_whose_place_it_is(outer: Outer, fast: LoadedModel, x: torch.Tensor) -> None:
    with torch.no_grad():
        before = outer(x)
        outer.part.left.weight.data.mul_(3)
        fast.refresh()
        now = outer(x)
        del outer.part.forward
        torch.testing.assert_close(now, outer(x))
    assert not torch.allclose(now, before)
    assert fast.report().calls == 2


class Adapters(nn.Module):
    """A layer with one of two adapters, as peft keeps them: a switch takes the other one's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("one", "two")})
        self.active = ["one"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        for name in self.active:
            y = y + self.adapters[name](x)
        return y


@pytest.mark.timeout(60)
def test_a_schedule_that_was_given_up_for_another_adapter_is_used_again_when_its_own_is_back(x: torch.Tensor) -> None:
    model = Adapters().eval()
    fast = model.forward = load(bundle_bytes(model, (x,)), model)  # type: ignore[method-assign]

    def calls() -> int:
        before = fast.report().calls
        with torch.no_grad():
            torch.testing.assert_close(model(x), Adapters.forward(model, x))
        return fast.report().calls - before

    assert calls() == 1
    model.active = ["two"]
    with pytest.warns(FallbackWarning, match=r"no longer fits(.|\n)*outputs differ"):
        assert calls() == 0
    # Without being told it does not look.
    fast.refresh()
    assert not fast.report().scheduled
    assert calls() == 0
    model.active = ["one"]
    fast.refresh()
    assert fast.report().scheduled
    assert [calls(), calls()] == [1, 1]
    model.active = []
    assert calls() == 0
    model.active = ["one"]
    fast.refresh()
    assert calls() == 1


def test_it_is_asked_what_a_function_is_asked(outer: Outer, fast: LoadedModel, x: torch.Tensor) -> None:
    method = TwoBranches.forward
    assert (fast.__name__, fast.__code__, fast.__doc__) == ("forward", method.__code__, method.__doc__)
    assert typing.get_type_hints(fast) == typing.get_type_hints(method)
    # Who finds the function within would call that.
    assert not hasattr(fast, "__func__")
    assert not hasattr(fast, "__wrapped__")
    with pytest.warns(FallbackWarning, match="dispatch mode"):
        torch.export.export(outer.part, (x,), more(x))


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_in_place_of_a_partial_it_is_asked_what_the_function_within_is(outer: Outer, x: torch.Tensor) -> None:
    kept = encode_bundle(two_branches_bundle(outer.part))
    outer.part.forward = hooked(outer.part.forward, outer.part)  # type: ignore[method-assign]
    around = outer.part.forward.func  # type: ignore[attr-defined]
    fast = outer.part.forward = load(kept, outer.part)  # type: ignore[method-assign]
    assert (fast.__name__, fast.__code__) == ("forward", around.__code__)
    # Both ask where its code is.
    torch.export.export(outer.part, (x,), more(x))
    assert capture(outer.part, (x,), more(x)).program.graph.operators


def test_each_call_is_recorded_once_and_runs_as_it_came(outer: Outer, fast: LoadedModel, x: torch.Tensor) -> None:
    seen: list[int] = []
    outer.part.register_forward_pre_hook(lambda _, __: seen.append(1))
    with torch.no_grad():
        calls = record_calls(outer.part, lambda: [outer(x), outer(x[:2])])
    assert [call.times for call in calls] == [1, 1]
    assert len(seen) == 2
    assert fast.report().calls == 0


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_within_a_function_that_a_library_puts_around_it_a_call_is_one_call(outer: Outer, fast: LoadedModel, x: torch.Tensor) -> None:
    seen: list[int] = []
    outer.part.register_forward_pre_hook(lambda _, __: seen.append(1))
    outer.part.forward = functools.update_wrapper(functools.partial(fast), fast)  # type: ignore[method-assign]
    with torch.no_grad():
        outer(x[:2])
    assert len(seen) == 1


# One of all modules hears those of the tracer, too.
def steered(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
    return output + 1 if isinstance(module, Adapters) else output


def doubled(module: nn.Module, args: tuple[torch.Tensor]) -> Any:
    return (args[0] * 2,) if isinstance(module, Adapters) else args


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "after": lambda model: model.register_forward_hook(steered),
    "before": lambda model: model.register_forward_pre_hook(doubled),
    "after, of all modules": lambda model: nn.modules.module.register_module_forward_hook(steered),
    "before, of all modules": lambda model: nn.modules.module.register_module_forward_pre_hook(doubled),
}


@pytest.mark.parametrize("prepare", ["all", "first-use"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_were_captured_do_not_run_twice(name: str, x: torch.Tensor, prepare: Any) -> None:
    model = Adapters().eval()
    handle = HOOKS[name](model)
    try:
        kept = bundle_bytes(model, (x,))
        with torch.no_grad():
            expected = model(x)
            fast = load(kept, model, prepare=prepare)
            # Beside the model it does all that a call of the model does.
            torch.testing.assert_close(fast(x), expected)
            assert fast.report().calls == 1
            model.forward = fast  # type: ignore[method-assign]
            with pytest.warns(FallbackWarning, match="forward hooks"):
                torch.testing.assert_close(model(x), expected)
            model.forward = functools.update_wrapper(functools.partial(fast), fast)  # type: ignore[method-assign]
            torch.testing.assert_close(model(x), expected)
            assert fast.report().calls == 1
            model.forward = load(kept, model, strict=True)  # type: ignore[method-assign]
            with pytest.raises(AutoschedError, match="forward hooks"):
                model(x)
    finally:
        handle.remove()


def test_hooks_of_a_part_are_no_obstacle_in_the_models_place(x: torch.Tensor) -> None:
    model = Adapters().eval()
    model.base.register_forward_hook(lambda module, args, output: output + 1)
    with torch.no_grad():
        expected = model(x)
        fast = model.forward = load(bundle_bytes(model, (x,)), model, strict=True)  # type: ignore[method-assign]
        torch.testing.assert_close(model(x), expected)
    assert fast.report().calls == 1


def test_hooks_that_were_added_later_run_once(x: torch.Tensor) -> None:
    model = Adapters().eval()
    with torch.no_grad():
        model.forward = load(bundle_bytes(model, (x,)), model)  # type: ignore[method-assign]
        expected = model(x) + 1
        model.register_forward_hook(steered)
        with pytest.warns(FallbackWarning, match="forward hooks"):
            torch.testing.assert_close(model(x), expected)


def partial_of(forward: Any, part: nn.Module) -> Any:
    return functools.partial(forward)


def wrapped(forward: Any, part: nn.Module) -> Any:
    @functools.wraps(forward)
    def around(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return around


def bound(forward: Any, part: nn.Module) -> Any:
    @functools.wraps(forward)
    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return types.MethodType(around, part)


def hooked(forward: Any, part: nn.Module) -> Any:
    """As accelerate's ``add_hook_to_module``."""

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return functools.update_wrapper(functools.partial(new_forward, part), forward)


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("around", [partial_of, wrapped, bound, hooked])
def test_within_a_function_of_a_library_it_stands_aside_and_is_refreshed(outer: Outer, x: torch.Tensor, around: Any) -> None:
    kept = encode_bundle(two_branches_bundle(outer.part))
    fast = load(kept, outer.part, strict=True)
    outer.part.forward = around(fast, outer.part)  # type: ignore[method-assign]
    fast.refresh()
    newer = load(kept, outer.part)
    assert fast.report().calls == 0
    outer.part.forward = newer  # type: ignore[method-assign]
    newer.refresh()
    with torch.no_grad():
        outer(x)
        assert (fast.report().calls, newer.report().calls) == (0, 1)
        # Where the newer one steps aside, the model itself answers.
        with pytest.warns(FallbackWarning):
            outer(x[:2])
    assert fast.report().calls == 0


@pytest.mark.timeout(60, method="thread")
def test_within_a_function_that_does_not_say_so_it_is_refreshed(outer: Outer) -> None:
    fast = load(encode_bundle(two_branches_bundle(outer.part)), outer.part, strict=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return fast(*args, **kwargs)

    outer.part.forward = forward  # type: ignore[method-assign]
    fast.refresh()
    assert fast.report().calls == 0


def test_functions_that_are_around_each_other_hold_no_schedule() -> None:
    one, other = (lambda: None), (lambda: None)
    vars(one)["__wrapped__"], vars(other)["__wrapped__"] = other, one
    assert schedule_within(one) is None
    assert schedule_within(None) is None
    assert schedule_within(functools.partial(torch.relu)) is None


class _Limited(nn.Module):
    """A part that does nothing, a layer, and an activation of numbers that no random input makes large."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.activation(self.part(x) + x)
        return answer


@pytest.mark.parametrize("strict", [False, True])
def test_a_changed_model_is_compared_without_the_schedule_of_its_part(strict: bool) -> None:
    model, x = _Limited().eval(), torch.randn(4, 8)
    fast = load(bundle_bytes(model, (x,)), model)
    part = model.part.forward = load(bundle_bytes(model.part, (x,)), model.part, strict=strict)  # type: ignore[method-assign]
    with torch.no_grad():
        fast(x)
        model.activation = nn.ReLU6().eval()
        with pytest.warns(FallbackWarning, match="calls other operators than before"):
            found = fast(100 * x)
        torch.testing.assert_close(found, model(100 * x))
    # Once for the answer of the model that fell back, and once for the expected one.
    assert (part.report().calls, part.report().stepped_aside) == (2, ())


def test_calls_that_end_on_the_older_file_are_not_compared_with_the_newer() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(4, 8)
    file = bundle_bytes(model, (x,))
    older = load(file, model, strict=True)
    newer = model.forward = load(file, model)  # type: ignore[method-assign]
    with torch.no_grad():
        older(x)
        model[0].weight = nn.Parameter(2 * model[0].weight)
        older(x)
    assert (newer.report().calls, newer.report().stepped_aside) == (0, ())
