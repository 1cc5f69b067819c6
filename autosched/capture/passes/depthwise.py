"""On a CPU: a convolution and the depthwise one that alone reads it become one operator, which one kernel may compute
(``runtime.cpu_kernels.chain``). Nothing could run between the two.
"""

from __future__ import annotations

from autosched.capture.draft import Draft, Node
from autosched.capture.merging import Merging

_CONVOLUTION = "mkldnn::_convolution_pointwise.default"


def join_depthwise(draft: Draft) -> int:
    """Merge the operators of packed convolutions in float32; returns how many disappeared."""
    merging, users, makers, outputs = Merging(draft), draft.users(), draft.producers(), set(draft.output_values())
    home = {value: index for index, region in merging.members.items() for node in region for value in node.outputs if value >= 0}
    for node in draft.nodes:
        source = _source_of_each_channel(node, draft)
        before = None if source is None else makers.get(source)
        if source is None or before is None or not _is_convolution(before, draft) or before.argument("groups") != 1:
            continue
        first, last = home[source], home[node.outputs[0]]
        if users[source] == [node] and source not in outputs and merging.after[first] == {last} and merging.before[last] == {first}:
            merging.merge(last, first)
    return merging.settle()


def _is_convolution(node: Node, draft: Draft) -> bool:
    return node.target == _CONVOLUTION and node.outputs[0] >= 0 and draft.specs[node.outputs[0]].dtype == "float32"


def _source_of_each_channel(node: Node, draft: Draft) -> int | None:
    """What it reads, if it is a convolution with as many groups as channels, and as many features."""
    if not _is_convolution(node, draft):
        return None
    source, weight = node.tensor("X"), node.tensor("W")
    if source is None or weight is None:
        return None
    channels = draft.specs[source].shape[1]
    return source if node.argument("groups") == channels > 1 and draft.specs[weight].shape[0] == channels else None
