"""At call time: other inputs, modes and weights never get a stale or foreign answer, and the caller owns the outputs."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from autosched.core.errors import AutoschedError, InputMismatch, UsageError
from autosched.export.bundle import encode_bundle
from autosched.runtime import guard
from autosched.runtime.load import FallbackWarning, LoadedModel, load
from autosched.runtime.numerics import compare
from autosched.runtime.prepared import Prepared
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs
from tests.conformance.stateful import bundle_bytes
from tests.conformance.waiting import at_once


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


class Swapped(TwoBranches):
    """As if another thread put weights in place while it runs: one of ``coming`` in each call."""

    coming: list[torch.nn.Parameter] = []  # noqa: RUF012 - no attribute of an instance, which would be watched

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        if self.coming:
            self.right.weight = self.coming.pop()
        return super().forward(x, more=more)


@pytest.fixture
def loaded(model: TwoBranches) -> LoadedModel:
    return load(encode_bundle(two_branches_bundle(model)), model)


@pytest.fixture
def strict(model: TwoBranches) -> LoadedModel:
    return load(encode_bundle(two_branches_bundle(model)), model, strict=True)


def _agrees(loaded: LoadedModel, model: torch.nn.Module, seed: int = 3) -> bool:
    args, kwargs = two_branches_inputs(seed)
    with torch.no_grad():
        return compare(output_tensors(loaded(*args, **kwargs)), output_tensors(model(*args, **kwargs))).within_tolerance


def _prepared(loaded: LoadedModel) -> Prepared:
    assert loaded._table is not None
    prepared = loaded._table.slots[0].prepared
    assert prepared is not None
    return prepared


def _inputs(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), kwargs = two_branches_inputs()
    x = changes.pop("x", x)
    return (x,), {"more": {**kwargs["more"], **changes}}


_UNFIT: dict[str, tuple[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], str]] = {
    "shape": (lambda: two_branches_inputs(rows=3), r"\[3, 8\]"),
    "dtype": (lambda: _inputs(shift=torch.ones(4, 8, dtype=torch.float64)), "float64"),
    "structure": (lambda: _inputs(new=torch.ones(1)), "argument 'more' has the key 'new', which the schedule was not made for"),
    "gradients": (lambda: _inputs(x=torch.randn(4, 8, requires_grad=True)), "gradients"),
    "parameter": (lambda: _inputs(x=torch.nn.Parameter(torch.randn(4, 8))), "gradients"),
    "subclass": (lambda: _inputs(x=torch.randn(4, 8).as_subclass(type("Own", (torch.Tensor,), {}))), r"Own; .*x\.as_subclass\("),
}


@pytest.mark.parametrize("name", _UNFIT)
def test_inputs_the_schedule_was_not_made_for_go_to_the_model(loaded: LoadedModel, model: TwoBranches, name: str) -> None:
    make, words = _UNFIT[name]
    args, kwargs = make()
    expected = output_tensors(model(*args, **kwargs))
    with pytest.warns(FallbackWarning, match=words) as caught:
        results = [loaded(*args, **kwargs) for _ in range(3)]
    assert len(caught) == 1
    for result in results:
        assert compare(output_tensors(result), expected).bitwise
        assert [item.requires_grad for item in output_tensors(result)] == [item.requires_grad for item in expected]
    report = loaded.report()
    assert report.scheduled
    assert [count for _, count in report.stepped_aside] == [3]
    assert _agrees(loaded, model)


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_calls_are_counted_beyond_the_reasons_that_are_listed(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_MAX_REASONS", 2)
    for rows in (1, 2, 3, 5, 6, 5, 1):
        args, kwargs = two_branches_inputs(rows=rows)
        loaded(*args, **kwargs)
    assert [count for _, count in loaded.report().stepped_aside] == [2, 1, 4]


@pytest.mark.parametrize("name", _UNFIT)
def test_strict_raises_what_was_expected_and_given(strict: LoadedModel, name: str) -> None:
    make, words = _UNFIT[name]
    args, kwargs = make()
    with pytest.raises(InputMismatch, match=words):
        strict(*args, **kwargs)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: torch.empty(4, 8, device="meta"), "input 0 is on meta; the schedule was made for cpu"),
        (lambda: torch.randn(4, 8).to_sparse(), r"input 0 is torch\.sparse_coo; the schedule was made for strided tensors"),
        # Of this one no plain tensor can be made, so that no advice is given.
        (lambda: FakeTensorMode().from_tensor(torch.randn(4, 8)), r"input 0 is a FakeTensor; the schedule was made for plain tensors\.$"),
    ],
)
def test_an_input_elsewhere_or_of_another_kind_of_memory_is_not_read(
    strict: LoadedModel, made: Callable[[], torch.Tensor], words: str
) -> None:
    args, kwargs = _inputs(x=made())
    for _ in range(3):
        with pytest.raises(InputMismatch, match=words):
            strict(*args, **kwargs)


def test_a_flag_that_was_baked_in_must_be_repeated(strict: LoadedModel) -> None:
    args, kwargs = _inputs(flag=False)
    with pytest.raises(InputMismatch, match="False"):
        strict(*args, **kwargs)


def test_another_layout_of_the_same_shape_is_laid_out_again(strict: LoadedModel, model: TwoBranches) -> None:
    base = torch.randn(8, 4)
    for x in (base.t(), torch.randn(8, 8)[::2], torch.randn(1, 8).expand(4, 8), torch.randn(40)[3:35].view(4, 8)):
        args, kwargs = _inputs(x=x)
        with torch.no_grad():
            assert compare(output_tensors(strict(*args, **kwargs)), output_tensors(model(*args, **kwargs))).within_tolerance


def test_an_input_is_read_where_it_is_unless_it_is_laid_out_otherwise(strict: LoadedModel) -> None:
    real, read = _prepared(strict).runner, []

    def seen(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        read.append(tensors[0].data_ptr())
        return real(tensors)

    _prepared(strict).runner = seen  # type: ignore[assignment]
    given = [torch.randn(40)[8:].view(4, 8), torch.randn(4, 8), torch.nn.Parameter(torch.randn(4, 8)), torch.randn(8, 4).t()]
    with torch.no_grad():
        for x in given:
            args, kwargs = _inputs(x=x)
            strict(*args, **kwargs)
    assert [place == x.data_ptr() for place, x in zip(read, given, strict=True)] == [True, True, True, False]


def test_training_mode_steps_aside_and_back(loaded: LoadedModel, model: TwoBranches) -> None:
    args, kwargs = two_branches_inputs()
    model.right.train()
    with pytest.warns(FallbackWarning, match=r"model\.eval"):
        assert loaded(*args, **kwargs)["sum"].requires_grad
    model.eval()
    assert not loaded(*args, **kwargs)["sum"].requires_grad
    assert loaded.report().calls == 1


def test_strict_refuses_training_mode(strict: LoadedModel, model: TwoBranches) -> None:
    model.train()
    args, kwargs = two_branches_inputs()
    with pytest.raises(AutoschedError, match=r"model\.eval"):
        strict(*args, **kwargs)


def test_autocast_and_function_transforms_step_aside(loaded: LoadedModel, model: TwoBranches) -> None:
    args, kwargs = two_branches_inputs()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(FallbackWarning, match="autocast"):
            result = loaded(*args, **kwargs)
        assert compare(output_tensors(result), output_tensors(model(*args, **kwargs))).bitwise
    stacked = torch.randn(2, 4, 8)
    with torch.no_grad():
        mapped = torch.vmap(lambda x: loaded(x, **kwargs)["sum"])(stacked)
        assert torch.allclose(mapped[1], model(stacked[1], **kwargs)["sum"], atol=1e-5)


def test_a_call_that_the_caller_captures_steps_aside(
    loaded: LoadedModel, strict: LoadedModel, model: TwoBranches, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, kwargs = two_branches_inputs()
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for fast in (loaded, strict):
        assert fast._table is not None
        fast._table.kind = "cuda"
    with torch.no_grad():
        with pytest.warns(FallbackWarning, match="captured into a CUDA graph"):
            result = loaded(*args, **kwargs)
        assert compare(output_tensors(result), output_tensors(model(*args, **kwargs))).bitwise
        with pytest.raises(AutoschedError, match="captured into a CUDA graph"):
            strict(*args, **kwargs)
        capturing = False
        loaded(*args, **kwargs)
    assert loaded.report().calls == 1


class Doubled(TorchFunctionMode):
    """Who patches what PyTorch's functions answer, as libraries do that quantise or trace."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return answer * 2 if getattr(func, "__name__", "") == "linear" else answer


def test_a_mode_that_takes_functions_steps_aside_and_a_default_device_does_not(loaded: LoadedModel, model: TwoBranches) -> None:
    args, kwargs = two_branches_inputs()
    plain = model(*args, **kwargs)["sum"]
    with torch.no_grad(), Doubled():
        with pytest.warns(FallbackWarning, match="takes the calls of PyTorch's functions"):
            answer = loaded(*args, **kwargs)["sum"]
        assert torch.equal(answer, model(*args, **kwargs)["sum"])
    assert not torch.equal(answer, plain)
    assert loaded.report().calls == 0
    with torch.no_grad(), torch.device("meta"):
        assert torch.allclose(loaded(*args, **kwargs)["sum"], plain, atol=1e-5)
    assert loaded.report().calls == 1


class CountsInPlace(torch.nn.Module):
    """Counts its calls in place, and takes numbers that are drawn in more than one way."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.words = torch.nn.Linear(8, 8), torch.nn.Embedding(4, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.scale = torch.full((8,), 2.0)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        made: torch.Tensor = self.layer(x) * self.scale + self.words(ids) + self.steps
        return made


@pytest.mark.parametrize("native", [False, True])
def test_under_a_default_device_models_are_bound_as_without(native: bool, request: pytest.FixtureRequest) -> None:
    """A server with GPUs may well have set one; here it is one whose tensors hold nothing."""
    if native:
        request.getfixturevalue("native")
    model, x, ids = CountsInPlace().eval(), torch.randn(4, 8), torch.tensor([1, 0, 3, 2])
    with torch.device("meta"):
        loaded = load(bundle_bytes(model, (x, ids)), model, strict=True)
        model.steps.zero_()
        for _ in range(3):
            loaded(x, ids)
        model.note = "compared again"
        answer = loaded(x, ids)
        loaded.refresh()
    assert int(model.steps) == 4
    torch.testing.assert_close(answer + 1, model(x, ids).detach())
    assert loaded.report().calls == 4


def test_a_state_dict_loaded_in_place_is_honoured(strict: LoadedModel, model: TwoBranches) -> None:
    assert _agrees(strict, model)
    model.load_state_dict(TwoBranches(seed=8).state_dict())
    assert _agrees(strict, model)
    assert _agrees(strict, TwoBranches(seed=8).eval())


def test_every_kind_of_weight_is_followed_in_place(strict: LoadedModel, model: TwoBranches) -> None:
    # Two are read directly, one is folded ahead of time, one is a buffer.
    for tensor in (model.left.weight, model.left.bias, model.right.weight, model.offset):
        before = strict(*two_branches_inputs()[0], **two_branches_inputs()[1])["sum"]
        with torch.no_grad():
            tensor.mul_(-2.0)
        after = strict(*two_branches_inputs()[0], **two_branches_inputs()[1])["sum"]
        assert not torch.allclose(before, after)
        assert _agrees(strict, model)


def test_steps_of_a_fused_optimizer_are_honoured(strict: LoadedModel, model: TwoBranches) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert _agrees(strict, model)


def test_weights_that_are_written_past_all_counts_are_honoured(strict: LoadedModel, model: TwoBranches) -> None:
    assert _agrees(strict, model)
    for change in (
        # Of one that is read where it is, and of one that is folded ahead of time.
        lambda: model.left.weight.data.mul_(-2.0),
        lambda: model.right.weight.data.copy_(torch.randn(8, 8)),
        lambda: model.right.weight.detach().numpy().fill(0.5),
    ):
        change()
        assert _agrees(strict, model)
    assert strict.report().scheduled


def test_a_frozen_model_is_read_again_only_when_told_to(model: TwoBranches) -> None:
    frozen = load(encode_bundle(two_branches_bundle(model)), model, strict=True, frozen=True)
    assert _agrees(frozen, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    frozen.refresh()
    assert _agrees(frozen, model)
    # What costs nothing to notice is noticed: a model in training mode is not the one that was tuned.
    model.train()
    args, kwargs = two_branches_inputs(3)
    with pytest.raises(AutoschedError, match="another mode"):
        frozen(*args, **kwargs)


def test_replaced_parameters_and_modules_are_followed(strict: LoadedModel, model: TwoBranches) -> None:
    other = TwoBranches(seed=4)
    model.right.weight = torch.nn.Parameter(other.right.weight.detach().clone())
    assert _agrees(strict, model)
    model.left = other.left.eval()
    assert _agrees(strict, model)
    model.load_state_dict(TwoBranches(seed=6).state_dict(), assign=True)
    assert _agrees(strict, model)
    model.offset = torch.ones(8)
    assert _agrees(strict, model)
    model.right.weight.data = torch.ones(8, 8)
    assert _agrees(strict, model)
    assert strict.report().scheduled


def test_weights_that_are_replaced_during_the_comparison_retire_nothing() -> None:
    model = Swapped().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model)
    one, *others = (torch.nn.Parameter(TwoBranches(seed=seed).right.weight.detach().clone()) for seed in range(4, 8))
    model.right.weight = one
    Swapped.coming.extend(others)
    args, kwargs = two_branches_inputs(3)
    with pytest.warns(FallbackWarning, match="right.weight was changed while"):
        loaded(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while Swapped.coming:
            loaded(*args, **kwargs)
    assert _agrees(loaded, model)
    assert loaded.report().scheduled
    assert loaded.report().calls == 1


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_weights_that_are_replaced_while_it_is_loaded_retire_nothing() -> None:
    model = Swapped().eval()
    data = encode_bundle(two_branches_bundle(model))
    Swapped.coming.extend(torch.nn.Parameter(TwoBranches(seed=seed).right.weight.detach().clone()) for seed in range(4, 8))
    loaded = load(data, model)
    assert loaded.report().scheduled
    assert loaded.report().ready == 0
    args, kwargs = two_branches_inputs(3)
    while Swapped.coming:
        loaded(*args, **kwargs)
    assert _agrees(loaded, model)
    assert loaded.report().calls == 1


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_weights_that_are_given_other_memory_while_it_is_loaded_retire_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoBranches().eval()
    data = encode_bundle(two_branches_bundle(model))
    coming = [TwoBranches(seed=seed).right.weight.detach().clone() for seed in range(4, 8)]
    forward = TwoBranches.forward

    def swapped(self: TwoBranches, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        if coming:
            self.right.weight.data = coming.pop()
        return forward(self, x, more=more)

    monkeypatch.setattr(TwoBranches, "forward", swapped)
    loaded = load(data, model)
    args, kwargs = two_branches_inputs(3)
    while coming:
        loaded(*args, **kwargs)
    assert _agrees(loaded, model)
    assert loaded.report().scheduled
    assert loaded.report().calls == 1


def test_an_unseen_change_is_read_by_refresh(strict: LoadedModel, model: TwoBranches) -> None:
    # One number between those that are looked at.
    model.right.weight.data[3, 3] = 30.0
    assert not _agrees(strict, model)
    strict.refresh()
    assert _agrees(strict, model)


class Configured(TwoBranches):
    """With settings as libraries keep them: in an object, and a list of rates."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(return_left=False, calls=0)
        self.rates = [1.0]

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        answer = super().forward(x, more=more)
        answer["sum"] = answer["sum"] * self.rates[0]
        return {**answer, "left": self.left(x)} if self.config.return_left else answer


@pytest.mark.parametrize(
    "change",
    [lambda model: setattr(model.config, "return_left", True), lambda model: model.rates.__setitem__(0, 2.0)],
    ids=["configuration", "list"],
)
def test_a_setting_that_is_changed_is_honoured(change: Callable[[Configured], None]) -> None:
    model = Configured().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model)
    assert _agrees(loaded, model)
    change(model)
    args, kwargs = two_branches_inputs(3)
    with pytest.warns(FallbackWarning, match="no longer fits"):
        answer = loaded(*args, **kwargs)
    assert answer.keys() == model(*args, **kwargs).keys()
    assert compare(output_tensors(answer), output_tensors(model(*args, **kwargs))).bitwise


def test_what_somebody_counts_in_a_configuration_is_compared_three_times_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Configured().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model, strict=True)
    compared: list[None] = []
    compare_again = Prepared._rebind
    monkeypatch.setattr(Prepared, "_rebind", lambda self, *, verify: compared.append(None) or compare_again(self, verify=verify))
    for count in range(1, 9):
        model.config.calls = count
        assert _agrees(loaded, model)
    assert len(compared) == 3
    model.config.return_left = True
    args, kwargs = two_branches_inputs(3)
    with pytest.raises(AutoschedError, match="other containers"):
        loaded(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: setattr(model.right, "weight", torch.nn.Parameter(torch.randn(8, 8))), "'weight'"),
        (lambda model: setattr(model, "served", object()), "'served'"),
        # Of one that is folded ahead of time.
        (lambda model: torch.nn.init.normal_(model.right.weight), "its weights"),
    ],
    ids=["replaced", "attribute", "in place"],
)
def test_a_model_that_is_changed_before_every_call_is_not_slow_in_silence(
    model: TwoBranches, change: Callable[[TwoBranches], object], what: str
) -> None:
    model.served = None  # type: ignore[assignment]
    loaded = load(encode_bundle(two_branches_bundle(model)), model)

    def called(count: int) -> int:
        before = loaded.report().calls
        for _ in range(count):
            change(model)
            assert _agrees(loaded, model)
        return loaded.report().calls - before

    assert called(9) == 9
    with pytest.warns(FallbackWarning, match=rf"changed before each of its last calls \({what}\)"):
        assert called(16) == 0
    # It is tried again, and once it is left alone the schedule runs.
    assert called(1) == 1
    assert _agrees(loaded, model)
    assert called(9) == 9
    assert loaded.report().scheduled


def test_what_is_read_where_it_is_may_change_before_every_call(strict: LoadedModel, model: TwoBranches) -> None:
    for _ in range(12):
        model.left.weight.data.normal_()
        assert _agrees(strict, model)


def test_a_replacement_that_computes_something_else_retires_the_schedule(loaded: LoadedModel, model: TwoBranches) -> None:
    model._modules["left"] = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
    args, kwargs = two_branches_inputs()
    with pytest.warns(FallbackWarning, match="no longer fits: it has no parameter .left.weight. now"):
        result = loaded(*args, **kwargs)
    assert compare(output_tensors(result), output_tensors(model(*args, **kwargs))).bitwise
    assert not loaded.report().scheduled
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert _agrees(loaded, model)


def test_an_activation_that_is_swapped_is_noticed() -> None:
    class Wrapped(TwoBranches):
        def __init__(self) -> None:
            super().__init__()
            self.last: torch.nn.Module = torch.nn.Identity()

        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
            result = super().forward(x, more=more)
            return {**result, "sum": self.last(result["sum"])}

    wrapped = Wrapped().eval()
    loaded = load(encode_bundle(two_branches_bundle(wrapped)), wrapped)
    assert _agrees(loaded, wrapped)
    wrapped.last = torch.nn.Tanh().eval()
    with pytest.warns(FallbackWarning, match="no longer fits"):
        assert _agrees(loaded, wrapped)


def test_hooks_added_after_load_still_run(loaded: LoadedModel, model: TwoBranches) -> None:
    seen: list[torch.nn.Module] = []
    handle = model.left.register_forward_hook(lambda module, args, output: seen.append(module))
    with pytest.warns(FallbackWarning, match="hooks"):
        assert _agrees(loaded, model)
    assert len(seen) == 2
    handle.remove()
    assert _agrees(loaded, model)
    assert loaded.report().calls == 1


def test_the_message_about_hooks_says_how_to_go_on_with_them(loaded: LoadedModel, model: TwoBranches) -> None:
    # transformers adds some at the first call that asks for hidden states, and never takes them away.
    model.left.register_forward_hook(lambda module, args, output: None)
    with pytest.warns(FallbackWarning, match=r"call refresh\(\) on the loaded model"):
        assert _agrees(loaded, model)
    loaded.refresh()
    assert _agrees(loaded, model)
    assert loaded.report().calls == 1


def test_outputs_belong_to_the_caller(strict: LoadedModel) -> None:
    args, kwargs = two_branches_inputs(1)
    first = strict(*args, **kwargs)
    kept = copy.deepcopy(first)
    strict(*two_branches_inputs(2)[0], **two_branches_inputs(2)[1])
    assert compare(output_tensors(first), output_tensors(kept)).bitwise
    # As from the model: outputs may be changed in place and used where gradients are recorded.
    first["sum"].add_(1.0)
    weight = torch.ones(8, requires_grad=True)
    (first["sum"] * weight).sum().backward()
    assert weight.grad is not None
    with torch.inference_mode():
        assert strict(*args, **kwargs)["sum"].is_inference()


def test_inputs_are_left_alone(strict: LoadedModel) -> None:
    args, kwargs = two_branches_inputs()
    before = copy.deepcopy((args, kwargs))
    strict(*args, **kwargs)
    assert torch.equal(args[0], before[0][0])
    assert torch.equal(kwargs["more"]["shift"], before[1]["more"]["shift"])


def test_many_threads_get_their_own_answers(strict: LoadedModel, model: TwoBranches) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(20):
            if not _agrees(strict, model, seed * 100 + step):
                wrong.append(seed)

    at_once(work, range(6))
    assert not wrong
    assert strict.report().calls == 120


def test_an_error_of_the_model_itself_is_the_models_own(model: TwoBranches) -> None:
    from autosched.core.schedule import sequential
    from autosched.export.bundle import make_bundle
    from tests.conformance.bundles import evidence_for
    from tests.conformance.graphs import Recorder

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(12.0).view(4, 3))

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.nn.functional.embedding(rows, self.weight),)

    table = Table().eval()
    recorder = Recorder()
    rows = recorder.input(torch.tensor([0, 1]))
    program = recorder.build([recorder.run("aten::embedding.default", recorder.constant("weight", table.weight), rows)])
    base = two_branches_bundle(model)
    evidence = evidence_for(1, base.key.device, program.graph.hash)
    loaded = load(
        encode_bundle(make_bundle(program, sequential(program.graph), evidence, {}, base.key.device, base.key.software)), table, strict=True
    )
    with pytest.raises(IndexError):
        loaded(torch.tensor([0, 9]))
    assert torch.equal(loaded(torch.tensor([3, 2]))[0], table.weight[[3, 2]])
    assert loaded.report().scheduled
    # Nothing is computed ahead of time here, so new contents need no new runner.
    before = _prepared(loaded).runner
    with torch.no_grad():
        table.weight.mul_(2.0)
    assert torch.equal(loaded(torch.tensor([3, 2]))[0], table.weight[[3, 2]])
    assert _prepared(loaded).runner is before


def test_an_operator_that_fails_alone_retires_the_schedule(loaded: LoadedModel, model: TwoBranches) -> None:
    def fails(inputs: object) -> list[torch.Tensor]:
        raise RuntimeError("out of luck")

    _prepared(loaded).runner = fails
    with pytest.warns(FallbackWarning, match="out of luck"):
        assert _agrees(loaded, model)
    assert not loaded.report().scheduled
    assert _agrees(loaded, model)
    ((reason, calls),) = loaded.report().stepped_aside
    assert "out of luck" in reason
    assert calls == 2  # the one of which it was said, and the one after it


def test_who_wants_an_error_gets_one_for_an_operator_that_fails_alone(strict: LoadedModel) -> None:
    def fails(inputs: object) -> list[torch.Tensor]:
        raise RuntimeError("out of luck")

    _prepared(strict).runner = fails
    args, kwargs = two_branches_inputs()
    # At that call, and at those after it.
    for _ in range(2):
        with torch.no_grad(), pytest.raises(AutoschedError, match=r"the schedule may not run: .*RuntimeError: out of luck"):
            strict(*args, **kwargs)
    report = strict.report()
    assert (report.scheduled, report.calls, report.stepped_aside) == (False, 0, ())


@pytest.mark.parametrize("prepare", ["all", "first-use"])
def test_it_may_take_the_place_of_the_models_own_forward(model: TwoBranches, prepare: Any) -> None:
    plain = copy.deepcopy(model)
    loaded = load(encode_bundle(two_branches_bundle(model)), model, prepare=prepare)
    model.forward = loaded  # type: ignore[method-assign, assignment]

    def agree(rows: int) -> None:
        args, kwargs = two_branches_inputs(rows=rows)
        with torch.no_grad():
            assert compare(output_tensors(model(*args, **kwargs)), output_tensors(plain(*args, **kwargs))).within_tolerance

    def work() -> None:
        agree(4)
        assert loaded.report().calls == 1
        agree(3)
        for each in (model, plain):
            each.register_forward_hook(lambda module, args, output: {**output, "sum": output["sum"] * 2})
        agree(4)
        finished.set()

    finished = threading.Event()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        # In a thread, because to wait for oneself is to wait for ever.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
    assert finished.is_set()
    assert loaded.report().scheduled


def test_forward_mode_gradients_step_aside(loaded: LoadedModel, model: TwoBranches) -> None:
    import torch.autograd.forward_ad as forward_ad

    args, kwargs = two_branches_inputs()
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        dual = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        with pytest.warns(FallbackWarning, match="forward-mode"):
            result = forward_ad.unpack_dual(loaded(dual, **kwargs)["sum"])
        assert torch.equal(result.tangent, forward_ad.unpack_dual(model(dual, **kwargs)["sum"]).tangent)


def test_an_exception_from_outside_reaches_the_caller_and_retires_nothing(loaded: LoadedModel, model: TwoBranches) -> None:
    class OutOfTime(Exception):
        """What the handler of an alarm raises, in whatever code the main thread runs."""

    prepared = _prepared(loaded)
    runner = prepared.runner

    def interrupted(inputs: object) -> list[torch.Tensor]:
        raise OutOfTime

    prepared.runner = interrupted
    args, kwargs = two_branches_inputs()
    with pytest.raises(OutOfTime):
        loaded(*args, **kwargs)
    prepared.runner = runner
    assert _agrees(loaded, model)
    assert loaded.report().scheduled
    assert loaded.report().stepped_aside == ()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, ForkingPickler.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_loaded_model_is_bound_to_its_process_and_says_so(loaded: LoadedModel, copied: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match="load the file"):
        copied(loaded)


def test_it_is_asked_what_it_takes_as_the_model_is(loaded: LoadedModel, model: TwoBranches) -> None:
    assert inspect.signature(loaded) == inspect.signature(model.forward)
    assert list(inspect.signature(loaded).parameters) == ["x", "more"]


def test_a_report_may_be_asked_for_while_another_call_steps_aside(loaded: LoadedModel) -> None:
    """Until Python 3.12 garbage is looked for wherever objects are made; what is called then may give other threads their turn."""
    for number in range(400):
        loaded._count(f"reason {number}")

    def meanwhile(phase: str, info: dict[str, int]) -> None:
        loaded._count(f"another reason {len(loaded._aside)}")

    # So that pairs are made anew.
    pairs = [(number, number) for number in range(10_000)]
    thresholds = gc.get_threshold()
    gc.callbacks.append(meanwhile)
    gc.set_threshold(1)
    try:
        assert len(loaded.report().stepped_aside) >= 400
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(meanwhile)
        del pairs
