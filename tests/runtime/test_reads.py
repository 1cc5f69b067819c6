"""Weights that a model reads and its schedule does not: of no consequence while they are zero, and never missed when they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.core.errors import IncompatibleArtifact
from autosched.core.program import Binding, ConstantSource
from autosched.export.bundle import encode_bundle
from autosched.runtime.binding import Binder
from autosched.runtime.guard import LoadedModel
from autosched.runtime.load import load
from autosched.runtime.numerics import compare
from autosched.runtime.reads import NO_VALUE, Reads
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs, two_branches_program


class Adapted(torch.nn.Linear):
    """A linear layer under its old names, with a product of two small matrices added: one in a layer of its own, one beside the weight."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(8, 8)
        self.weight, self.bias = base.weight, base.bias
        self.down = torch.nn.Linear(8, 2, bias=False)
        self.up = torch.nn.Parameter(torch.zeros(8, 2))
        self.register_buffer("unread", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(x) @ self.up.t()
        return super().forward(x) + added


def _adapter(model: TwoBranches) -> Adapted:
    assert isinstance(model.left, Adapted)
    return model.left


def _adapt(model: TwoBranches) -> None:
    model.left = Adapted(model.left).eval()


def _load_state(model: TwoBranches, *, assign: bool = False) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({**state, "left.up": torch.ones(8, 2)}, assign=assign)


def _past_all_counts(model: TwoBranches) -> None:
    _adapter(model).up.data.fill_(1.0)


def _with_an_optimizer(model: TwoBranches) -> None:
    _adapter(model).up.grad = -torch.ones(8, 2)
    torch.optim.AdamW([_adapter(model).up], lr=0.5, fused=True).step()


_WAYS: dict[str, Callable[[TwoBranches], Any]] = {
    "state loaded": _load_state,
    "state assigned": lambda model: _load_state(model, assign=True),
    "parameter replaced": lambda model: setattr(_adapter(model), "up", torch.nn.Parameter(torch.ones(8, 2))),
    "other memory": lambda model: setattr(_adapter(model).up, "data", torch.ones(8, 2)),
    "past all counts": _past_all_counts,
    "with an optimizer": _with_an_optimizer,
}


def _answers_as(loaded: LoadedModel, model: torch.nn.Module) -> bool:
    args, kwargs = two_branches_inputs(5)
    with torch.no_grad():
        return compare(output_tensors(loaded(*args, **kwargs)), output_tensors(model(*args, **kwargs))).within_tolerance


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


@pytest.mark.parametrize("adapted", ["before the load", "after it"])
@pytest.mark.parametrize("way", _WAYS)
def test_new_weights_that_were_zero_are_never_missed(way: str, adapted: str, model: TwoBranches) -> None:
    data = encode_bundle(two_branches_bundle(model))
    if adapted == "before the load":
        _adapt(model)
    loaded = load(data, model, strict=True)
    if adapted == "after it":
        assert _answers_as(loaded, model)
        _adapt(model)
    for _ in range(2):
        assert _answers_as(loaded, model)
    _WAYS[way](model)
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        _answers_as(loaded, model)
    with torch.no_grad():
        _adapter(model).up.zero_()
    loaded.refresh()
    assert _answers_as(loaded, model)


def test_what_of_an_adapter_changes_nothing_keeps_its_schedule(model: TwoBranches) -> None:
    data = encode_bundle(two_branches_bundle(model))
    _adapt(model)
    loaded = load(data, model, strict=True)
    with torch.no_grad():
        _adapter(model).down.weight.fill_(3.0)  # times zero
        _adapter(model).get_buffer("unread").fill_(3.0)
        model.left.weight.mul_(2.0)
    assert _answers_as(loaded, model)
    # Its names are gone.
    model.left = torch.nn.Linear(8, 8).eval()
    assert _answers_as(loaded, model)


def test_only_what_is_read_and_not_bound_is_found(model: TwoBranches) -> None:
    program = two_branches_program(model)[0]
    args, kwargs = two_branches_inputs()
    with torch.no_grad():
        plain = Reads(program, model)
        plain.during(lambda: model(*args, **kwargs))
        assert plain.found() == ()
        _adapt(model)
        reads = Reads(program, model)
        reads.during(lambda: model(*args, **kwargs))
    found = tuple(Binding(NO_VALUE, ConstantSource.PARAMETER, name) for name in ("left.up", "left.down.weight"))
    assert reads.found() == found
    assert Reads(program, model, found).known == found
    assert Reads(program, TwoBranches(), found).known == ()


def test_a_model_that_cannot_be_watched_as_it_runs_may_read_anything(model: TwoBranches) -> None:
    program = two_branches_program(model)[0]
    _adapt(model)
    reads = Reads(program, model)
    calls: list[int] = []

    def answer() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise NotImplementedError("no rule for this mode")
        return "answer"

    assert reads.during(answer) == "answer"
    assert {item.name for item in reads.found()} == {"left.up", "left.down.weight", "left.unread"}


def test_a_model_whose_every_weight_is_bound_is_bound_once(model: TwoBranches, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    bind = Binder._bind_trusting

    def counted(*args: Any, **kwargs: Any) -> Any:
        times.append(1)
        return bind(*args, **kwargs)

    monkeypatch.setattr(Binder, "_bind_trusting", counted)
    data = encode_bundle(two_branches_bundle(model))
    load(data, model, strict=True)
    assert len(times) == 1
    _adapt(model)
    load(data, model, strict=True)
    assert len(times) == 3
