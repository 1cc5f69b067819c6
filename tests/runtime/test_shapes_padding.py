"""Padding is tried on the model as it is: after a change it is tried again, and what cannot be padded runs as it came."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.program import ConstantSource
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import FallbackWarning, LoadedModel, load
from autosched.runtime.shapes_padding import Padding
from tests.conformance.apply import Apply
from tests.conformance.bundles import evidence_for


class _Gated(torch.nn.Module):
    """Adds the mean of the batch by a gate, which is zero as in models that are yet to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.gate * x.mean(0)


def _bundles(model: torch.nn.Module, draw: Callable[[int], torch.Tensor], *rows: int) -> bytes:
    return encode_bundle(*(_bundle(model, draw(count)) for count in rows))


def _bundle(model: torch.nn.Module, x: torch.Tensor) -> Bundle:
    captured = capture(model, (x,))
    graph, device = captured.program.graph, cpu_device_key()
    evidence = evidence_for(len(graph), device, graph.hash)
    named = [item for item in captured.program.bindings if item.source is ConstantSource.LITERAL]
    literals = {item.name: captured.constants[item.value] for item in named}
    return make_bundle(captured.program, sequential(graph), evidence, literals, device, software_key())


def _rows(count: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def _require_same(loaded: LoadedModel, model: torch.nn.Module, *rows: int) -> None:
    for count in rows:
        torch.testing.assert_close(loaded(_rows(count)), model(_rows(count)))


@pytest.fixture
def gated() -> tuple[_Gated, LoadedModel]:
    model = _Gated().eval()
    loaded = load(_bundles(model, _rows, 4, 8), model, pad=True)
    _require_same(loaded, model, 3)
    assert (loaded.report().padding, loaded.report().calls) == ("on", 1)
    return model, loaded


_CHANGES: dict[str, Callable[[_Gated], object]] = {
    "counted": lambda model: model.load_state_dict({"gate": torch.ones(8)}),
    "uncounted": lambda model: model.gate.data.copy_(torch.ones(8)),
    "replaced": lambda model: setattr(model, "gate", torch.nn.Parameter(torch.ones(8), requires_grad=False)),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_weights_that_make_rows_depend_on_each_other_end_padding(gated: tuple[_Gated, LoadedModel], change: str) -> None:
    model, loaded = gated
    _CHANGES[change](model)
    with pytest.warns(FallbackWarning, match="rows that are added change the others"):
        _require_same(loaded, model, 3, 6, 8)
    assert "rows that are added" in loaded.report().padding
    assert [shape.calls for shape in loaded.report().shapes] == [1, 1]


def test_padding_is_tried_once_after_each_change(gated: tuple[_Gated, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = gated
    tried: list[int] = []
    verify = Padding.verify

    def counted(self: Padding, place: int, *rest: Any) -> None:
        tried.append(place)
        verify(self, place, *rest)

    monkeypatch.setattr(Padding, "verify", counted)
    for _ in range(2):
        model.gate.zero_()
        _require_same(loaded, model, 3, 6, 2, 7)
    assert tried == [0, 1, 0, 1]


def test_a_model_that_is_changed_before_each_call_is_not_tried_without_end(gated: tuple[_Gated, LoadedModel]) -> None:
    model, loaded = gated

    def changed_before(calls: int) -> None:
        for _ in range(calls):
            model.gate.zero_()
            _require_same(loaded, model, 3)

    with pytest.warns(FallbackWarning, match="changed before each of the last ones"):
        changed_before(20)
    before = loaded.report().calls
    _require_same(loaded, model, 3, 3)
    assert (loaded.report().padding, loaded.report().calls) == ("on", before + 2)


def test_a_change_while_padding_is_tried_says_nothing_of_it(gated: tuple[_Gated, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model, loaded = gated
    verify = Padding.verify

    def disturbed(self: Padding, *rest: Any) -> None:
        other = threading.Thread(target=lambda: model.gate.copy_(torch.ones(8)))
        other.start()
        other.join()
        verify(self, *rest)

    monkeypatch.setattr(Padding, "verify", disturbed)
    model.gate.zero_()
    with pytest.warns(FallbackWarning, match="changed, by another thread, while padding was tried"):
        _require_same(loaded, model, 3)
    assert loaded.report().padding == "on"
    monkeypatch.setattr(Padding, "verify", verify)
    model.gate.zero_()
    _require_same(loaded, model, 3)
    assert loaded.report().calls == 2


def test_what_has_no_rows_in_memory_runs_as_it_came() -> None:
    model = Apply(lambda m, x: x * 2).eval()
    loaded = load(_bundles(model, _rows, 4, 8), model, pad=True)
    with pytest.warns(FallbackWarning, match="input 0 is no strided tensor"):
        made = loaded(_rows(3).to_sparse())
    assert torch.equal(made.to_dense(), _rows(3) * 2)


def test_inputs_of_eight_bits_are_padded() -> None:
    def draw(count: int) -> torch.Tensor:
        return _rows(count).to(torch.float8_e4m3fn)

    model = Apply(lambda m, x: x.float() * 2).eval()
    loaded = load(_bundles(model, draw, 4, 8), model, strict=True, pad=True)
    assert torch.equal(loaded(draw(3)), model(draw(3)))


def test_where_padding_cannot_be_tried_the_shapes_keep_their_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*args: object) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(Padding, "verify", stumble)
    model = Apply(lambda m, x: x * 2).eval()
    with pytest.warns(FallbackWarning, match="are not padded: .*no kernel"):
        loaded = load(_bundles(model, _rows, 4, 8), model, pad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert torch.equal(loaded(_rows(4)), _rows(4) * 2)
    assert loaded.report().scheduled


def test_memory_that_is_short_while_padding_is_tried_says_nothing_of_it(
    gated: tuple[_Gated, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loaded = gated
    real = Padding._far

    def no_room(*_: object) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Padding, "_far", no_room)
    model.gate.data.add_(0.0)
    loaded.refresh()
    with pytest.warns(FallbackWarning, match="not enough memory to try"):
        _require_same(loaded, model, 3)
    assert loaded.report().padding == "on"
    monkeypatch.setattr(Padding, "_far", real)
    before = loaded.report().calls
    _require_same(loaded, model, 3)
    assert loaded.report().calls == before + 1
    monkeypatch.setattr(Padding, "_far", no_room)
    loaded.refresh()
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for _ in range(40):
            _require_same(loaded, model, 3)
    assert "out of memory" in loaded.report().padding
