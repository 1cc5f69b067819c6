"""Capture leaves a model as it was: tensors without values, which a traced call has left in attributes, are gone."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosched.capture.export import capture
from autosched.capture.leftovers import attributes_kept
from autosched.core.errors import UnsupportedGraph
from autosched.runtime.kernels import bind
from tests.conformance.stateful import Rotary


class Detector(torch.nn.Module):
    """As YOLO's head: what depends on the shape alone is made at the first call."""

    shape: torch.Size | None = None
    anchors = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shape != x.shape:
            self.anchors = torch.arange(x.shape[-1], device=x.device).float()
            self.shape = x.shape
        return x * 2 + self.anchors


class Keeper(torch.nn.Module):
    """Keeps what it was given in all kinds of places."""

    def __init__(self, shared: list[Any]) -> None:
        super().__init__()
        self.list, self.again = shared, shared
        self.table: dict[str, Any] = {"in": {"deeper": None}}
        self.ordered: OrderedDict[str, Any] = OrderedDict(first=1, second=2)
        self.last: deque[Any] = deque([None], maxlen=1)
        self.set: set[int] = {1}
        self.settings = SimpleNamespace(mask=None)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.list.append(x)
        self.table["in"]["deeper"] = x
        del self.ordered["first"]
        self.ordered["third"] = x
        self.last.append(x)
        self.set.add(2)
        self.settings.mask = x
        self.new = [x]
        return x + 1


def test_a_model_that_was_never_called_can_be_captured_and_called_after() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), Detector()).eval(), torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = capture(model, (x,))
    assert "anchors" not in vars(model[1])
    assert "shape" not in vars(model[1])
    with torch.no_grad():
        assert torch.equal(model(x), model[0](x) * 2 + torch.arange(4.0))
    assert {binding.name for binding in captured.program.bindings} == {"0.weight", "0.bias"}


class Registering(Rotary):
    """Another buffer is made by each call, and has no place before the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("made", torch.ones_like(x))
        return x * self.made


def test_a_buffer_that_a_call_makes_is_made_by_the_models_own_call() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), Rotary()).eval(), torch.randn(2, 4)
    capture(model, (x,))
    assert model[1].table is None
    with torch.no_grad():
        assert torch.equal(model(x), model[0](x) * torch.arange(4.0))


def test_a_buffer_that_a_call_of_the_model_itself_makes_is_no_write_to_its_input() -> None:
    model, x = Rotary().eval(), torch.randn(2, 4)
    captured = capture(model, (x,))
    assert captured.program.writes == ()
    assert (model._buffers, "table" in vars(model)) == ({"table": None}, False)
    assert torch.equal(bind(captured.program, captured.constants).run([x])[0], x * torch.arange(4.0))


class Counting(torch.nn.Module):
    """Its state is among buffers that it has not."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)
        self.register_buffer("state", torch.zeros(2, 4))
        self.register_buffer("table", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + 1
        return x * self.state


def test_a_buffer_after_one_that_is_none_is_the_one_that_is_written() -> None:
    model = Counting().eval()
    captured = capture(model, (torch.randn(2, 4),))
    assert [binding.name for binding in captured.program.state] == ["state"]
    assert [item.target for item in captured.program.writes] == [binding.value for binding in captured.program.state]
    assert list(model._buffers) == ["mask", "state", "table"]


def test_a_buffer_that_a_call_registers_is_not_left() -> None:
    model = Registering().eval()
    with contextlib.suppress(UnsupportedGraph):
        capture(model, (torch.randn(2, 4),))
    assert model._buffers == {"table": None}


def test_every_container_is_the_one_that_it_was_and_holds_what_it_held() -> None:
    shared: list[Any] = [0]
    model = torch.nn.Sequential(Keeper(shared), Keeper(shared)).eval()
    held = [dict(vars(part)) for part in model]
    capture(model, (torch.ones(2),))
    for part, before in zip(model, held, strict=True):
        now = vars(part)
        assert now.keys() == before.keys()
        assert all(now[key] is before[key] for key in before if key != "count")
        assert part.count == 0
        assert part.table == {"in": {"deeper": None}}
        assert list(part.ordered.items()) == [("first", 1), ("second", 2)]
        assert list(part.last) == [None]
        assert part.set == {1}
        assert part.settings.mask is None
    assert shared == [0]


def test_a_call_that_fails_leaves_nothing_either() -> None:
    model = Keeper([])
    model.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), attributes_kept(model):
        model(torch.ones(1))
    assert not hasattr(model, "new")
    assert model.list == []


def test_an_attribute_that_a_call_deletes_is_there_again_whatever_it_held() -> None:
    model = Keeper([])
    model.mask = None
    with attributes_kept(model):
        del model.mask
    assert vars(model)["mask"] is None


def test_what_a_hook_has_collected_is_what_it_was() -> None:
    seen: list[torch.Tensor] = []
    model = torch.nn.Linear(4, 4).eval()
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    capture(model, (torch.ones(2, 4),))
    assert seen == []


def test_what_was_not_changed_is_not_written() -> None:
    """Loaded schedules count writes to dictionaries and compare what they see."""

    class Watched(dict[str, Any]):
        def __setitem__(self, key: str, value: object) -> None:
            raise AssertionError(key)

    model = Keeper([])
    model.table = Watched(one=1)
    with attributes_kept(model):
        pass
    with attributes_kept(model):
        dict.__setitem__(model.table, "two", 2)
    assert model.table == {"one": 1}
