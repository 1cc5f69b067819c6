"""Every shorter way to call an operator ends in the same result, to the bit, as the way through ``torch.ops``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosched.runtime.calls import resolve
from autosched.runtime.direct import _BINDINGS, binding_of

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=GENERATOR)
Y = torch.randn(4, 6, generator=GENERATOR)
IMAGE = torch.randn(2, 3, 8, 8, generator=GENERATOR)
BATCH = torch.randn(2, 4, 6, generator=GENERATOR)
WEIGHT = torch.randn(6, 6, generator=GENERATOR)
HEADS = torch.randn(1, 2, 5, 8, generator=GENERATOR)
TABLE, ROWS = torch.randn(10, 6, generator=GENERATOR), torch.tensor([[1, 9], [0, 3]])

# target: several argument lists, the longest as a captured graph writes them.
SAMPLES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "aten::add.Tensor": [((X, Y), {}), ((X, 1), {}), ((X, Y), {"alpha": 2})],
    "aten::sub.Tensor": [((X, Y), {}), ((X, 1.5), {"alpha": 2})],
    "aten::mul.Tensor": [((X, Y), {}), ((X, 2), {})],
    "aten::div.Tensor": [((X, Y), {}), ((X, 3), {})],
    "aten::neg.default": [((X,), {})],
    "aten::exp.default": [((X,), {})],
    "aten::rsqrt.default": [((X.abs(),), {})],
    "aten::square.default": [((X,), {})],
    "aten::pow.Tensor_Scalar": [((X, 2), {}), ((X.abs(), 0.5), {})],
    "aten::relu.default": [((X,), {})],
    "aten::sigmoid.default": [((X,), {})],
    "aten::tanh.default": [((X,), {})],
    "aten::mm.default": [((X, WEIGHT), {})],
    "aten::bmm.default": [((BATCH, BATCH.transpose(1, 2).contiguous()), {})],
    "aten::matmul.default": [((BATCH, WEIGHT), {})],
    "aten::addmm.default": [((WEIGHT[0], X, WEIGHT), {}), ((WEIGHT[0], X, WEIGHT), {"beta": 2, "alpha": 0.5})],
    "aten::cat.default": [(([X, Y], 1), {}), (([X, Y],), {})],
    "aten::stack.default": [(([X, Y],), {}), (([X, Y], 2), {})],
    "aten::embedding.default": [((TABLE, ROWS), {}), ((TABLE, ROWS, 0), {}), ((TABLE, ROWS, 0, False, False), {})],
    "aten::select.int": [((X, 1, 2), {}), ((X, 0, -1), {})],
    "aten::split_with_sizes.default": [((X, [1, 3]), {}), ((X, [2, 4], 1), {})],
    "aten::transpose.int": [((BATCH, 0, 2), {})],
    "aten::permute.default": [((BATCH, [2, 0, 1]), {})],
    "aten::unsqueeze.default": [((X, 1), {})],
    "aten::squeeze.dim": [((X.unsqueeze(1), 1), {})],
    "aten::view.default": [((X, [6, 4]), {}), ((X, [-1]), {})],
    "aten::reshape.default": [((BATCH, [8, 6]), {})],
    "aten::expand.default": [((X.unsqueeze(0), [3, -1, -1]), {})],
    "aten::t.default": [((X,), {})],
    "aten::mean.dim": [((BATCH, [1]), {}), ((BATCH, [-1], True), {})],
    "aten::sum.dim_IntList": [((BATCH, [0, 2]), {}), ((BATCH, [1], True), {"dtype": torch.float64})],
    "aten::softmax.int": [((X, -1), {}), ((X, 0, torch.float64), {})],
    "aten::layer_norm.default": [((X, [6]), {}), ((X, [6], WEIGHT[0], WEIGHT[1], 1e-6, False), {})],
    "aten::max_pool2d.default": [((IMAGE, [2, 2]), {}), ((IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], True), {})],
    "aten::linear.default": [((X, WEIGHT), {}), ((BATCH, WEIGHT, WEIGHT[0]), {})],
    "aten::gelu.default": [((X,), {}), ((X,), {"approximate": "tanh"})],
    "aten::adaptive_avg_pool2d.default": [((IMAGE, [1, 1]), {}), ((IMAGE, [3, 2]), {})],
    "aten::scaled_dot_product_attention.default": [
        ((HEADS, HEADS, HEADS), {}),
        ((HEADS, HEADS, HEADS, None, 0.0, True), {}),
        ((HEADS, HEADS, HEADS), {"scale": 0.5}),
    ],
}


def test_every_binding_has_samples() -> None:
    assert SAMPLES.keys() == _BINDINGS.keys()


@pytest.mark.parametrize("target", sorted(_BINDINGS))
def test_a_binding_computes_what_its_overload_computes(target: str) -> None:
    binding, overload = binding_of(target), resolve(target)
    assert binding is not None
    for args, kwargs in SAMPLES[target]:
        with torch.inference_mode():
            mine, theirs = binding(*args, **kwargs), overload(*args, **kwargs)
        mine, theirs = (mine, theirs) if isinstance(mine, (tuple, list)) else ([mine], [theirs])
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
            assert (
                (a.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())
                == (b.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())
                if isinstance(args[0], torch.Tensor)
                else True
            )


def test_what_is_not_listed_has_no_binding() -> None:
    assert binding_of("aten::convolution.default") is None
