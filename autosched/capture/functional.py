"""An exported graph made functional where that is plain to see: nothing is changed in place, and no operator copies only sometimes.

PyTorch's own way, ``run_decompositions``, traces the model once more, which takes longer than exporting it. Of what it does nearly every
model needs only that a few operators get other names and that activations are not in place, which can be read off the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from autosched.capture.aliasing import hides_a_view
from autosched.capture.plain_calls import mean_slope
from autosched.core.extents import storage_of

aten = torch.ops.aten

Replacement = Callable[[Graph, Node], Node]
"""Puts what stands for a node before it, whose arguments may be others by then than when it was looked at."""

# Tensors are changed in place by these; without the underscore, the same is computed into a new one.
_POINTWISE = frozenset({
    "add_", "sub_", "mul_", "div_", "relu_", "hardtanh_", "silu_", "mish_", "gelu_", "elu_", "leaky_relu_", "hardswish_", "hardsigmoid_",
    "sigmoid_", "tanh_", "clamp_", "clamp_min_", "clamp_max_", "neg_", "exp_", "sqrt_", "rsqrt_", "masked_fill_",
})  # fmt: skip
# Without autograd their result is their argument.
_SAME = frozenset({aten.detach_.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default})
_EXPANDING = frozenset({aten.expand.default, aten.expand_as.default, aten.broadcast_to.default})
_KEY = torch._C.DispatchKey


def make_functional(graph: Graph) -> bool:
    """Make of a graph of ``torch.export.export`` what ``run_decompositions`` makes of it, where it is known how.

    A call in place becomes one that is not if nothing that is read later shares the memory: no view, no input, no weight.

    Returns:
        Whether the graph is functional now; if not, nothing of it was changed.
    """
    replacements: list[tuple[Node, Replacement]] = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not _is_operator_on_tensors(node):
            return False
        if _stays(node.target) and not hides_a_view(node):
            continue
        replacement = _replacement(node)
        if replacement is None:
            return False
        replacements.append((node, replacement))
    if not _writes_go_unseen(graph):
        return False
    for node, replacement in replacements:
        with graph.inserting_before(node):
            other = replacement(graph, node)
        node.replace_all_uses_with(other)
        graph.erase_node(node)
    return True


def name_turns(graph: Graph) -> None:
    """``einsum`` of one tensor that only exchanges its dimensions becomes ``permute``, which says that it is a view.

    What does not say so is decomposed, and all calls of the same operator with it: the products of a model, for one mask that is turned.
    """
    for node in graph.nodes:
        if node.target is not aten.einsum.default or len(node.args[1]) != 1:
            continue
        term, arrow, result = node.args[0].replace(" ", "").partition("->")
        if arrow and sorted(term) == sorted(set(result)) and len(term) == len(result) and term.isalpha():
            node.target, node.args, node.kwargs = aten.permute.default, (node.args[1][0], [term.index(letter) for letter in result]), {}


def spell_out(graph: Graph) -> None:
    """Put other words for calls of which ``run_decompositions`` makes something else than eager mode does.

    It copies what goes through dropout that is switched off. Of what is written through ``expand`` it adds to ``x`` the difference, so that
    ``x + (new - x)`` is there: rounded where ``x`` is large, and NaN where it is infinite. What is copied into the whole of a buffer it
    takes for the buffer, whatever dtype and shape it has. For ``rrelu_`` outside training it allocates slopes that nobody draws.
    """
    for node in graph.nodes:
        if node.target is aten.dropout.default and not (node.args[1] and node.args[2]):
            node.target, node.args = aten.alias.default, node.args[:1]
        elif node.target in _EXPANDING and (given := tensor_of(node.args[0])) is not None and (made := tensor_of(node)) is not None:
            if made.shape == given.shape:
                node.target, node.args, node.kwargs = aten.alias.default, node.args[:1], {}
            elif made.shape == (1,) * (made.dim() - given.dim()) + given.shape:
                node.target, node.args, node.kwargs = aten.view.default, (node.args[0], list(made.shape)), {}
        elif node.target is aten.copy_.default and (target := tensor_of(node.args[0])) is not None:
            if isinstance(node.args[1], Node):
                node.args = (node.args[0], _like(graph, node, node.args[1], target), *node.args[2:])
            else:
                node.target, node.args, node.kwargs = aten.fill_.Scalar, node.args[:2], {}
        elif node.target is aten.rrelu_.default and (slope := mean_slope(node.target, node.args, node.kwargs)) is not None:
            node.target, node.args, node.kwargs = aten.leaky_relu_.default, (node.args[0], slope), {}


def _like(graph: Graph, node: Node, source: Node, target: torch.Tensor) -> Node:
    """``source`` in the dtype and the shape of ``target``, into which ``node`` copies it."""
    given = tensor_of(source)
    if given is None:
        return source
    with graph.inserting_before(node):
        if (given.dtype, given.device) != (target.dtype, target.device):
            given = given.to(target.device, target.dtype)
            kind = {"dtype": target.dtype, "device": target.device}
            source = call_before(graph, node, aten._to_copy.default, (source,), kind, given)
        if given.shape != target.shape:
            given = given.expand(target.shape)
            source = call_before(graph, node, aten.expand.default, (source, list(target.shape)), value=given)
            source = call_before(graph, node, aten.clone.default, (source,), {"memory_format": torch.contiguous_format}, given.contiguous())
    return source


def _is_operator_on_tensors(node: Node) -> bool:
    """Of PyTorch's own, with dense tensors of fixed shapes."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    made = node.meta.get("val")
    items = made if isinstance(made, list | tuple) else [made]
    return all(item is None or (isinstance(item, torch.Tensor) and item.layout is torch.strided) for item in items)


def _stays(op: OpOverload[..., Any]) -> bool:
    """Whether ``run_decompositions`` with an empty table leaves an operator as it is.

    *Source:* ``torch.export``, ``_check_valid_to_preserve``: composite ones stay if their schema says that they neither alias nor write.
    """
    if op in _SAME:
        return True
    if op in _KNOWN or op._schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in op.tags or op is aten.native_batch_norm.default:
        return False
    if op.has_kernel_for_dispatch_key(_KEY.CompositeImplicitAutograd):
        return all(item.alias_info is None for item in (*op._schema.arguments, *op._schema.returns))
    return _KEY.Autograd not in op.py_kernels


def _replacement(node: Node) -> Replacement | None:
    return _KNOWN.get(node.target, _given_back if hides_a_view(node) else _out_of_place)(node)


def _writes_go_unseen(graph: Graph) -> bool:
    """Whether what a call in place writes is read afterwards through its own result alone."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    memory: dict[Node, set[Node]] = {}
    sharing: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if _is_written(node):
            target = node.args[0]
            owners = memory[target]
            if any(owner.op == "placeholder" for owner in owners):
                return False
            others = (other for owner in owners for other in sharing[owner])
            if any(place[user] > place[node] for other in others for user in other.users):
                return False
            memory[node] = {node}
        else:
            memory[node] = set().union(*(memory[given] for given in may_alias(node))) or {node}
        for owner in memory[node]:
            sharing.setdefault(owner, []).append(node)
    return True


def _is_written(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and target not in _KNOWN and target not in _SAME and target._schema.is_mutable


def may_alias(node: Node) -> list[Node]:
    """The arguments whose memory a result may be in."""
    if node.target is operator.getitem:
        return node.all_input_nodes
    if not isinstance(node.target, OpOverload):
        return []
    fresh = node.target not in _KNOWN and all(item.alias_info is None for item in node.target._schema.returns) and not hides_a_view(node)
    return [] if fresh or node.target is aten.batch_norm.default else node.all_input_nodes


def _given_back(node: Node) -> Replacement | None:
    """A composite that gives back its first argument as it is."""
    given, made = tensor_of(node.args[0]), tensor_of(node)
    if given is None or made is None or _place(given) != _place(made):
        return None
    return _argument


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _out_of_place(node: Node) -> Replacement | None:
    """The operator without its underscore, where its result is laid out as what it was written to is."""
    op = node.target
    assert isinstance(op, OpOverload)
    name = op._schema.name.removeprefix("aten::")
    if name not in _POINTWISE or not _decides_the_result(node.args[0], node):
        return None
    return lambda graph, node: call_before(graph, node, getattr(getattr(aten, name[:-1]), op._overloadname), node.args, node.kwargs)


def _decides_the_result(target: object, node: Node) -> bool:
    """Whether dtype, shape and strides of a pointwise operator's result are those of its argument ``target``.

    Numbers never decide: what is changed in place takes none that would make another dtype of it.
    """
    ours = tensor_of(target)
    if ours is None or not _is_dense(ours):
        return False
    for given in node.all_input_nodes[1:]:
        theirs = tensor_of(given)
        if theirs is None or theirs.dtype not in (ours.dtype, torch.bool) or (theirs.dim() and theirs.device != ours.device):
            return False
        if theirs.shape == ours.shape and theirs.stride() != ours.stride():
            return False
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie beside each other, in whatever order of dimensions."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != reach:
            return False
        reach *= size
    return True


def _batch_norm(node: Node) -> Replacement | None:
    """``batch_norm(input, weight, bias, mean, var, training, momentum, eps, cudnn_enabled)`` with the statistics it was trained with."""
    made = tensor_of(node)
    if node.args[5] or made is None or made.numel() == 0:
        return None
    nothing = made.new_empty(0)

    def put(graph: Graph, node: Node) -> Node:
        args = (*node.args[:5], *node.args[6:8])
        whole = call_before(graph, node, aten._native_batch_norm_legit_no_training.default, args, value=(made, nothing, nothing))
        first = graph.call_function(operator.getitem, (whole, 0))
        first.meta = dict(node.meta)
        return first

    return put


def _reshape(node: Node) -> Replacement | None:
    """A view, of a copy where the strides allow none."""
    given, made = tensor_of(node.args[0]), tensor_of(node)
    if given is None or made is None or given.numel() == 0:
        return None
    if node.target is aten.flatten.using_ints and given.shape == made.shape:
        return _argument
    # As the operator itself does, which leaves a size that is to be inferred where it needs none of them.
    shape = node.args[1] if node.target is aten.reshape.default and given.is_contiguous() else list(made.shape)
    try:
        given.view(made.shape)
    except (RuntimeError, ValueError):
        copied = given.contiguous()
        viewed = copied.view(made.shape)
        return lambda graph, node: call_before(
            graph, node, aten._unsafe_view.default, (_copy(graph, node, torch.contiguous_format, copied), shape), value=viewed
        )
    return lambda graph, node: call_before(graph, node, aten.view.default, (node.args[0], shape))


def _contiguous(node: Node) -> Replacement | None:
    given = tensor_of(node.args[0])
    if given is None:
        return None
    wanted = node.kwargs.get("memory_format", torch.contiguous_format)
    assert isinstance(wanted, torch.memory_format)
    return _argument if given.is_contiguous(memory_format=wanted) else lambda graph, node: _copy(graph, node, wanted)


def _to(node: Node) -> Replacement | None:
    """``to`` another dtype or device, or the same."""
    given, made, op = tensor_of(node.args[0]), tensor_of(node), node.target
    assert isinstance(op, OpOverload)
    names = [argument.name for argument in op._schema.arguments]
    asked = {**dict(zip(names[1:], node.args[1:], strict=False)), **node.kwargs}
    if given is None or made is None or any(asked.pop(name, False) for name in ("copy", "non_blocking", "pin_memory")):
        return None
    if given.dtype is made.dtype and given.device == made.device and asked.get("memory_format") in (None, torch.preserve_format):
        return _argument
    if "layout" in asked:
        return None
    return lambda graph, node: call_before(graph, node, aten._to_copy.default, node.args[:1], asked)


def _dropout(node: Node) -> Replacement | None:
    # A copy, as what leaves the model must not be an input of it under another name.
    return None if node.args[2] else _copy


def _chunk(node: Node) -> Replacement | None:
    given = tensor_of(node.args[0])
    chunks, dim = node.args[1], node.args[2] if len(node.args) > 2 else 0
    if given is None or not isinstance(chunks, int) or not isinstance(dim, int) or not given.shape[dim]:
        return None
    size = -(-given.shape[dim] // chunks)
    # Defaults are left out, as PyTorch leaves them out of what it traces.
    return lambda graph, node: call_before(graph, node, aten.split.Tensor, (node.args[0], size, *([dim] if dim else [])))


def _expand(node: Node) -> Replacement | None:
    made = tensor_of(node)
    return None if made is None else lambda graph, node: call_before(graph, node, aten.expand.default, (node.args[0], list(made.shape)))


def _reverse(node: Node) -> Replacement | None:
    made = tensor_of(node)
    if made is None:
        return None
    return lambda graph, node: call_before(graph, node, aten.permute.default, (node.args[0], list(reversed(range(made.dim())))))


_KNOWN: dict[object, Callable[[Node], Replacement | None]] = {
    aten.batch_norm.default: _batch_norm,
    aten.reshape.default: _reshape,
    aten.reshape_as.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.contiguous.default: _contiguous,
    aten.to.dtype: _to,
    aten.to.device: _to,
    aten.to.dtype_layout: _to,
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout,
    aten.lift_fresh_copy.default: lambda node: _copy,
    aten.chunk.default: _chunk,
    aten.expand_as.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.numpy_T.default: _reverse,
}


def _argument(graph: Graph, node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _copy(graph: Graph, node: Node, layout: torch.memory_format | None = None, value: torch.Tensor | None = None) -> Node:
    return call_before(graph, node, aten.clone.default, node.args[:1], {} if layout is None else {"memory_format": layout}, value)


def call_before(
    graph: Graph, instead: Node, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, value: object = None
) -> Node:
    """A call where the graph inserts, with the source line of the node that it stands for, and with its result unless another is given."""
    node = graph.create_node("call_function", op, args, kwargs or {}, name=op._schema.name.removeprefix("aten::"))
    node.meta = dict(instead.meta) if value is None else {**instead.meta, "val": value}
    return node


def tensor_of(node: object) -> torch.Tensor | None:
    """The tensor that a node stands for, if it stands for one."""
    made = node.meta.get("val") if isinstance(node, Node) else None
    return made if isinstance(made, torch.Tensor) else None
