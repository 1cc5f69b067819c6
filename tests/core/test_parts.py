"""Parameters that are several tensors, and the names of their parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core import parts
from tests.conformance.quantised import Quantised, ScaledIntegers


def test_the_parts_have_the_names_that_export_gives_them() -> None:
    model = Quantised().eval()
    captured = capture(model, (torch.randn(2, 8),))
    named = parts.with_parts(dict(model.named_parameters()))
    names = {binding.value: binding.name for binding in captured.program.bindings}
    assert {"first.parametrizations.weight.original0", "parametrizations.own.original1"} <= set(names.values())
    for value, tensor in captured.constants.items():
        # The model's own memory, no copy.
        assert tensor.data_ptr() == named[names[value]].data_ptr()


def test_parts_of_parts_are_flat_and_a_plain_tensor_has_none() -> None:
    inner = ScaledIntegers(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1))
    outer: Any = ScaledIntegers(inner, torch.full((2, 1), 2.0))
    assert [tuple(item.shape) for item in parts.parts_of(outer)] == [(2, 2), (2, 1), (2, 1)]
    assert parts.parts_of(torch.ones(2)) == []


def test_a_name_that_is_there_stays_what_it_is() -> None:
    plain = torch.ones(1)
    weight: Any = ScaledIntegers(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1))
    named = {"a.parametrizations.weight.original0": plain, "a.weight": weight}
    assert parts.with_parts(named)["a.parametrizations.weight.original0"] is plain
    assert isinstance(nn.Parameter(weight, requires_grad=False), ScaledIntegers)
