"""On a CPU: a picture whose channels are multiplied with a gate (squeeze and excitation, Hu et al. 2018) for one convolution alone is
multiplied in the operator of that convolution, which may do so while it reads the picture (``runtime.cpu_kernels.direct``).
"""

from __future__ import annotations

from autosched.capture.draft import Draft, Node, iterate_regions
from autosched.capture.traffic import is_view

_MULTIPLY, _CONVOLUTIONS = "aten::mul.Tensor", ("mkldnn::_convolution_pointwise.default", "mkldnn::_convolution_pointwise.binary")


def hand_on_gates(draft: Draft) -> int:
    """Move such products from the operators that they end; returns how many."""
    users, outputs = draft.users(), set(draft.output_values())
    regions = [list(region) for region in iterate_regions(draft)]
    home = {node: region for region in regions for node in region}
    moved = 0
    for region in regions:
        node = region[-1]
        reader = _only_reader(node, users, outputs) if _is_gated(node, draft) else None
        if reader is not None and reader.tensor("X") == node.outputs[0] and home[reader][0] is reader:
            home[reader][:0] = _taken(region, draft, users)
            moved += 1
    draft.regions = [region for region in regions if region]
    draft.nodes = [node for region in draft.regions for node in region]
    return moved


def _taken(region: list[Node], draft: Draft, users: dict[int, list[Node]]) -> list[Node]:
    """Take the call that ends ``region`` out of it, behind the views that are made for it alone (``passes.views``)."""
    taken = [region.pop()]
    for node in reversed(region.copy()):
        if is_view(node, draft.storage) and all(reader in taken for value in node.outputs for reader in users.get(value, ())):
            region.remove(node)
            taken.insert(0, node)
    return taken


def _is_gated(node: Node, draft: Draft) -> bool:
    """Whether it multiplies each channel of each picture with one number, in float32."""
    if node.target != _MULTIPLY or node.outputs[0] < 0:
        return False
    made = draft.specs[node.outputs[0]]
    specs = [draft.specs[value] for value in node.reads()]
    gate = (*made.shape[:2], 1, 1)
    return len(made.shape) == 4 and made.dtype == "float32" and sorted(spec.shape for spec in specs) == sorted([made.shape, gate])


def _only_reader(node: Node, users: dict[int, list[Node]], outputs: set[int]) -> Node | None:
    [value] = node.outputs
    readers = users.get(value, [])
    return readers[0] if len(readers) == 1 and value not in outputs and readers[0].target in _CONVOLUTIONS else None
