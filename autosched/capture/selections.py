"""``x[mask] += w``: what is computed of the elements that a mask selects and put back in their places, as a choice between whole tensors.

How many a mask selects, no program knows ahead. Where elements are computed one by one, all of them may be: those that were not selected
are then not taken. So it is with what is the same for each of them (``x[mask] = 0``): ``index_put`` counts what is selected, and a CUDA
graph cannot wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, Node

from autosched.capture.functional import call_before, tensor_of
from autosched.capture.screen import is_check

aten = torch.ops.aten

_SAME_VALUES = frozenset({aten._to_copy.default, aten.alias.default, aten.clone.default, aten.detach.default})
# Of integers some others raise an error, as a division by zero does, for elements that were never selected.
_OF_INTEGERS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar})


def choose_selected(exported: ExportedProgram) -> None:
    """Put ``where`` for each ``index_put`` of a functional program whose value is made, element by element, of what its own mask selects,
    or is the same for each element.

    What becomes of a buffer or an input stays as it is, if nothing is selected for it: a schedule may put it there in place.
    """
    graph = exported.graph
    returned = next(node for node in graph.nodes if node.op == "output").args[0]
    specs = exported.graph_signature.output_specs
    written = {node for node, spec in zip(returned, specs, strict=True) if spec.kind is not OutputKind.USER_OUTPUT}
    for node in list(graph.nodes):
        if node.target is not aten.index_put.default or (len(node.args) > 3 and node.args[3]) or node.kwargs.get("accumulate"):
            continue
        base, indices, value = node.args[:3]
        selection = _selection(base, indices)
        if selection is None or not isinstance(value, Node) or not selection.fits(value):
            continue
        if node in written and not selection.selected:
            continue
        with graph.inserting_before(node):
            chosen = selection.choose(graph, node, value)
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
        for item in reversed(selection.order):
            _erase_unless_needed(graph, item)


@dataclass(slots=True)
class _Selection:
    """The elements of one tensor that one mask selects.

    Args:
        base: the tensor that something is put into.
        indices: as that call has them: a mask, and nothing else but ``None`` before it.
        mask: the mask.
        behind: how many dimensions are behind those of the mask.
        selected: of the nodes that the value is made of, those that take the same elements of some tensor.
        order: the nodes whose results have as many elements as the mask selects, each after those that it is made of.
    """

    base: Node
    indices: list[Any]
    mask: Node
    behind: int
    selected: list[Node] = field(default_factory=list)
    order: list[Node] = field(default_factory=list)

    def takes(self, node: Node) -> bool:
        """Whether ``node`` is made of selected elements one by one; notes what it is made of."""
        if node in self.order:
            return True
        made, base = tensor_of(node), tensor_of(self.base)
        if made is None or base is None or made.dim() != base.dim() - self._mask_dims + 1 or made.device != base.device:
            return False
        if node.target is aten.index.Tensor:
            whole, indices = node.args
            given = tensor_of(whole)
            if given is None or given.shape != base.shape or not _same(indices, self.indices):
                return False
            self.selected.append(node)
        elif not _by_element(node, made) or not all(self.fits(item) for item in node.all_input_nodes):
            return False
        self.order.append(node)
        return True

    def choose(self, graph: Graph, put: Node, value: Node) -> Node:
        """The whole of what ``put`` returns, computed where ``graph`` inserts."""
        whole: dict[Node, Node] = {item: item.args[0] for item in self.selected}  # type: ignore[misc]
        for item in self.order:
            if item not in whole:
                args = torch.fx.map_arg(item.args, lambda node: whole.get(node, node))
                kwargs = torch.fx.map_arg(item.kwargs, lambda node: whole.get(node, node))
                whole[item] = _call(graph, item, item.target, args, kwargs)
        mask = self.mask
        for _ in range(self.behind):
            mask = _call(graph, put, aten.unsqueeze.default, (mask, -1), {})
        return _call(graph, put, aten.where.self, (mask, whole.get(value, value), self.base), {})

    @property
    def _mask_dims(self) -> int:
        made = tensor_of(self.mask)
        assert made is not None
        return made.dim()

    def fits(self, node: Node) -> bool:
        """Whether it is selected elements, or a tensor that is the same for each of them."""
        made = tensor_of(node)
        if made is None:
            return False
        if _is_open(made):
            return self.takes(node)
        if made.dim() <= self.behind:
            return True
        alike = made.shape[made.dim() - self.behind - 1] == 1
        # Beyond that place, dimensions are those before the mask's: as many as it has would have to be put between.
        return alike and (self._mask_dims == 1 or made.dim() == self.behind + 1)


def _selection(base: object, indices: object) -> _Selection | None:
    if not isinstance(base, Node) or not isinstance(indices, list | tuple) or not indices or any(item is not None for item in indices[:-1]):
        return None
    mask = indices[-1]
    whole, chosen = tensor_of(base), tensor_of(mask)
    if whole is None or chosen is None or chosen.dtype is not torch.bool or not chosen.dim() or _is_open(whole) or _is_open(chosen):
        return None
    assert isinstance(mask, Node)
    return _Selection(base, list(indices), mask, whole.dim() - chosen.dim() - len(indices) + 1)


def _by_element(node: Node, made: torch.Tensor) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable or not _is_open(made):
        return False
    if op in _SAME_VALUES:
        return True
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    tensors = [made, *(given for item in node.all_input_nodes if (given := tensor_of(item)) is not None)]
    return pointwise and (op in _OF_INTEGERS or all(tensor.is_floating_point() for tensor in tensors))


def _is_open(tensor: torch.Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments of a functional graph are the same, or computed alike."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if not isinstance(one, Node) or not isinstance(other, Node) or one is other:
        return one is other or (type(one) is type(other) and not isinstance(one, Node) and bool(one == other))
    alike = one.op == other.op == "call_function" and one.target == other.target and one.kwargs == other.kwargs
    drawn = isinstance(one.target, OpOverload) and torch.Tag.nondeterministic_seeded in one.target.tags
    return alike and not drawn and _same(one.args, other.args)


def _call(graph: Graph, instead: Node, op: Any, args: Any, kwargs: Any) -> Node:
    given, named = torch.fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    with torch.no_grad():
        made = op(*given, **named)
    return call_before(graph, instead, op, args, dict(kwargs), made)


def _erase_unless_needed(graph: Graph, node: Node) -> None:
    """Take it out if nothing reads it, but for checks of how many elements it has."""
    if node.users and not all(map(_is_only_checked, node.users)):
        return
    for item in dict.fromkeys([*_users_of(node), node]):
        graph.erase_node(item)


def _is_only_checked(node: Node) -> bool:
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat):
        return all(map(_is_only_checked, node.users))
    return is_check(node)


def _users_of(node: Node) -> Iterator[Node]:
    """All that reads it, and what reads that, each before what it reads."""
    for user in list(node.users):
        yield from _users_of(user)
        yield user
