"""On a CPU: convolutions with weights packed once for oneDNN, and the activation or residual addition that follows fused in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.activations import NONE, Activation, read_activation
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.capture.passes.onednn import adds_to_one_pixel, as_dense, packable_dtypes
from autosched.capture.passes.timing import earliest_finish, finish_of
from autosched.capture.passes.views import give_strides_back, loosen_views, may_give_strides_back
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one packed convolution stands for: the call that now ends it, its residual, its activation."""

    last: Node
    residual: int | None
    activation: Activation


def pack_cpu_convolutions(draft: Draft) -> int:
    """Each 2-d or 3-d convolution with constant weight becomes ``mkldnn::_convolution_pointwise`` on a weight reordered by the prologue.

    A 1-d convolution is one of a picture of one row, and a transposed one has a call of its own. Left as they are, oneDNN reorders their
    weights in every call.
    A residual is fused only where it is ready before the convolution starts, so that no branch waits for another.
    Results come out channels last; ``view`` becomes ``reshape``, which copies where it must, and so does what calls need that compute by
    strides.
    """
    if draft.device.type != "cpu" or not packable_dtypes():
        return 0
    if not may_give_strides_back(draft):
        # Packed convolutions change the strides of everything after them (channels last).
        return 0
    fixed = draft.fixed_values()
    users, outputs, times = draft.users(), set(draft.output_values()), earliest_finish(draft)
    chosen: dict[Node, tuple[Convolution, _Plan]] = {}
    taken: set[Node] = set()
    for node in draft.nodes:
        convolution = read_convolution(node)
        if convolution is None or node in taken or not _packable(convolution, node, draft, fixed):
            continue
        # Along a kernel of one number a dilation means nothing, and at some oneDNN crashes.
        sizes = draft.specs[convolution.weight].shape[2:]
        dilation = (1 if size == 1 else step for size, step in zip(sizes, convolution.dilation, strict=True))
        convolution = replace(convolution, dilation=tuple(dilation))
        plan = _epilogue(node, convolution, draft, users, outputs, times, taken)
        chosen[node] = convolution, plan
        taken.add(plan.last)
    if chosen:
        give_strides_back(draft)
    _replace(draft, chosen)
    if chosen:
        loosen_views(draft)
        draft.remove_dead()
    return len(chosen)


def _packable(convolution: Convolution, node: Node, draft: Draft, fixed: set[int]) -> bool:
    specs = [draft.specs[convolution.source], draft.specs[convolution.weight]]
    constant = convolution.weight in fixed and (convolution.bias is None or convolution.bias in fixed)
    plain = all(spec.dtype == specs[0].dtype and spec.elements > 0 for spec in specs)
    batched = len(specs[0].shape) == len(specs[1].shape) and len(specs[0].shape) in (3, 4, 5)
    packable = specs[0].dtype in packable_dtypes() and (not convolution.transposed or _packable_transposed(convolution, specs[1]))
    return constant and plain and batched and packable and node.outputs[0] >= 0 and not _reads_elsewhere(convolution, specs[0], draft, node)


def _reads_elsewhere(convolution: Convolution, source: TensorSpec, draft: Draft, node: Node) -> bool:
    """Whether oneDNN takes other numbers than it should: of one channel, channels last, with steps along rows that have one result each."""
    return source.shape[1] == draft.specs[node.outputs[0]].shape[-1] == 1 < convolution.stride[-1] and not convolution.transposed


def _packable_transposed(convolution: Convolution, weight: TensorSpec) -> bool:
    """As Inductor asks before it calls the same operators, and in float32."""
    each_channel = convolution.groups > 1 and convolution.groups == weight.shape[0]
    fits = all(more < step for more, step in zip(convolution.output_padding, convolution.stride, strict=True))
    return weight.dtype == "float32" and fits and not each_channel


def _epilogue(
    node: Node,
    convolution: Convolution,
    draft: Draft,
    users: Mapping[int, list[Node]],
    outputs: set[int],
    times: Mapping[int, tuple[float, float]],
    taken: set[Node],
) -> _Plan:
    made = node.outputs[0]
    following = _only_user(made, users, outputs)
    if following is None or following in taken:
        return _Plan(node, None, NONE)
    activation = read_activation(following)
    if activation is not None and following.args[0] == Ref(made):
        return _Plan(following, None, activation)
    if convolution.transposed or (convolution.groups > 1 and draft.specs[made].dtype != "float32"):
        # PyTorch adds to a group's results by a call of its own, which in sixteen bits it has not together with ReLU.
        return _Plan(node, None, NONE)
    residual = _residual(following, made, draft)
    if residual is None or finish_of(times, residual) > times[made][0]:
        return _Plan(node, None, NONE)
    after = _only_user(following.outputs[0], users, outputs)
    activation = read_activation(after) if after is not None and after not in taken else None
    if after is not None and activation is not None and activation.name == "relu":
        return _Plan(after, residual, activation)
    return _Plan(following, residual, NONE)


def _only_user(value: int, users: Mapping[int, list[Node]], outputs: set[int]) -> Node | None:
    found = users.get(value, [])
    return found[0] if len(found) == 1 and value not in outputs else None


def _residual(node: Node, made: int, draft: Draft) -> int | None:
    """The other summand, if ``node`` adds a tensor of the same shape and dtype to ``made``."""
    if node.target != "aten::add.Tensor" or node.argument("alpha") != 1:
        return None
    pair = [node.tensor("self"), node.tensor("other")]
    other = pair[1] if pair[0] == made else pair[0]
    if other is None or other == made or made not in pair:
        return None
    mine, theirs = draft.specs[made], draft.specs[other]
    if set(mine.shape[2:]) == {1} and not adds_to_one_pixel():
        return None
    return other if mine.shape == theirs.shape and mine.dtype == theirs.dtype else None


def _replace(draft: Draft, chosen: Mapping[Node, tuple[Convolution, _Plan]]) -> None:
    ended = {plan.last: (node, convolution, plan) for node, (convolution, plan) in chosen.items()}
    # The call between a convolution and the end of its epilogue has no reader left; dead code takes it.
    nodes: list[Node] = []
    for node in draft.nodes:
        if node in ended:
            first, convolution, plan = ended[node]
            nodes += _packed(draft, first, convolution, plan)
        elif node not in chosen:
            nodes.append(node)
    draft.nodes = _without_orphans(nodes, draft)


def _without_orphans(nodes: list[Node], draft: Draft) -> list[Node]:
    made = {value for node in nodes for value in node.outputs if value >= 0}
    known = made | set(draft.inputs) | set(draft.constants) | {value for node in draft.prologue for value in node.outputs}
    return [node for node in nodes if all(value in known for value in node.reads())]


def _packed(draft: Draft, node: Node, convolution: Convolution, plan: _Plan) -> list[Node]:
    shape = list(draft.specs[convolution.source].shape)
    if len(shape) > 3:
        return [_of_picture(draft, node, convolution, plan, shape, plan.last.outputs)]
    source, weight = _as_row(draft, node, convolution.source), _as_row(draft, node, convolution.weight)
    draft.prologue.append(weight)
    residual = [_as_row(draft, node, plan.residual)] if plan.residual is not None else []
    (stride,), (padding,), (dilation,) = convolution.stride, convolution.padding, convolution.dilation
    of_row = replace(
        convolution, source=source.outputs[0], weight=weight.outputs[0], stride=(1, stride), padding=(0, padding), dilation=(1, dilation),
        output_padding=(0, *convolution.output_padding),
    )  # fmt: skip
    made = draft.fresh()
    added = replace(plan, residual=residual[0].outputs[0] if residual else None)
    packed = _of_picture(draft, node, of_row, added, [*shape[:2], 1, shape[2]], (made,))
    line = Node(torch.ops.aten.squeeze.dim, (Ref(made), 2), {}, plan.last.outputs, f"{node.name}_line", node.source)
    return [source, *residual, packed, line]


def _as_row(draft: Draft, node: Node, line: int) -> Node:
    return Node(torch.ops.aten.unsqueeze.default, (Ref(line), 2), {}, (draft.fresh(),), f"{node.name}_row", node.source)


def _of_picture(draft: Draft, node: Node, convolution: Convolution, plan: _Plan, shape: list[int], outputs: tuple[int, ...]) -> Node:
    mkldnn = torch.ops.mkldnn
    weight = draft.fresh()
    padding, stride, dilation = list(convolution.padding), list(convolution.stride), list(convolution.dilation)
    geometry: tuple[object, ...] = (padding, stride, dilation, convolution.groups)
    reorder, call = mkldnn._reorder_convolution_weight.default, mkldnn._convolution_pointwise.default
    if convolution.transposed:
        geometry = (padding, list(convolution.output_padding), stride, dilation, convolution.groups)
        reorder, call = mkldnn._reorder_convolution_transpose_weight.default, mkldnn._convolution_transpose_pointwise.default
    given = (Ref(convolution.weight), *geometry, shape)
    draft.prologue.append(Node(reorder, given, {}, (weight,), f"{node.name}_packed", node.source))
    bias = as_dense(draft, node, convolution.bias)
    activation = plan.activation
    if plan.residual is None:
        args: tuple[object, ...] = (
            Ref(convolution.source), Ref(weight), bias, *geometry, activation.name, list(activation.scalars), activation.algorithm,
        )  # fmt: skip
        return Node(call, args, {}, outputs, node.name, node.source)
    unary = None if activation is NONE else activation.name
    args = (Ref(convolution.source), Ref(plan.residual), Ref(weight), bias, *geometry, "add", 1.0, unary, [], None)
    return Node(mkldnn._convolution_pointwise.binary, args, {}, outputs, node.name, node.source)
