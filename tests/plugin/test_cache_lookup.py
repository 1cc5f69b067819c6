"""A model tuned by ``autosched.tune`` is found by ``torch.compile`` and by ``autosched.compile``, whatever names its parameters have."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autosched
from autosched import compiled, plugin
from autosched.config import schedules_dir
from autosched.core.errors import ArtifactError, IncompatibleArtifact, UnsupportedGraph, UsageError
from autosched.core.records import Source
from autosched.core.variants import Lowering
from autosched.export.bundle import encode_bundle, write_bundle
from autosched.pipeline import cache as tuned_cache
from autosched.runtime.cache import CacheWarning
from autosched.runtime.guard import FallbackWarning, LoadedModel
from tests.plugin.nets import Attention, Broken, CountingTwice, Inception, Mlp, SecondInputFirst, cached_two_lanes, inputs_of, require_same


class Renamed(nn.Module):
    """The same computation under other names, one level down."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.wrapped = nn.ModuleDict({"it": inner})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped["it"](*args, **kwargs)


@pytest.mark.parametrize("kind", [Mlp, Inception, Attention, SecondInputFirst])
def test_torch_compile_finds_what_was_tuned(kind: type[nn.Module]) -> None:
    model = kind().eval()
    args, kwargs = inputs_of(model)
    tuned = cached_two_lanes(model, args, kwargs)
    run = torch.compile(model, backend=plugin.autosched)
    require_same(run(*args, **kwargs), model(*args, **kwargs))
    [report] = plugin.reports()
    assert report.scheduled
    assert report.schedule == "beam"
    assert report.lanes == 2
    assert report.operators == len(tuned.program.graph)
    other, _ = inputs_of(model, seed=7)
    require_same(run(*other, **kwargs), model(*other, **kwargs))


@pytest.mark.parametrize("kind", [Inception, Attention])
def test_names_of_parameters_do_not_matter(kind: type[nn.Module]) -> None:
    model = kind().eval()
    args, kwargs = inputs_of(model)
    cached_two_lanes(model, args, kwargs)
    renamed = Renamed(model).eval()
    for run in (autosched.compile(renamed, args, kwargs), torch.compile(renamed, backend=plugin.autosched)):
        require_same(run(*args, **kwargs), model(*args, **kwargs))
    assert plugin.reports()[0].lanes == 2


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.FUSED])
@pytest.mark.parametrize("kind", [Inception, Attention])
def test_whatever_operators_it_was_cut_into(kind: type[nn.Module], lowering: Lowering) -> None:
    model = kind().eval()
    args, kwargs = inputs_of(model)
    tuned = cached_two_lanes(model, args, kwargs, lowering)
    assert tuned.program.lowering == lowering
    run = torch.compile(model, backend=plugin.autosched, options={"strict": True})
    require_same(run(*args, **kwargs), model(*args, **kwargs))
    [report] = plugin.reports()
    assert report.schedule == "beam"
    assert report.operators == len(tuned.program.graph)


def test_compile_with_example_inputs_is_ready_at_once() -> None:
    model = Inception().eval()
    args, _ = inputs_of(model)
    cached_two_lanes(model, args, {})
    run = autosched.compile(model, args)
    assert isinstance(run, LoadedModel)
    assert run.report().lanes == 2
    assert run.report().schedule == "beam"
    require_same(run(*args), model(*args))


def test_compile_without_example_inputs_follows_the_shapes() -> None:
    model = Mlp().eval()
    run = autosched.compile(model)
    for rows in (3, 4):
        x = torch.randn(rows, 8)
        require_same(run(x), model(x))
    assert [report.scheduled for report in plugin.reports()] == [True, True]


def test_another_shape_or_another_model_is_not_found() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    cached_two_lanes(model, args, {})
    assert autosched.compile(model, (torch.randn(5, 8),)).report().schedule == compiled.DEFAULT
    wider = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 4)).eval()
    assert autosched.compile(wider, args).report().schedule == compiled.DEFAULT


def test_other_settings_are_another_entry() -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    cached_two_lanes(model, args, {})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert autosched.compile(model, args).report().schedule == compiled.DEFAULT
    finally:
        torch.set_float32_matmul_precision(before)
    assert autosched.compile(model, args).report().schedule == "beam"


def test_tuning_at_the_first_call_leaves_its_winner_for_the_next(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The real job, with the smallest budget; it keeps nothing on a machine too busy to say, so that is taken out of the test."""
    monkeypatch.setattr(tuned_cache, "remember", None)
    kept: list[Any] = []

    def remember(tuned: Any) -> None:
        kept.append(tuned)
        tuned_cache.keep(schedules_dir(), tuned_cache.pinned(tuned.bundle, tuned._outcome.captured.structure))

    monkeypatch.setattr("autosched.pipeline.remember", remember)
    model = Mlp().eval()
    args, _ = inputs_of(model)
    run = torch.compile(model, backend=plugin.autosched, options={"tune": "quick", "budget_s": 0.5})
    require_same(run(*args), model(*args))
    [report] = plugin.reports()
    assert report.schedule == kept[0].report.chosen
    assert len(list(cache.glob("*.autosched"))) == 1
    # The next one finds it: tuning again would append.
    again = autosched.compile(model, args, tune="quick", budget_s=0.5)
    require_same(again(*args), model(*args))
    assert len(kept) == 1


def test_a_restless_machine_leaves_nothing(cache: Path) -> None:
    class Restless:
        class report:
            unstable = True

    assert tuned_cache.remember(Restless()) is None  # type: ignore[arg-type]
    assert not cache.exists()


def test_a_finished_job_has_its_result_also_where_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise CacheWarning("the tuned schedule is not kept")

    monkeypatch.setattr(tuned_cache, "keep", refuse)
    monkeypatch.setattr(tuned_cache, "pinned", lambda *_: None)
    quiet = SimpleNamespace(unstable=False, source=Source.MEASURED)
    tuned: Any = SimpleNamespace(report=quiet, bundle=None, _outcome=SimpleNamespace(captured=SimpleNamespace(structure="")))
    assert tuned_cache.remember(tuned) is None
    assert "is not kept" in caplog.text


def test_a_corrupt_entry_is_a_miss_with_one_warning(cache: Path) -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    cached_two_lanes(model, args, {})
    [entry] = cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    with pytest.warns(CacheWarning, match="damaged"):
        run = autosched.compile(model, args)
    assert run.report().schedule == compiled.DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        autosched.compile(model, args)
    assert [path.name.split(".corrupt-")[0] for path in cache.iterdir()] == [entry.name]


def test_a_schedule_can_be_given(tmp_path: Path) -> None:
    model = Mlp().eval()
    args, _ = inputs_of(model)
    bundle = cached_two_lanes(model, args, {})
    path = write_bundle(tmp_path / "mlp.autosched", bundle)
    for source in (path, str(path), encode_bundle(bundle)):
        run = autosched.compile(model, schedule=source, strict=True)
        assert run.report().lanes == 2
        require_same(run(*args), model(*args))
    with pytest.raises(UsageError, match="one of the two"):
        autosched.compile(model, schedule=path, tune="quick")
    with pytest.raises(UsageError, match="cannot read"):
        autosched.compile(model, schedule=tmp_path / "absent.autosched")
    path.write_bytes(b"no bundle")
    with pytest.raises(ArtifactError):
        autosched.compile(model, schedule=path, strict=True)
    with pytest.warns(FallbackWarning):
        require_same(autosched.compile(model, schedule=path)(*args), model(*args))
    with pytest.raises(IncompatibleArtifact):
        autosched.compile(Inception().eval(), schedule=encode_bundle(bundle), strict=True)


def test_what_cannot_be_captured_runs_as_it_came_or_raises() -> None:
    model = CountingTwice().eval()
    args, _ = inputs_of(model)
    with pytest.warns(FallbackWarning, match="memory that it knows by two names"):
        run = autosched.compile(model, args)
    run(*args)
    assert model.seen[0] == 1
    with pytest.raises(UnsupportedGraph, match="memory that it knows by two names"):
        autosched.compile(model, args, strict=True)
    with pytest.warns(FallbackWarning):
        require_same(autosched.compile(Broken().eval().train(), args)(*args).shape, (3, 8))


def test_what_is_not_a_model_or_not_an_option_is_said() -> None:
    args, _ = inputs_of(Mlp())
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        autosched.compile(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tune is 'hard'"):
        autosched.compile(Mlp().eval(), args, tune="hard")
    with pytest.raises(UsageError, match="the model is on cpu"):
        autosched.compile(Mlp().eval(), args, device="cuda")
    with pytest.raises(UsageError, match="option device is 'cuda:1', but the model is on cpu"):
        autosched.compile(Mlp().eval(), schedule="mlp.autosched", device="cuda:1")


class Recurrent(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.part(x)[0])
        return found


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_parts_that_no_backend_is_asked_for_are_told_before_the_first_call(kind: type[nn.Module]) -> None:
    model, x = Recurrent(kind(8, 8)).eval(), torch.randn(5, 2, 8)
    with pytest.warns(FallbackWarning, match=f"traces no {kind.__name__}.*example inputs") as said:
        run = autosched.compile(model)
    assert [item.filename for item in said] == [__file__]
    require_same(run(x), model(x))
    # What is behind such a part may be a graph of its own.
    assert all(report.operators == 1 for report in plugin.reports())
    with pytest.raises(UnsupportedGraph, match=kind.__name__):
        autosched.compile(model, strict=True)
    # As the message says.
    assert autosched.compile(model, (x,), strict=True).report().operators > 1


def test_where_dynamo_traces_them_nothing_is_said() -> None:
    from torch._dynamo import config

    model, x = Recurrent(nn.LSTM(8, 8)).eval(), torch.randn(5, 2, 8)
    with config.patch(allow_rnn=True):
        require_same(autosched.compile(model, strict=True)(x), model(x))
    assert len(plugin.reports()) == 1
