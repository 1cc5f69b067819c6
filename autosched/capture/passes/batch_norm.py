"""Fold an inference batch norm into the layer before it, or into the one behind; what is left of them, as the call that a GPU has one
kernel for, or a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.capture.passes.identities import same_layout
from autosched.capture.passes.linear import Linear, read_linear
from autosched.capture.passes.views import RESHAPES, depends_on_strides, loosen_views
from autosched.core.program import Ref

aten = torch.ops.aten
_EXPORTED = "aten::_native_batch_norm_legit_no_training"
STATISTICS = ("weight", "bias", "running_mean", "running_var")


def fold_batch_norm(draft: Draft) -> int:
    """``batch_norm(conv(x, w, b))`` becomes ``conv(x, w', b')``, with ``w'`` and ``b'`` computed by the prologue; ``linear`` likewise.

    ``w' = w s`` and ``b' = (b - mean) s + beta`` with ``s = gamma / sqrt(var + eps)``, in float32 for half precision.
    A batch norm that follows something else stays one call: it is already a single pass over its input.

    *Source:* Ioffe, Szegedy, "Batch normalization", ICML 2015, section 3.1 (inference).
    """
    fixed, alone = draft.fixed_values(), draft.made_for_one()
    mapping: dict[int, int] = {}
    for norm in draft.nodes:
        source = norm.tensor("input") if is_fixed_norm(norm, fixed) else None
        if source is None:
            continue
        before = convolution_before(alone.get(source), draft) or _linear(norm, alone, draft)
        if before is None:
            continue
        node, layer = before
        if not all(value in fixed for value in (layer.weight, layer.bias) if value is not None):
            continue
        fold_into(node, layer, norm, draft)
        mapping[norm.outputs[0]] = source
    draft.substitute(mapping)
    draft.remove_dead()
    return len(mapping)


def fold_batch_norm_ahead(draft: Draft) -> int:
    """``conv(batch_norm(x), w, b)`` becomes ``conv(x, w', b')``, if nothing is put around ``x``; ``linear`` likewise.

    ``w' = w s`` and ``b' = b + w (beta - mean s)``, summed over what a result is made of. In sixteen bits norms stay: rounding ``b'`` might
    cost more than all of a result.
    """
    fixed, alone = draft.fixed_values(), draft.made_for_one()
    mapping: dict[int, int] = {}
    for node in draft.nodes:
        layer = _layer(node, draft)
        norm = None if layer is None else alone.get(layer.source)
        if layer is None or norm is None or norm.kind != _EXPORTED or not is_fixed_norm(norm, fixed):
            continue
        source, constants = norm.tensor("input"), [value for value in (layer.weight, layer.bias) if value is not None]
        if source is None or not same_layout(draft.specs[source], draft.specs[layer.source]):
            continue
        given = {draft.specs[value].dtype for value in (source, *constants, *norm.reads())}
        if given in ({"float32"}, {"float64"}) and all(value in fixed for value in constants):
            _fold_ahead(node, layer, norm, draft)
            mapping[layer.source] = source
    draft.substitute(mapping)
    draft.remove_dead()
    return len(mapping)


def _layer(node: Node, draft: Draft) -> Convolution | Linear | None:
    """What ``node`` is, if nothing is put around what it reads, whose features are in one dimension of its weight."""
    if (found := read_convolution(node)) is not None:
        batched = len(draft.specs[found.source].shape) == len(draft.specs[found.weight].shape)
        known = found.groups == 1 or draft.specs[found.weight].shape[:2] == (found.groups, 1)
        return found if batched and known and not found.transposed and not any(found.padding) else None
    linear = read_linear(node) if node.target == "aten::linear.default" else None
    if linear is None or linear.weight not in draft.constants:
        return None
    return linear if len(draft.specs[linear.source].shape) == len(draft.specs[linear.weight].shape) == 2 else None


def _fold_ahead(node: Node, layer: Convolution | Linear, norm: Node, draft: Draft) -> None:
    spec = draft.specs[layer.weight]
    prologue = _Prologue(draft, node, getattr(torch, spec.dtype))
    features = 0 if isinstance(layer, Convolution) and layer.groups > 1 else 1  # a dimension of the weight
    shape = [-1 if place == features else 1 for place in range(len(spec.shape))]
    scale = prologue.scale_of(norm)
    column, shift = (prologue.emit(aten.reshape.default, Ref(value), shape) for value in (scale, prologue.shift_of(norm, scale, None)))
    weight = prologue.emit(aten.mul.Tensor, Ref(layer.weight), Ref(column))
    parts = prologue.emit(aten.mul.Tensor, Ref(layer.weight), Ref(shift))
    bias = prologue.emit(aten.sum.dim_IntList, Ref(parts), list(range(1, len(shape))))
    if layer.bias is not None:
        bias = prologue.emit(aten.add.Tensor, Ref(bias), Ref(layer.bias))
    node.become(node, weight, bias)


def convolution_before(node: Node | None, draft: Draft) -> tuple[Node, Convolution] | None:
    """The convolution that ``node`` is, if a norm of its result can be folded into it."""
    found = None if node is None else read_convolution(node)
    if node is None or found is None or (found.transposed and found.groups > 1):
        return None  # where features are in two dimensions of a weight
    # Without a batch the first dimension is the channels, and the norm is of the second one.
    return (node, found) if len(draft.specs[found.source].shape) == len(draft.specs[found.weight].shape) else None


def _linear(norm: Node, alone: Mapping[int, Node], draft: Draft) -> tuple[Node, Linear] | None:
    """The layer whose features ``norm`` norms, which may lie in another number of rows there."""
    source = norm.tensor("input")
    if source is None or len(draft.specs[source].shape) != 2 or not same_layout(draft.specs[source], draft.specs[norm.outputs[0]]):
        return None
    node = alone.get(source)
    while node is not None and node.target in RESHAPES:
        given = node.tensor("self")
        if given is None or draft.specs[given].shape[-1:] != draft.specs[source].shape[-1:]:
            return None
        node = alone.get(given)
    found = read_linear(node) if node is not None and node.target == "aten::linear.default" else None
    # A weight that is computed may be of numbers of few bits, read by a loop as they are. One of one dimension makes a number of each row.
    if node is None or found is None or found.weight not in draft.constants or len(draft.specs[found.weight].shape) != 2:
        return None
    return node, found


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


def spell_batch_norms(draft: Draft) -> int:
    """On a CPU, in float32: one that is left becomes ``addcmul(shift, x, scale)`` where the numbers of a place lie side by side.

    PyTorch's own kernel takes twice the time there, and many times that for lines, which it makes row-major. These stay as they lie now, so
    that ``view`` becomes ``reshape``. Returns how many did.
    """
    if depends_on_strides(draft):
        return 0
    fixed = draft.fixed_values()
    spelled = 0
    for node in draft.nodes:
        source = node.tensor("input") if is_fixed_norm(node, fixed) else None
        spec = draft.specs[source] if source is not None else None
        if source is None or spec is None or spec.strides[1] != 1 or {draft.specs[value].dtype for value in node.reads()} != {"float32"}:
            continue
        prologue = _Prologue(draft, node, torch.float32)
        scale = prologue.scale_of(node)
        shape = [-1, *[1] * (len(spec.shape) - 2)]
        shift, scale = (prologue.emit(aten.reshape.default, Ref(value), shape) for value in (prologue.shift_of(node, scale, None), scale))
        node.op, node.args, node.kwargs, node.outputs = aten.addcmul.default, (Ref(shift), Ref(source), Ref(scale)), {}, node.outputs[:1]
        spelled += 1
    if spelled:
        loosen_views(draft)
    return spelled


def is_fixed_norm(node: Node, fixed: set[int]) -> bool:
    """Whether it is a batch norm whose statistics are the same in every run."""
    if node.kind != _EXPORTED or any(value >= 0 for value in node.outputs[1:]):
        return False
    scale, shift, mean, variance = _statistics(node)
    return mean in fixed and variance in fixed and all(value in fixed for value in (scale, shift) if value is not None)


def _statistics(norm: Node) -> list[int | None]:
    return [norm.tensor(name) for name in STATISTICS]


def fold_into(node: Node, layer: Convolution | Linear, norm: Node, draft: Draft) -> None:
    """Give ``node``, which is ``layer``, the weight and bias that make ``norm`` of its result needless."""
    spec = draft.specs[layer.weight]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    prologue = _Prologue(draft, node, wide)
    scale = prologue.scale_of(norm)
    features = 1 if isinstance(layer, Convolution) and layer.transposed else 0  # a dimension of the weight
    column = prologue.emit(aten.reshape.default, Ref(scale), [-1 if place == features else 1 for place in range(len(spec.shape))])
    weight = prologue.emit(aten.mul.Tensor, prologue.widen(layer.weight), Ref(column))
    shift = prologue.shift_of(norm, scale, layer.bias)
    if wide is not dtype:
        weight, shift = (prologue.emit(aten.to.dtype, Ref(value), dtype) for value in (weight, shift))
    node.become(node, weight, shift)


@dataclass(frozen=True, slots=True)
class _Prologue:
    """What the prologue computes of a norm's statistics for ``node``, in the dtype ``wide``."""

    draft: Draft
    node: Node
    wide: torch.dtype

    def emit(self, op: OpOverload[..., Any], *args: object) -> int:
        """The value that one more call makes."""
        return self.draft.prepare(self.node, "folded", op, *args)

    def widen(self, value: int) -> Ref:
        """A value of the model in that dtype."""
        alike = self.draft.specs[value].dtype == str(self.wide).removeprefix("torch.")
        return Ref(value if alike else self.emit(aten.to.dtype, Ref(value), self.wide))

    def scale_of(self, norm: Node) -> int:
        """What ``norm`` multiplies each feature with."""
        gamma, _, _, variance = _statistics(norm)
        assert variance is not None
        scale = self.emit(aten.rsqrt.default, Ref(self.emit(aten.add.Scalar, self.widen(variance), norm.argument("eps"))))
        return scale if gamma is None else self.emit(aten.mul.Tensor, Ref(scale), self.widen(gamma))

    def shift_of(self, norm: Node, scale: int, bias: int | None) -> int:
        """What it adds to each feature then, where ``bias`` is added before."""
        _, beta, mean, _ = _statistics(norm)
        assert mean is not None
        if bias is not None:
            shift = self.emit(aten.mul.Tensor, Ref(self.emit(aten.sub.Tensor, self.widen(bias), self.widen(mean))), Ref(scale))
        else:
            shift = self.emit(aten.neg.default, Ref(self.emit(aten.mul.Tensor, self.widen(mean), Ref(scale))))
        return shift if beta is None else self.emit(aten.add.Tensor, Ref(shift), self.widen(beta))
