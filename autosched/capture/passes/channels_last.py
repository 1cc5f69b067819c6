"""Convolution nets in channels-last order: tensor cores read it, and row-major data is turned around each convolution otherwise."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.identities import same_layout
from autosched.capture.passes.output_layout import channels_last_strides, format_of
from autosched.capture.passes.views import depends_on_strides
from autosched.capture.region_kinds import is_loop
from autosched.capture.traffic import is_view
from autosched.core.graph import TensorSpec
from autosched.core.program import Ref

aten = torch.ops.aten
_CONVOLUTIONS = frozenset({"aten::conv2d", "aten::conv_transpose2d", "aten::convolution"})
_ON_TENSOR_CORES = frozenset({"float32", "float16", "bfloat16"})
# What a convolution gains or loses on average, as a share of its time.
_GAIN, _LOSS_OF_GROUPED = 0.2, 0.36
_MOST_CALLS_EACH = 50
# Their kernels for a GPU write row-major whatever they read, where those for a CPU keep the order (tests/gpu/test_gpu_layout.py).
_ROW_MAJOR_ON_GPU = frozenset(
    f"aten::{name}"
    for name in (
        "channel_shuffle", "max_unpool2d", "native_channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d",
        "replication_pad2d", "roll",
    )
)  # fmt: skip
_GROUP_NORMS = ("aten::group_norm", "aten::native_group_norm")


def prefer_channels_last(draft: Draft) -> int:
    """Weights of 2-d convolutions become channels last in the prologue, and what the first of them read, once, in the graph.

    From there on the order spreads by itself: convolutions, norms, pooling, pointwise calls and ``cat`` keep it. Where it is lost before
    another convolution, that one's input is converted, too; operators that write row-major anyway are given that. All strides are those
    that the operators really return, on the device of the draft. Nothing changes where :func:`worth_it` says no, where strides are part
    of what the model computes, or where an output could not get its strides back. Returns the number of tensors converted.
    """
    if not worth_it(draft) or depends_on_strides(draft):
        return 0
    trial = draft.copy()
    weights = _convert_weights(trial)
    walk = _Walk(trial)
    trial.observe(walk.before)
    if not _convolutions_follow(trial) or not _outputs_can_be_restored(draft, trial):
        return 0
    draft.nodes, draft.prologue, draft.next_value = trial.nodes, trial.prologue, trial.next_value
    draft.specs, draft.storage = trial.specs, trial.storage
    return weights + walk.conversions


def worth_it(draft: Draft) -> bool:
    """Whether the convolutions of an observed draft gain more than they lose.

    Grouped convolutions with several channels a group are slower in channels-last order by a third, others faster by a fifth; a model
    of 50 calls and more for each convolution is something else, with an embedding of patches.

    *Source:* the averages and exceptions measured for ``decide_layout_opt`` in PyTorch 2.11 (``torch/_inductor/graph.py``), for inference;
    it counts the nodes of a finer graph, and limits them to 300 for each convolution.
    """
    convolutions = [node for node in draft.nodes if _is_convolution(node, draft)]
    calls = sum(not is_view(node, draft.storage) for node in draft.nodes)
    if not convolutions or calls >= _MOST_CALLS_EACH * len(convolutions):
        return False
    grouped = sum(_products(node, draft) for node in convolutions if _is_grouped(node, draft))
    others = sum(_products(node, draft) for node in convolutions) - grouped
    return _GAIN * others >= _LOSS_OF_GROUPED * grouped


def in_channels_last_order(spec: TensorSpec) -> bool:
    """Whether PyTorch takes the tensor for channels last, dense or a part of one; sizes of one count (``is_channels_last_strides_2d``)."""
    if len(spec.shape) != 4 or len(spec.strides) != 4:
        return False
    (_, channels, height, width), (n, c, h, w) = spec.shape, spec.strides
    return c > 0 and w >= c * channels and h >= w * width and n >= h * height and n > c


class _Walk:
    """Decides, before each call, what of its arguments is converted; specs of all calls before it are known."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._written = draft.written()
        self._last: dict[int, int] = {}
        self._row: dict[int, int] = {}
        self.conversions = 0

    def before(self, node: Node) -> Sequence[Node]:
        """Calls to run before ``node``, whose arguments change to what they make."""
        made: list[Node] = []
        mapping: dict[int, int] = {}
        if _is_convolution(node, self._draft):
            source = node.tensor("input")
            assert source is not None
            spec = self._draft.specs[source]
            # One pixel is the same memory in either order.
            if not in_channels_last_order(spec) and spec.shape[2:] != (1, 1):
                self._convert(source, self._last, torch.channels_last, node, made)
        elif _writes_row_major(node):
            for value in node.reads():
                if in_channels_last_order(self._draft.specs[value]):
                    self._convert(value, self._row, torch.contiguous_format, node, made)
            mapping = self._row
        if not mapping and (_is_convolution(node, self._draft) or is_loop(node)):
            mapping = self._last
        if not node.mutates():
            node.substitute({value: mapping[value] for value in node.reads() if value in mapping})
        return made

    def _convert(self, value: int, done: dict[int, int], layout: torch.memory_format, node: Node, made: list[Node]) -> None:
        # Memory that changes in place has no copy that stays true.
        if value in done or self._draft.storage[value] in self._written:
            return
        done[value] = self._draft.fresh()
        options: dict[str, object] = {"memory_format": layout}
        made.append(Node(aten.clone.default, (Ref(value),), options, (done[value],), f"{node.name}_layout", node.source))
        self.conversions += 1


def _convert_weights(draft: Draft) -> int:
    """Each constant weight once, as a call of the prologue. The memory of one for 1 x 1 pixels is the same either way."""
    fixed = draft.fixed_values()
    done: dict[int, int] = {}
    for node in draft.nodes:
        weight = node.tensor("weight") if _is_convolution(node, draft) else None
        if weight is None or weight not in fixed:
            continue
        spec = draft.specs[weight]
        if spec.shape[2:] == (1, 1) or in_channels_last_order(spec):
            continue
        if weight not in done:
            done[weight] = draft.fresh()
            options: dict[str, object] = {"memory_format": torch.channels_last}
            call = Node(aten.clone.default, (Ref(weight),), options, (done[weight],), f"{node.name}_weight", node.source)
            draft.prologue.append(call)
        node.substitute({weight: done[weight]})
    return len(done)


def _convolutions_follow(draft: Draft) -> bool:
    """Whether each convolution gave what it gives on a GPU. Rare kernels of a CPU answer in row-major order."""
    for node in draft.nodes:
        if node.outputs[0] >= 0 and _is_convolution(node, draft):
            spec = draft.specs[node.outputs[0]]
            last = TensorSpec(spec.shape, spec.dtype, channels_last_strides(spec.shape))
            if not in_channels_last_order(spec) and not same_layout(spec, last):
                return False
    return True


def _outputs_can_be_restored(before: Draft, after: Draft) -> bool:
    pairs = [(before.specs[value], after.specs[value]) for value in before.output_values()]
    return all(same_layout(old, new) or format_of(old) is not None for old, new in pairs)


def _is_convolution(node: Node, draft: Draft) -> bool:
    """Over two dimensions and a batch, of a type that tensor cores take."""
    if node.kind not in _CONVOLUTIONS:
        return False
    given = [node.tensor("input"), node.tensor("weight")]
    specs = [draft.specs[value] for value in given if value is not None]
    return len(specs) == 2 and all(len(spec.shape) == 4 and spec.dtype in _ON_TENSOR_CORES and spec.elements > 0 for spec in specs)


def _is_grouped(node: Node, draft: Draft) -> bool:
    return node.argument("groups") != 1 and _weight_of(node, draft).shape[1] > 1


def _products(node: Node, draft: Draft) -> int:
    """Multiplications: each element of the output, or of a transposed convolution's input, meets one filter."""
    transposed = node.kind == "aten::conv_transpose2d" or (node.kind == "aten::convolution" and bool(node.argument("transposed")))
    value = node.tensor("input") if transposed else node.outputs[0]
    weight = _weight_of(node, draft)
    return draft.specs[value].elements * weight.elements // weight.shape[0] if value is not None and value >= 0 else 0


def _weight_of(node: Node, draft: Draft) -> TensorSpec:
    weight = node.tensor("weight")
    assert weight is not None
    return draft.specs[weight]


def _writes_row_major(node: Node) -> bool:
    if node.kind == "aten::pad":
        return node.argument("mode") != "constant"
    if node.kind in _GROUP_NORMS:
        return not group_norm_keeps_order()
    return node.kind in _ROW_MAJOR_ON_GPU


@functools.cache
def group_norm_keeps_order() -> bool:
    """Whether it does on a GPU, as in PyTorch 2.15 and not in 2.13: a tensor without memory, which is on no CPU either, shows it."""
    order = (16, 1, 8, 4)
    made: torch.Tensor = aten.group_norm.default(torch.empty_strided((2, 4, 2, 2), order, device="meta"), 2)
    return made.stride() == order
