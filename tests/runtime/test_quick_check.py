"""Calls recognised at once: never one that the checks refuse or lay out again, and none that belongs to another shape."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.errors import InputMismatch
from autosched.export.bundle import encode_bundle
from autosched.runtime import quick_check as quick_checks
from autosched.runtime.guard import _fit
from autosched.runtime.load import LoadedModel, load
from autosched.runtime.quick_check import quick_check
from autosched.runtime.shape_table import _MOST_KNOWN, ShapeTable
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs


class Own(torch.Tensor):
    """A tensor of a user's own class."""


def _inference(rows: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(rows, 8)


_TENSORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.randn(4, 8),
    "empty": lambda: torch.randn(0, 8),
    "more rows": lambda: torch.randn(5, 8),
    "flat": lambda: torch.randn(32),
    "transposed": lambda: torch.randn(8, 4).t(),
    "expanded": lambda: torch.randn(1, 8).expand(4, 8),
    "wide": lambda: torch.randn(4, 16)[:, ::2],
    "offset": lambda: torch.randn(5, 8)[1:],
    "float64": lambda: torch.randn(4, 8, dtype=torch.float64),
    "int32": lambda: torch.zeros(4, 8, dtype=torch.int32),
    "complex": lambda: torch.randn(4, 8, dtype=torch.complex64).conj(),
    "imaginary": lambda: torch.randn(4, 8, dtype=torch.complex64).conj().imag,
    "negated": lambda: torch._neg_view(torch.randn(4, 8)),
    "gradients": lambda: torch.randn(4, 8, requires_grad=True),
    "with history": lambda: torch.randn(4, 8, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.randn(4, 8)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.randn(4, 8), requires_grad=False),
    "subclass": lambda: torch.randn(4, 8).as_subclass(Own),
    "sparse": lambda: torch.randn(4, 8).to_sparse(),
    "compressed": lambda: torch.ones(4, 8).to_sparse_csr(),
    "meta": lambda: torch.empty(4, 8, device="meta"),
    "inference": lambda: _inference(4),
    "inference, more rows": lambda: _inference(5),
    "number": lambda: 1.0,
    "nothing": lambda: None,
}
_MODEL = TwoBranches().eval()
_SIGNATURE = inspect.signature(TwoBranches.forward)
_FLAGS = st.sampled_from([True, True, True, False, 1, 1.0, "True", None])
_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients on": torch.enable_grad,
    "gradients off": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "as it is": nullcontext,
}
_ONE_CALL = st.tuples(st.sampled_from(sorted(_MODES)), st.sampled_from(sorted(_TENSORS)), st.sampled_from(sorted(_TENSORS)), _FLAGS)


@pytest.fixture(scope="module")
def table() -> ShapeTable:
    """Two shapes, 4 and 5 rows."""
    model = TwoBranches().eval()
    bundles = [two_branches_bundle(model), two_branches_bundle(model, rows=5)]
    loaded = load(encode_bundle(*bundles), model, strict=True)
    assert loaded._table is not None
    return loaded._table


def _forget(table: ShapeTable) -> None:
    for form in table._forms:
        form._known = ()


def _call(table: ShapeTable, x: Any, shift: Any, flag: Any, *, learn: bool) -> tuple[object, bool]:
    """What the guard makes of a call: why not, or where it goes and which of its tensors are laid out again; and if it was known."""
    try:
        found = table.find(_SIGNATURE, (x,), {"more": {"shift": shift, "flag": flag}})
        checked = found.checked
        if not checked:
            _fit(found.slot, found.tensors, table.device, _MODEL)
            if learn:
                found.learn()
    except InputMismatch as error:
        return str(error), False
    given_tensors = [x, shift]
    places = [next((place for place, item in enumerate(given_tensors) if item is tensor), None) for tensor in found.tensors]
    return (table.slots.index(found.slot), found.size, places, [tensor.stride() for tensor in found.tensors]), checked


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@settings(max_examples=300, deadline=None)
@given(st.lists(_ONE_CALL, min_size=1, max_size=6), _ONE_CALL)
def test_a_table_that_knows_calls_says_what_one_that_knows_none_says(table: ShapeTable, before: list[Any], last: Any) -> None:
    _forget(table)
    # The like of the last call in every mode, for what was learned in one mode may not hold in another.
    again = [(mode, *last[1:]) for mode in ("gradients off", "gradients on", "inference", "autocast", "gradients on")]
    for mode, x, shift, flag in [*before, last, *again]:
        given_x, given_shift = _TENSORS[x](), _TENSORS[shift]()
        with _MODES[mode]():
            known = table._forms[0]._known
            quick, checked = _call(table, given_x, given_shift, flag, learn=True)
            learned = table._forms[0]._known
            _forget(table)
            long, _ = _call(table, given_x, given_shift, flag, learn=False)
        table._forms[0]._known = learned
        assert quick == long
        assert not checked or learned == known


@pytest.mark.parametrize("name", ["gradients", "with history", "parameter"])
def test_what_requires_gradients_is_never_known(table: ShapeTable, name: str) -> None:
    _forget(table)
    x, shift = _TENSORS[name](), torch.randn(4, 8)
    for _ in range(2):
        with torch.no_grad():
            verdict, checked = _call(table, x, shift, True, learn=True)
        assert not isinstance(verdict, str)
        assert not checked
    verdict, _ = _call(table, x, shift, True, learn=True)
    assert "requires gradients" in str(verdict)


needs_guard = pytest.mark.skipif(quick_checks._guard() is None, reason="this PyTorch has no guard that can be relied on")


@needs_guard
@pytest.mark.parametrize("mode", ["gradients on", "gradients off", "inference"])
def test_the_second_call_is_known(table: ShapeTable, mode: str) -> None:
    _forget(table)
    seen: list[bool] = []
    with _MODES[mode]():
        for _ in range(3):
            _, checked = _call(table, torch.randn(4, 8), torch.randn(4, 8), True, learn=True)
            seen.append(checked)
    assert seen == [False, True, True]


def test_no_more_is_remembered_than_pays(table: ShapeTable) -> None:
    _forget(table)
    frozen, plain = _TENSORS["frozen parameter"], _TENSORS["plain"]
    makers = {"plain": plain, "frozen": frozen, "inference": lambda: _inference(4)}
    for mode in ("gradients off", "inference"):
        for x in makers.values():
            for shift in makers.values():
                with _MODES[mode]():
                    _call(table, x(), shift(), True, learn=True)
    assert len(table._forms[0]._known) == (_MOST_KNOWN if quick_checks._guard() is not None else 0)


def test_what_is_known_keeps_no_tensor(table: ShapeTable) -> None:
    _forget(table)
    x, shift = torch.randn(4, 8), torch.randn(4, 8)
    watched = [weakref.ref(x), weakref.ref(shift)]
    _call(table, x, shift, True, learn=True)
    del x, shift
    gc.collect()
    assert [item() for item in watched] == [None, None]


def test_where_offsets_matter_nothing_is_known(table: ShapeTable) -> None:
    _forget(table)
    prepared = table.slots[0].prepared
    assert prepared is not None
    prepared.offsets_matter = True
    try:
        _call(table, torch.randn(4, 8), torch.randn(4, 8), True, learn=True)
        assert table._forms[0]._known == ()
    finally:
        prepared.offsets_matter = False


def _blind(*tensors: object, **sizes: object) -> object:
    """A guard that says yes to everything."""

    class Blind:
        def check(self, *tensors: object) -> bool:
            return True

    return Blind()


def _absent(*tensors: object, **sizes: object) -> object:
    raise AttributeError("TensorGuards")


@pytest.mark.parametrize("guard", [_blind, _absent, lambda *tensors: None])
def test_a_guard_that_cannot_be_relied_on_is_not_used(monkeypatch: pytest.MonkeyPatch, guard: Callable[..., object]) -> None:
    from torch._C._dynamo import guards

    monkeypatch.setattr(guards, "TensorGuards", guard)
    assert quick_checks._guard.__wrapped__() is None


def test_without_a_guard_every_call_goes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_checks, "_guard", lambda: None)
    x = torch.randn(4, 8)
    assert quick_check([x], [0], [x]) is None
    model = TwoBranches().eval()
    loaded: LoadedModel = load(encode_bundle(two_branches_bundle(model)), model, strict=True)
    args, kwargs = two_branches_inputs(3)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(loaded(*args, **kwargs)["sum"], loaded(*args, **kwargs)["sum"])
    assert loaded._table is not None
    assert loaded._table._forms[0]._known == ()
