"""A model in training mode is never run on made-up inputs: its statistics would count them, and its schedule be given up for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosched.core.errors import AutoschedError
from autosched.export.bundle import encode_bundle
from autosched.runtime import load as load_room
from autosched.runtime.load import FallbackWarning, LoadedModel, load
from autosched.runtime.shape_table import ShapeTable
from tests.conformance.stateful import bundled


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()


def _loaded(model: torch.nn.Module, **options: Any) -> LoadedModel:
    shapes = [bundled(model, (torch.randn(rows, 8),))[1] for rows in (4, 6)]
    return load(encode_bundle(*shapes), model, **options)


def _batches(model: torch.nn.Sequential) -> int:
    batches = model[1].num_batches_tracked
    assert isinstance(batches, torch.Tensor)
    return int(batches)


def _agrees_in_eval_mode(loaded: LoadedModel, model: torch.nn.Module) -> bool:
    model.eval()
    with torch.no_grad():
        return all(torch.allclose(loaded(x), model(x), atol=1e-5) for x in (torch.randn(4, 8), torch.randn(6, 8)))


@pytest.mark.parametrize("options", [{"prepare": "first-use"}, {"max_shapes": 1}], ids=["first use", "evicted"])
def test_a_shape_that_is_made_ready_late_waits_for_eval_mode(options: dict[str, Any]) -> None:
    model = _model()
    loaded = _loaded(model, **options)
    model.train()
    with torch.no_grad(), pytest.warns(FallbackWarning, match=r"model\.eval"):
        loaded(torch.randn(6, 8))
    assert _batches(model) == 1
    assert _agrees_in_eval_mode(loaded, model)
    assert loaded.report().calls == 2


def test_a_model_that_another_thread_trains_while_it_is_loaded_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, warm = _model(), load_room._warm

    def trained_meanwhile(table: ShapeTable, *others: Any) -> None:
        model.train()
        warm(table, *others)

    monkeypatch.setattr(load_room, "_warm", trained_meanwhile)
    loaded = _loaded(model)
    assert _agrees_in_eval_mode(loaded, model)
    assert loaded.report().calls == 2


def test_a_part_in_training_mode_in_the_place_of_another_is_not_compared() -> None:
    model = _model()
    loaded = _loaded(model)
    model[1] = torch.nn.BatchNorm1d(8)
    with torch.no_grad(), pytest.warns(FallbackWarning, match=r"model\.eval"):
        _ = [loaded(torch.randn(4, 8)) for _ in range(20)]
    assert _batches(model) == 20
    assert _agrees_in_eval_mode(loaded, model)
    assert loaded.report().calls == 2


@pytest.mark.parametrize("strict", [False, True])
def test_refresh_in_training_mode_is_made_up_for_at_the_first_call_in_eval_mode(strict: bool) -> None:
    model = _model()
    loaded = _loaded(model, frozen=True, strict=strict)
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    model.train()
    told: Any = pytest.raises(AutoschedError, match=r"model\.eval") if strict else pytest.warns(FallbackWarning, match=r"model\.eval")
    with told:
        loaded.refresh()
    assert _batches(model) == 0
    assert _agrees_in_eval_mode(loaded, model)
    assert loaded.report().calls == 2
