"""Models that are given where the bags of an embedding begin: what is drawn for them is what the operator takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.bag_offsets import bag_offsets
from autosched.runtime.inductor.bind import bind_recorded
from autosched.runtime.kernels import bind, random_inputs
from tests.conformance.apply import Apply

_INDICES = torch.tensor([1, 4, 2, 9, 5, 0, 7])
_BEGINS = torch.tensor([0, 2, 2, 5])


def _bags(**options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(10, 4, **options)


_MODELS = {
    "as given": (Apply(lambda m, indices, begins: m.bags(indices, begins), bags=_bags(mode="sum")), (_INDICES, _BEGINS)),
    "with the end of the last": (
        Apply(lambda m, indices, begins: m.bags(indices, begins), bags=_bags(include_last_offset=True)),
        (_INDICES, torch.cat([_BEGINS, torch.tensor([7])])),
    ),
    "of several tables": (
        Apply(
            lambda m, indices, begins: torch.cat([m.one(indices, begins[0]), m.other(indices.flip(0), begins[1])], 1),
            one=_bags(mode="max"),
            other=_bags(padding_idx=2),
        ),
        (_INDICES, torch.stack([_BEGINS, _BEGINS])),
    ),
    "in fewer bits": (
        Apply(lambda m, indices, begins: m.bags(indices.long(), begins.long()), bags=_bags()),
        (_INDICES.int(), _BEGINS.int()),
    ),
}


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN])
@pytest.mark.parametrize("name", _MODELS)
def test_what_is_drawn_is_taken(name: str, lowering: Lowering) -> None:
    model, given = _MODELS[name]
    captured = capture(model.eval(), given, lowering=lowering)
    bound = bind(captured.program, captured.constants)
    for seed in range(20):
        inputs = random_inputs(captured.program, seed)
        assert torch.equal(bound.run(inputs)[0], model(*inputs))
    # They are not the example's all the time.
    assert len({tuple(random_inputs(captured.program, seed)[1].flatten().tolist()) for seed in range(20)}) > 1


def test_what_is_drawn_is_taken_where_the_model_is_compiled_as_a_whole() -> None:
    model, given = _MODELS["as given"]
    captured = capture_inductor(model.eval(), given)
    assert isinstance(captured, Captured), captured
    assert bag_offsets(captured.program) == {captured.program.given[1]: False}
    inputs = random_inputs(captured.program, 3)
    (made,) = bind_recorded(captured.program, captured.constants).run(inputs)
    assert torch.allclose(made, model(*inputs))


def test_indices_are_no_offsets() -> None:
    model = Apply(lambda m, indices, begins: m.bags(indices, begins), bags=_bags())
    program = capture(model.eval(), (_INDICES, _BEGINS), lowering=Lowering.ATEN).program
    assert bag_offsets(program) == {program.given[1]: False}
