"""``torch.compile(model, backend=...)``: which graphs run a schedule, which run as they came, and that none runs wrong."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import autosched
from autosched import plugin
from autosched.capture.dynamo import alone
from autosched.compiled import _timed
from autosched.core.errors import AutoschedError, UnsupportedGraph, UsageError
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.load_report import LoadReport
from tests.conformance.waiting import at_once
from tests.plugin.nets import Attention, Broken, Counting, Inception, Mlp, inputs_of, require_same


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=plugin.autosched, options=options)


def reports() -> list[LoadReport]:
    """Of this test's graphs; Dynamo was reset before it."""
    return plugin.reports()


@pytest.mark.parametrize("kind", [Mlp, Inception, Attention])
def test_without_a_tuned_schedule_the_default_runs(kind: type[nn.Module]) -> None:
    model = kind().eval()
    args, kwargs = inputs_of(model)
    run = compiled(model)
    require_same(run(*args, **kwargs), model(*args, **kwargs))
    [report] = reports()
    assert report.scheduled
    assert report.schedule == "sequential_default"
    assert report.lanes == 1
    before = report.calls
    require_same(run(*args, **kwargs), model(*args, **kwargs))
    assert reports()[0].calls == before + 1


def test_a_default_that_is_no_faster_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosched.compiled._faster", lambda *args: False)
    model = Mlp().eval()
    args, _ = inputs_of(model)
    require_same(compiled(model, strict=True)(*args), model(*args))
    [report] = reports()
    assert not report.scheduled
    assert "no faster" in report.reason


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_model_without_memory_beside_its_default_runs_as_it_came(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def race(*args: Any) -> bool:
        raise error

    monkeypatch.setattr("autosched.compiled._faster", race)
    model = Mlp().eval()
    args, _ = inputs_of(model)
    require_same(compiled(model)(*args), model(*args))
    fast = autosched.compile(model, args)
    assert isinstance(fast, LoadedModel)
    require_same(fast(*args), model(*args))
    for report in (*reports(), fast.report()):
        assert not report.scheduled
        assert "memory" in report.reason


def test_a_race_that_ends_in_an_error_leaves_the_models_state_as_it_was() -> None:
    def run() -> None:
        raise MemoryError

    restored: list[bool] = []
    with pytest.raises(MemoryError):
        _timed(run, torch.device("cpu"), lambda: restored.append(True))
    assert restored == [True]


def test_each_part_of_a_broken_graph_gets_its_own_schedule() -> None:
    model = Broken().eval()
    args, _ = inputs_of(model)
    require_same(compiled(model)(*args), model(*args))
    assert [report.scheduled for report in reports()] == [True, True]


def test_with_gradients_it_steps_aside_once_and_without_them_it_runs() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = compiled(model)
    with torch.enable_grad():
        with pytest.warns(FallbackWarning, match="called with gradients"):
            run(*args).sum().backward()
        run(*args)
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.abs().sum() > 0
    assert reports() == []
    assert not run(*args).requires_grad
    assert reports()[0].scheduled
    with torch.enable_grad(), pytest.raises(UnsupportedGraph, match="gradients"):
        compiled(model, strict=True)(*args)


class TurnsOn(Mlp):
    """Computes its first layer with gradients, whatever its caller wants."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.first(x).relu()
        return y if self.returned else y * 2


@pytest.mark.parametrize("returned", [True, False])
def test_a_graph_that_turns_gradients_on_for_what_it_returns_runs_as_it_came(returned: bool) -> None:
    model = TurnsOn(returned).eval()
    args, _ = inputs_of(model)
    if not returned:
        require_same(compiled(model, strict=True)(*args), model(*args))
        assert reports()[0].calls == 1
        return
    with pytest.warns(FallbackWarning, match=r"turns gradients on itself.*enable_grad"):
        assert compiled(model)(*args).requires_grad
    with pytest.raises(UnsupportedGraph, match="turns gradients on itself"):
        compiled(model, strict=True)(*args)


def test_gradients_of_what_is_changed_in_place_are_gradients() -> None:
    layer = nn.Linear(8, 8)

    def added(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total[:2] += layer(x[:2])
        return x * 2

    run, x, total = torch.compile(added, backend=plugin.autosched), torch.randn(3, 8), torch.zeros(3, 8)
    with torch.enable_grad(), pytest.warns(FallbackWarning, match="with gradients"):
        run(x, total)
    assert total.requires_grad


def test_gradient_mode_alone_is_no_obstacle() -> None:
    model = Mlp().eval().requires_grad_(False)
    args, _ = inputs_of(model)
    with torch.enable_grad():
        require_same(compiled(model, strict=True)(*args), model(*args))
    assert reports()[0].scheduled


def test_weights_loaded_in_place_are_honoured() -> None:
    model = Inception().eval()  # its batch norms are folded into weights ahead of time
    args, _ = inputs_of(model)
    run = compiled(model)
    run(*args)
    model.load_state_dict({name: tensor + 0.1 for name, tensor in model.state_dict().items()})
    require_same(run(*args), model(*args))
    assert len(reports()) == 1


def test_a_replaced_parameter_is_noticed() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = compiled(model)
    run(*args)
    model.first.weight = nn.Parameter(torch.ones(16, 8))
    require_same(run(*args), model(*args))
    require_same(run(*args), model(*args))
    assert [report.scheduled for report in reports()] == [True, True]


def test_models_of_one_class_share_a_graph_and_keep_their_weights_apart() -> None:
    models = [Mlp(seed).eval() for seed in range(3)]
    runs = [compiled(model) for model in models]
    args, _ = inputs_of(models[0])
    for _ in range(2):
        for model, run in zip(models, runs, strict=True):
            require_same(run(*args), model(*args))
    assert all(report.scheduled for report in reports())


def test_more_sets_of_weights_than_are_kept_still_run_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MAX_BOUND", 2)
    models = [Mlp(seed).eval() for seed in range(4)]
    runs = [compiled(model) for model in models]
    args, _ = inputs_of(models[0])

    def call_all() -> None:
        for _ in range(2):
            for model, run in zip(models, runs, strict=True):
                require_same(run(*args), model(*args))

    with pytest.warns(FallbackWarning, match="more than 2 models") as said:
        call_all()
    # Nothing is bound at each turn.
    assert len(said) == 1
    assert [report.calls for report in reports()] == [2, 2]
    strict = [compiled(model, strict=True) for model in models]
    for run in strict[:2]:
        run(*args)
    with pytest.raises(UnsupportedGraph, match="more than 2 models"):
        strict[2](*args)


def test_weights_make_room_that_were_not_called_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MAX_BOUND", 2)
    monkeypatch.setattr(plugin, "IDLE_CALLS", 3)
    first, second, third = [Mlp(seed).eval() for seed in range(3)]
    args, _ = inputs_of(first)
    runs = {model: compiled(model) for model in (first, second, third)}
    for model in (first, second, first, first, first, third):
        require_same(runs[model](*args), model(*args))
    assert [report.calls for report in reports()] == [4, 1]
    require_same(runs[first](*args), first(*args))
    assert [report.calls for report in reports()] == [5, 1]


def test_weights_of_models_that_are_gone_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "LEAST_BYTES", 0)
    kept = Mlp(seed=9).eval()
    args, _ = inputs_of(kept)
    compiled(kept)(*args)
    weights: list[weakref.ref[nn.Parameter]] = []
    for seed in range(3):
        model = Mlp(seed).eval()
        require_same(compiled(model)(*args), model(*args))
        weights.append(weakref.ref(model.first.weight))
        del model
        gc.collect()
    # The last one stays until there is another.
    assert [weight() is not None for weight in weights] == [False, False, True]
    require_same(compiled(kept)(*args), kept(*args))
    assert [report.calls for report in reports()] == [2, 1]


_SHORT: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()]


@pytest.mark.parametrize("error", _SHORT)
@pytest.mark.parametrize("what", ["autosched.compiled.capture", "autosched.runtime.load.Binder.prepare", "autosched.compiled._faster"])
@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_a_graph_that_had_no_memory_is_tried_again_after_some_calls(what: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0

    def fails(*args: Any, **kwargs: Any) -> None:
        nonlocal attempts
        attempts += 1
        raise error

    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = compiled(model)
    with monkeypatch.context() as patch:
        patch.setattr(what, fails)
        for _ in range(10):
            require_same(run(*args), model(*args))
        # At the first, the second, the fourth and the eighth.
        assert attempts == 4
        [report] = reports()
        assert (report.scheduled, "memory" in report.reason.lower()) == (False, True)
    for _ in range(6):
        require_same(run(*args), model(*args))
    [report] = reports()
    assert (report.scheduled, report.calls) == (True, 1)


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_a_graph_that_never_has_memory_is_given_up_and_what_was_captured_is_kept_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosched.runtime.no_memory.MOST_SHORT", 3)
    attempts: list[str] = []
    real = autosched.compiled.capture

    def captured(*args: Any, **kwargs: Any) -> Any:
        attempts.append("capture")
        return real(*args, **kwargs)

    def fails(*args: Any) -> None:
        attempts.append("race")
        raise MemoryError

    monkeypatch.setattr("autosched.compiled.capture", captured)
    monkeypatch.setattr("autosched.compiled._faster", fails)
    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = compiled(model)
    for _ in range(20):
        run(*args)
    assert attempts == ["capture", "race", "race", "race", "race"]


def test_a_lack_of_memory_while_a_graph_is_captured_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter(range(100))

    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {next(asked)} MiB")

    monkeypatch.setattr("autosched.compiled.capture", fails)
    run = compiled(Mlp().eval())
    with pytest.warns(FallbackWarning, match="out of memory") as said:
        assert [len(run(torch.randn(3, 8))) for _ in range(10)] == [3] * 10
    assert len(said) == 1
    with pytest.raises(torch.OutOfMemoryError):
        compiled(Mlp().eval(), strict=True)(torch.randn(3, 8))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.LayerNorm(8))

    def forward(self, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
        found: torch.Tensor = self.layers(x)
        return found * scale, 2 * scale


def test_numbers_that_are_left_open_with_the_sizes_are_those_of_each_call() -> None:
    model = Normed().eval()
    run = torch.compile(model, backend=plugin.autosched, dynamic=True, options={"strict": True})
    with torch.no_grad():
        for rows, scale, eps in ((3, 2.5, 1e-5), (5, 2.5, 1e-5), (5, 0.5, 1e-5), (5, 0.5, 10.0), (3, 2.5, 1e-5)):
            model.layers[3].eps = eps
            x = torch.randn(rows, 8)
            torch.testing.assert_close(run(x, scale), model(x, scale))


def test_zero_that_is_negative_is_another_number() -> None:
    class Signed(nn.Module):
        def forward(self, x: torch.Tensor, sign: float) -> torch.Tensor:
            return torch.copysign(x, torch.full_like(x, sign))

    model = Signed().eval()
    run = torch.compile(model, backend=plugin.autosched, dynamic=True, options={"strict": True})
    x = torch.randn(3, 8)
    for sign in (1.0, 0.0, -0.0, 0.0):
        assert torch.equal(run(x, sign), model(x, sign))


def test_sizes_left_open_are_closed_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MAX_SHAPES", 2)
    model = Mlp().eval()
    run = torch.compile(model, backend=plugin.autosched, dynamic=True)
    for rows in (3, 5, 3):
        x = torch.randn(rows, 8)
        require_same(run(x), model(x))
    assert [report.scheduled for report in reports()] == [True, True]
    x = torch.randn(6, 8)
    with pytest.warns(FallbackWarning, match="more than 2 input shapes"):
        require_same(run(x), model(x))
    require_same(run(x), model(x))


def test_one_shape_too_many_is_an_error_if_told_to_be_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MAX_SHAPES", 1)
    run = torch.compile(Mlp().eval(), backend=plugin.autosched, dynamic=True, options={"strict": True})
    run(torch.randn(3, 8))
    for _ in range(2):
        with pytest.raises(UnsupportedGraph, match="more than 1 input shapes"):
            run(torch.randn(5, 8))
    run(torch.randn(3, 8))


@pytest.mark.parametrize("most", [0, 1])
def test_calls_without_a_schedule_do_not_wait_for_a_model_that_is_prepared(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def fails(*args: Any) -> None:
        raise UnsupportedGraph("not this one")

    monkeypatch.setattr("autosched.compiled.recipe_for", fails)
    monkeypatch.setattr(plugin, "MAX_SHAPES", most)
    model = Mlp().eval()
    run = torch.compile(model, backend=plugin.autosched, dynamic=True)
    x = torch.randn(3, 8)
    with pytest.warns(FallbackWarning):
        run(x)
    answers: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            answers.append(run(x))

    thread = threading.Thread(target=call)
    with alone():
        thread.start()
        thread.join(10)
        waited = thread.is_alive()
    thread.join()
    assert not waited
    require_same(answers[0], model(x))


def test_reports_may_be_asked_for_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Met(weakref.WeakSet[Any]):
        """Another thread compiles a graph while somebody goes through these."""

        def __iter__(self) -> Iterator[Any]:
            for number, item in enumerate(super().__iter__()):
                if not number:
                    other.start()
                    other.join(1)
                yield item

    graph = torch.fx.symbolic_trace(Mlp().eval())
    example = [torch.randn(3, 8)]
    kept: list[Any] = []

    def compile_one() -> None:
        with torch.no_grad():
            kept.append(plugin.autosched(graph, example))

    other = threading.Thread(target=compile_one)
    monkeypatch.setattr(plugin, "_graphs", Met())
    compile_one()
    compile_one()
    assert plugin.reports() == []
    other.join()
    assert len(kept) == 3


def test_a_size_that_is_marked_as_open_is_closed_for_each_call() -> None:
    model = Mlp().eval()
    run = compiled(model, strict=True)
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        require_same(run(x), model(x))
    assert [report.scheduled for report in reports()] == [True, True]
    whole = autosched.compile(model, (x,), strict=True)
    assert isinstance(whole, LoadedModel)
    require_same(whole(x), model(x))


def test_a_changed_buffer_is_changed_once_a_call() -> None:
    model = Counting().eval()
    args, _ = inputs_of(model)
    run = compiled(model, strict=True)
    for calls in range(1, 5):
        require_same(run(*args), model.a(*args) + calls)
        assert model.seen.tolist() == [calls] * 8
    model.seen.zero_()
    require_same(run(*args), model.a(*args) + 1)
    [report] = reports()
    assert (report.scheduled, report.calls) == (True, 5)


def test_an_input_changed_in_place_is_changed() -> None:
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    x = torch.zeros(3)
    run = compiled(Adding().eval(), strict=True)
    for calls in range(1, 4):
        assert run(x).tolist() == [2.0 * calls] * 3
        assert x.tolist() == [float(calls)] * 3
    [report] = reports()
    assert (report.scheduled, report.calls) == (True, 3)


def test_random_numbers_are_not_scheduled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    with pytest.warns(FallbackWarning, match="random"):
        made = compiled(model)(torch.ones(64, 8))
    assert (made == 0).any()


@pytest.mark.parametrize("kind", [Mlp, Broken])
@pytest.mark.parametrize("case", ["gradients", "autocast"])
def test_a_warning_points_at_the_call_and_not_at_the_models_code_or_ours(case: str, kind: type[nn.Module]) -> None:
    run = compiled(kind().eval())
    args, _ = inputs_of(kind())
    gradients, autocast = case == "gradients", case == "autocast"
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.warns(FallbackWarning) as said:
        run(*args)
    assert {item.filename for item in said} == {__file__}


def test_outputs_of_one_call_are_not_touched_by_the_next() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = compiled(model)
    first = run(*args)
    kept = first.clone()
    run(args[0] + 1)
    assert torch.equal(first, kept)


def test_inference_mode_in_and_out() -> None:
    model = Mlp().eval()
    with torch.inference_mode():
        x = torch.randn(3, 8)
        run = compiled(model, strict=True)
        require_same(run(x), model(x))
    x = torch.randn(3, 8)
    made = run(x)
    assert not made.is_inference()
    require_same(made, model(x))


def test_autocast_runs_as_it_came() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = compiled(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(FallbackWarning, match="autocast"):
        assert torch.equal(run(*args), model(*args))


class Doubled(TorchFunctionMode):
    """Who patches what PyTorch's functions answer."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return answer * 2 if getattr(func, "__name__", "") == "linear" else answer


def test_what_a_mode_makes_of_functions_is_done_once() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    plain = model(*args)
    run = compiled(model)
    with Doubled():
        doubled = model(*args)
        assert not torch.allclose(doubled, plain)
        for _ in range(2):
            require_same(run(*args), doubled)
    require_same(run(*args), plain)
    with torch.device("cpu"):
        require_same(run(*args), plain)
    assert sum(report.calls for report in reports()) >= 4


def test_an_outputs_view_of_an_input_still_is_one() -> None:
    class Viewing(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.t(), x + 1

    x = torch.randn(2, 3)
    view, other = compiled(Viewing().eval())(x)
    assert view.data_ptr() == x.data_ptr()
    x.zero_()
    assert view.abs().sum() == 0
    assert other.shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tun": "quick"}, "'tun' is not known"),
        ({"tune": "hard"}, "tune is 'hard'"),
        ({"tune": "quick", "budget_s": -1.0}, "budget_s is -1.0"),
        ({"budget_s": 3.0}, "tune is not given"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda"}, "the model is on cpu"),
        ({"strict": 1}, "strict is 1"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compiled(Mlp().eval(), **options)(torch.randn(3, 8))


def test_a_mode_is_refused() -> None:
    run = torch.compile(Mlp().eval(), backend=plugin.autosched, mode="max-autotune")
    with pytest.raises(UsageError, match="mode is 'max-autotune'"):
        run(torch.randn(3, 8))


def test_whatever_goes_wrong_in_preparing_the_model_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*args: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("autosched.compiled.capture", stumble)
    model = Mlp().eval()
    args, _ = inputs_of(model)
    with pytest.warns(FallbackWarning, match="out of luck"):
        require_same(compiled(model)(*args), model(*args))
    assert [report.reason for report in reports()] == ["RuntimeError: out of luck"]
    with pytest.raises(RuntimeError, match="out of luck"):
        compiled(model, strict=True)(*args)


def test_a_default_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run is verified: a runner that answers wrongly is found out before it answers the caller."""
    honest = LaneExecutor.run
    monkeypatch.setattr(LaneExecutor, "run", lambda self, inputs: [tensor + 1 for tensor in honest(self, inputs)])
    model = Mlp().eval()
    args, _ = inputs_of(model)
    with pytest.warns(FallbackWarning, match="outputs differ from the model's"):
        require_same(compiled(model)(*args), model(*args))
    with pytest.raises(AutoschedError, match="outputs differ from the model's"):
        compiled(model, strict=True)(*args)


def test_four_threads_and_four_models() -> None:
    models = [Mlp(seed).eval() for seed in range(3)] + [Broken().eval()]
    runs = [torch.compile(model, backend=plugin.autosched, dynamic=False) for model in models]
    inputs = [[torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)] for _ in range(4)]
    wrong: list[str] = []
    # First calls one after another: while torch.export traces it hooks all modules of the process, and compiling beside it trips over that.
    with torch.no_grad():
        for run in runs:
            run(inputs[0][0])

    def work(own: list[torch.Tensor]) -> None:
        try:
            with torch.no_grad():
                for x in own * 4:
                    # Kept until every model has run: nobody's output may be overwritten by another call.
                    made = [run(x) for run in runs]
                    for model, got in zip(models, made, strict=True):
                        require_same(got, model(x))
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}")

    at_once(work, inputs)
    assert wrong == []
    found = reports()
    assert all(report.scheduled and not report.stepped_aside for report in found)
    assert len(found) >= 5
