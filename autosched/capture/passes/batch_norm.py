"""Fold an inference batch norm into the convolution before it; what is left of them, as the call that a GPU has one kernel for."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.core.program import Ref

aten = torch.ops.aten
_EXPORTED = "aten::_native_batch_norm_legit_no_training"


def fold_batch_norm(draft: Draft) -> int:
    """``batch_norm(conv(x, w, b))`` becomes ``conv(x, w', b')``, with ``w'`` and ``b'`` computed by the prologue.

    ``w' = w s`` and ``b' = (b - mean) s + beta`` with ``s = gamma / sqrt(var + eps)``, in float32 for half precision.
    A batch norm that follows something else stays one call: it is already a single pass over its input.

    *Source:* Ioffe, Szegedy, "Batch normalization", ICML 2015, section 3.1 (inference).
    """
    fixed = draft.fixed_values()
    producers, users, outputs = draft.producers(), draft.users(), set(draft.output_values())
    mapping: dict[int, int] = {}
    folded = 0
    for norm in draft.nodes:
        if norm.kind != _EXPORTED or any(value >= 0 for value in norm.outputs[1:]):
            continue
        source = norm.tensor("input")
        before = producers.get(source) if source is not None else None
        if before is None or source in outputs or len(users.get(before.outputs[0], ())) != 1:
            continue
        convolution = read_convolution(before)
        statistics = [norm.tensor(name) for name in ("weight", "bias", "running_mean", "running_var")]
        if convolution is None or not _all_fixed(convolution, statistics, fixed):
            continue
        if convolution.transposed and convolution.groups > 1:
            # Features are in two dimensions of its weight.
            continue
        if len(draft.specs[convolution.source].shape) != len(draft.specs[convolution.weight].shape):
            # Without a batch the first dimension is the channels, and the norm is of the second one.
            continue
        _write_folded(draft, before, convolution, norm, statistics)
        mapping[norm.outputs[0]] = before.outputs[0]
        folded += 1
    draft.substitute(mapping)
    draft.remove_dead()
    return folded


def whole_batch_norms(draft: Draft) -> int:
    """``batch_norm`` in the place of what export makes of it.

    On a GPU the exported operator is two kernels and a copy of the statistics, where ``batch_norm``, as the model called it, is one
    kernel of cuDNN's.
    """
    replaced = 0
    for node in draft.nodes:
        if node.kind != _EXPORTED or any(value >= 0 for value in node.outputs[1:]):
            continue
        if node.tensor("running_mean") is None or node.tensor("running_var") is None:
            continue
        given = [node.argument(name) for name in ("input", "weight", "bias", "running_mean", "running_var")]
        node.args, node.kwargs = (*given, False, node.argument("momentum"), node.argument("eps"), True), {}
        node.op = aten.batch_norm.default
        node.outputs = node.outputs[:1]
        replaced += 1
    return replaced


def _all_fixed(convolution: Convolution, statistics: list[int | None], fixed: set[int]) -> bool:
    needed = [convolution.weight, *(value for value in (convolution.bias, *statistics) if value is not None)]
    return statistics[2] is not None and statistics[3] is not None and all(value in fixed for value in needed)


def _write_folded(draft: Draft, node: Node, convolution: Convolution, norm: Node, statistics: list[int | None]) -> None:
    gamma, beta, mean, variance = statistics
    assert mean is not None
    assert variance is not None
    spec = draft.specs[convolution.weight]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32

    def emit(op: object, *args: object) -> int:
        value = draft.fresh()
        draft.prologue.append(Node(op, args, {}, (value,), f"{node.name}_folded", node.source))  # type: ignore[arg-type]
        return value

    def widen(value: int) -> Ref:
        return Ref(value if draft.specs[value].dtype == str(wide).removeprefix("torch.") else emit(aten.to.dtype, Ref(value), wide))

    scale = emit(aten.rsqrt.default, Ref(emit(aten.add.Scalar, widen(variance), norm.argument("eps"))))
    if gamma is not None:
        scale = emit(aten.mul.Tensor, Ref(scale), widen(gamma))
    features = 1 if convolution.transposed else 0  # a dimension of the weight
    column = emit(aten.reshape.default, Ref(scale), [-1 if place == features else 1 for place in range(len(spec.shape))])
    weight = emit(aten.mul.Tensor, widen(convolution.weight), Ref(column))
    if convolution.bias is not None:
        shift = emit(aten.mul.Tensor, Ref(emit(aten.sub.Tensor, widen(convolution.bias), widen(mean))), Ref(scale))
    else:
        shift = emit(aten.neg.default, Ref(emit(aten.mul.Tensor, widen(mean), Ref(scale))))
    if beta is not None:
        shift = emit(aten.add.Tensor, Ref(shift), widen(beta))
    if wide is not dtype:
        weight, shift = emit(aten.to.dtype, Ref(weight), dtype), emit(aten.to.dtype, Ref(shift), dtype)
    node.args = (node.args[0], Ref(weight), Ref(shift), *node.args[3:])
    node.kwargs = {name: item for name, item in node.kwargs.items() if name not in ("weight", "bias")}
