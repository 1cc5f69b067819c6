"""Views cost no operator: each operator makes the views it reads."""

from __future__ import annotations

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.output_layout import format_of
from autosched.capture.traffic import is_view
from autosched.core.custom_operators import is_custom
from autosched.core.program import Ref

# The same numbers in another shape, a view where that can be.
RESHAPES = ("aten::view.default", "aten::_unsafe_view.default", "aten::reshape.default")
# These look at strides: they compute something else where the tensors before them are laid out in another way.
_STRIDE_SENSITIVE = frozenset({"aten::as_strided", "aten::view_as_complex", "aten::_reshape_alias"})


def depends_on_strides(draft: Draft) -> bool:
    """Whether some call computes by the strides of what it reads, so that no layout may change.

    A custom operator may, but is given them back (``capture.custom.restore_custom_layouts``), if they are those of a format.
    """
    return any(_by_strides(node) for node in draft.nodes) or not may_give_strides_back(draft)


def may_give_strides_back(draft: Draft) -> bool:
    """Whether all that calls compute by the strides of is laid out in a format, as which a copy can give it back."""
    given = {value for node in draft.nodes if is_custom(node.kind) or _by_strides(node) for value in node.reads()}
    given -= draft.fixed_values() | set(draft.inputs)
    return all(format_of(draft.specs[value]) is not None for value in given)


def give_strides_back(draft: Draft) -> None:
    """Before each of PyTorch's own calls that compute by strides: a copy of what will be laid out otherwise than it was observed."""
    nodes: list[Node] = []
    for node in draft.nodes:
        for value in dict.fromkeys(node.reads()) if _by_strides(node) else ():
            if (layout := format_of(draft.specs[value])) is not None:
                # Which copies where it must, like ``reshape``.
                options: dict[str, object] = {"memory_format": layout}
                made = draft.fresh()
                nodes.append(Node(torch.ops.aten.contiguous.default, (Ref(value),), options, (made,), f"{node.name}_layout", node.source))
                node.substitute({value: made})
        nodes.append(node)
    draft.nodes = nodes


def _by_strides(node: Node) -> bool:
    return node.kind in _STRIDE_SENSITIVE or node.target == "aten::view.dtype"


def loosen_views(draft: Draft) -> int:
    """Every ``view`` becomes a ``reshape``, which copies where it must.

    For drafts that will run on other layouts than they were observed with: a GPU's attention, say, has kernels that write their result
    in another order than a CPU's, and a mask decides which one runs.
    """
    views = [node for node in draft.nodes if node.target in ("aten::view.default", "aten::_unsafe_view.default")]
    for node in views:
        node.op = torch.ops.aten.reshape.default
    return len(views)


def sink_views(draft: Draft) -> int:
    """Clone every view (and the views it is a view of) into each operator that reads it, as that operator's own value.

    A view that leaves the model stays an operator. Returns how many views no longer are one.
    """
    outputs = set(draft.output_values())
    views = {value: node for node in draft.nodes if is_view(node, draft.storage) for value in node.outputs if value >= 0}
    regions: list[list[Node]] = []
    sunk: set[Node] = set()
    for node in draft.nodes:
        leaves = any(value in outputs for value in node.outputs)
        if node.outputs and node.outputs[0] in views and not leaves:
            sunk.add(node)
            continue
        if any(value in views and not leaves for value in node.outputs):
            sunk.add(node)
            continue
        made = Node(node.op, node.args, dict(node.kwargs), node.outputs, node.name, node.source)
        region = _with_views(made, draft, views)
        regions.append(region)
    draft.regions = regions
    draft.nodes = [node for region in regions for node in region]
    return len(sunk)


def _with_views(node: Node, draft: Draft, views: dict[int, Node]) -> list[Node]:
    """Private copies of the views that ``node`` reads, in order, then ``node`` itself, reading the copies."""
    needed: dict[Node, dict[int, None]] = {}

    def visit(value: int) -> None:
        view = views.get(value)
        if view is None:
            return
        for before in view.reads():
            visit(before)
        needed.setdefault(view, {})[value] = None

    for value in node.reads():
        visit(value)
    mapping: dict[int, int] = {}
    region: list[Node] = []
    for view, used in needed.items():
        for value in used:
            mapping[value] = draft.fresh()
            draft.specs[mapping[value]] = draft.specs[value]
            draft.storage[mapping[value]] = draft.storage[value]
        copy = view.copy(tuple(mapping[value] if value in used else -1 for value in view.outputs))
        copy.substitute({value: mapping[value] for value in view.reads() if value in mapping})
        region.append(copy)
    node.substitute({value: mapping[value] for value in node.reads() if value in mapping})
    return [*region, node]
