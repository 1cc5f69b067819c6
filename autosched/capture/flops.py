"""Floating point operations of one call.

Matrix products, convolutions and attention are counted by torch's own registry (a multiply-add is two operations). What the registry
leaves out is counted as one operation for each element: of the output for pointwise calls, of the input for reductions. Views, copies
and look-ups count nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, flop_registry

from autosched.core.custom_operators import is_custom
from autosched.core.graph import TensorSpec

Shape = Sequence[int]
# What composite calls count, by call: a model repeats its layers, several lowerings count each of them, and to run one costs a millisecond.
_counted: dict[Hashable, int] = {}
_MOST_COUNTED = 4096
_COPIES = {"aten::clone", "aten::copy_", "aten::_to_copy", "aten::fill", "aten::masked_fill", "aten::where", "aten::copy"}
_PER_INPUT_ELEMENT = {
    "aten::_native_batch_norm_legit_no_training": 2, "aten::batch_norm": 2, "aten::native_layer_norm": 8, "aten::layer_norm": 8,
    "aten::native_group_norm": 8, "aten::group_norm": 8, "aten::rms_norm": 4, "aten::_softmax": 5, "aten::softmax": 5,
    "aten::_log_softmax": 5, "aten::log_softmax": 5,
}  # fmt: skip
_CONVOLUTIONS = {"mkldnn::_convolution_pointwise": False, "mkldnn::_convolution_transpose_pointwise": True}
_PACKED = (*_CONVOLUTIONS, "mkldnn::_linear_pointwise", "mkl::_mkl_linear")
# Products of a matrix with integers, which the registry does not have.
_INTEGER_PRODUCTS = frozenset(
    {
        "aten::_int_mm", "aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu",
        "aten::_weight_int4pack_mm_with_scales_and_zeros",
    }
)  # fmt: skip


def count_flops(
    op: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object], outputs: Sequence[TensorSpec | None]
) -> int:
    """Operations of ``op`` on ``args`` and ``kwargs``, whose tensors are on the meta device.

    Args:
        op: the operator.
        args, kwargs: its arguments, tensors with their real shapes.
        outputs: spec of each tensor returned, None where it is not used.
    """
    name = op._schema.name
    packet = op.overloadpacket
    shapes = [spec.shape for spec in outputs if spec is not None]
    if name in _PACKED or (name in _INTEGER_PRODUCTS and shapes):
        return _packed_flops(op, args, shapes[0])
    if name == "aten::mkldnn_rnn_layer" and shapes:
        return _lstm_flops(args, shapes[0])
    if packet in flop_registry:
        count = cast(Callable[..., int], flop_registry[packet])
        return int(count(*args, **kwargs, out_val=torch.empty(shapes[0], device="meta") if shapes else None))
    if is_custom(name):
        # Nobody knows, unless its owner has told torch's registry; what it moves is counted, and what it takes is measured.
        return 0
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        counted = _composite_flops(op, args, kwargs)
        if counted:
            return counted
    if name in _COPIES or not shapes:
        return 0
    if torch.Tag.pointwise in op.tags:
        return math.prod(shapes[0])
    tensors = [item for item in args if isinstance(item, torch.Tensor)]
    if name in _PER_INPUT_ELEMENT and tensors:
        return _PER_INPUT_ELEMENT[name] * tensors[0].numel()
    if tensors and torch.Tag.reduction in op.tags:
        return tensors[0].numel()
    if "pool" in name and len(args) > 1 and isinstance(args[1], list) and "adaptive" not in name:
        return math.prod(shapes[0]) * math.prod(int(size) for size in args[1])
    return 0


def _packed_flops(op: OpOverload[..., Any], args: Sequence[object], out: Shape) -> int:
    tensors = [item for item in args if isinstance(item, torch.Tensor)]
    if (transposed := _CONVOLUTIONS.get(op._schema.name)) is not None:
        # By name: one overload has the residual before it, and any of them may have the weight's shape.
        weight = cast(torch.Tensor, args[[argument.name for argument in op._schema.arguments].index("W")])
        return int(conv_flop_count(list(tensors[0].shape), list(weight.shape), list(out), transposed))
    return 2 * math.prod(out) * int(tensors[0].shape[-1])


def _lstm_flops(args: Sequence[object], out: Shape) -> int:
    """Four gates, each of which multiplies a step's input and its hidden state."""
    inputs = int(cast(torch.Tensor, args[0]).shape[-1])
    return 2 * 4 * math.prod(out) * (inputs + int(out[-1]))


def _composite_flops(op: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    call = (op, _form(args), _form(tuple(kwargs.items())))
    try:
        found = _counted.get(call)
    except TypeError:
        # What has no hash is counted each time.
        return _parts_flops(op, args, kwargs)
    if found is None:
        if len(_counted) >= _MOST_COUNTED:
            _counted.clear()
        found = _counted[call] = _parts_flops(op, args, kwargs)
    return found


def _form(item: object) -> Hashable:
    """What an argument's count depends on. With its type: 1, 1.0 and True are equal."""
    if isinstance(item, torch.Tensor):
        return item.shape, item.stride(), item.dtype
    if isinstance(item, list | tuple):
        return tuple(map(_form, item))
    return type(item), item


def _parts_flops(op: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    # A composite call (conv2d, linear, matmul) is no registry entry itself; the parts it dispatches to are.
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            op(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return 0
    total: int = counter.get_total_flops()
    return total
