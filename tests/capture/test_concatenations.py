"""What follows results of convolutions that lie side by side is done to each of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.capture.passes.batch_norm import fold_batch_norm
from autosched.capture.passes.concatenations import activate_before_joining, part_batch_norms
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from tests.capture.test_rewrite_passes import check, kinds, lively_norm
from tests.conformance.apply import Apply


def _several_kernels() -> dict[str, nn.Module]:
    """As MixNet has it."""
    layers = {"one": nn.Conv2d(2, 3, 1), "three": nn.Conv2d(2, 4, 3, padding=1, bias=False)}
    return {
        **layers,
        "five": nn.Conv2d(2, 2, 5, padding=2, groups=2),
        "norm": lively_norm(9),
        "four": lively_norm(4),
        "eight": lively_norm(8),
    }


def test_what_follows_several_convolutions_is_part_of_each():
    def run(m, x):
        a, b, c = x.split(2, 1)
        return nn.functional.silu(m.norm(torch.cat([m.one(a), m.three(b), m.five(c)], 1)))

    model, inputs = Apply(run, **_several_kernels()), (torch.randn(2, 6, 5, 5),)
    draft = check(model, inputs, part_batch_norms, expected=1)
    assert fold_batch_norm(draft) == 3
    draft.observe()
    assert activate_before_joining(draft) == 1
    assert [kind for kind in kinds(draft) if not kind.startswith("s") or kind == "silu"] == [*["conv2d"] * 3, *["silu"] * 3, "cat"]
    with torch.no_grad():
        torch.testing.assert_close(draft.observe()[draft.output_values()[0]].clone(), model(*inputs), rtol=1e-4, atol=1e-4)
    found = capture(model.eval(), inputs, lowering=Lowering.REWRITTEN)
    calls = [call.target.partition("::")[2] for operator in found.program.graph.operators for call in operator.calls]
    assert not {"silu.default", "addcmul.default", "_native_batch_norm_legit_no_training.default"} & set(calls)
    with torch.no_grad():
        torch.testing.assert_close(bind(found.program, found.constants, "cpu").run(list(inputs))[0], model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.norm(torch.cat([m.one(x), m.three(x), m.five(x)[:, :2].sin()], 1)),
        lambda m, x: m.norm(torch.cat([m.one(x), m.three(x), x], 1)),
        lambda m, x: m.norm(torch.cat([m.one(x), m.three(x), y := m.five(x)], 1)).sum() + y,
        lambda m, x: m.norm(y := torch.cat([m.one(x), m.three(x), m.five(x)], 1)) + y,
        lambda m, x: m.eight(torch.cat([m.three(x)] * 2, 1)),
        lambda m, x: m.four(torch.cat([m.three(x), m.three(x + 1)], 2)),
    ],
)
def test_other_things_side_by_side_stay(body):
    check(Apply(body, **_several_kernels()), (torch.randn(2, 2, 5, 5),), part_batch_norms, expected=0)


def test_activations_of_other_things_side_by_side_stay():
    layers = _several_kernels()
    for body in (
        lambda m, x: torch.cat([m.one(x), x], 1).relu(),
        lambda m, x: torch.cat([m.one(x), m.one(x + 1)], 2).relu(),
        lambda m, x: torch.cat([m.one(x), m.three(x)], 1).sin(),
        lambda m, x: (y := torch.cat([m.one(x), m.three(x)], 1)).relu().sum() + y,
    ):
        check(Apply(body, **layers), (torch.randn(2, 2, 5, 5),), activate_before_joining, expected=0)
