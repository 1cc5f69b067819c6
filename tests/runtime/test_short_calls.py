"""Calls written without a loop give an operator the arguments that the general way gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosched.core.program import Argument, Call, Many, Ref
from autosched.runtime import calls
from autosched.runtime.calls import compile_call

_CPU = torch.device("cpu")
_X, _Y, _Z = Ref(0), Ref(1), Ref(2)
_CALLS: dict[str, tuple[str, tuple[Argument, ...], tuple[tuple[str, Argument], ...]]] = {
    "one tensor": ("aten::relu.default", (_X,), ()),
    "one tensor, one literal": ("aten::unsqueeze.default", (_X, 1), ()),
    "one tensor, two literals": ("aten::transpose.int", (_X, 0, 1), ()),
    "one tensor, a list and a flag": ("aten::sum.dim_IntList", (_X, Many((1,)), True), ()),
    "two tensors, two literals": ("aten::select_scatter.default", (_X, _Y, 0, 1), ()),
    "one tensor, four literals": ("aten::slice.Tensor", (_X, 0, 1, 4, 2), ()),
    "one tensor, a keyword": ("aten::gelu.default", (_X,), (("approximate", "tanh"),)),
    "one tensor, a literal and a keyword": ("aten::sum.dim_IntList", (_X, Many((0,))), (("dtype", None),)),
    "two tensors": ("aten::mul.Tensor", (_X, _Y), ()),
    "two tensors, a literal": ("aten::mse_loss.default", (_X, _Y, 0), ()),
    "two tensors, a keyword": ("aten::add.Tensor", (_X, _Y), (("alpha", 3),)),
    "three tensors": ("aten::addcmul.default", (_X, _Y, _Z), ()),
    "three tensors, a keyword": ("aten::addcmul.default", (_X, _Y, _Z), (("value", 0.5),)),
    "three tensors, two keywords": ("aten::addmm.default", (_X, _Y, _Z), (("beta", 2), ("alpha", 0.5))),
    "tensors among literals": ("aten::layer_norm.default", (_X, Many((4,)), Ref(3), Ref(3), 1e-3), ()),
    "a literal first": ("aten::pow.Scalar", (2.0, _X), ()),
}


@pytest.mark.parametrize("name", _CALLS)
def test_every_form_of_a_call_gives_what_the_general_way_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, args, kwargs = _CALLS[name]
    generator = torch.Generator().manual_seed(1)
    values = [torch.rand(4, 4, generator=generator) for _ in range(3)]
    if target == "aten::select_scatter.default":
        values[1] = values[1][0]
    made: list[torch.Tensor] = []
    for short in (calls._short_call, lambda *arguments: None):
        monkeypatch.setattr(calls, "_short_call", short)
        slots: list[Any] = [*values, torch.ones(4), None]
        compile_call(Call(target, args, kwargs, (4,)), _CPU)(slots)
        made.append(slots[4])
    assert made[0].stride() == made[1].stride()
    assert torch.equal(*made)
