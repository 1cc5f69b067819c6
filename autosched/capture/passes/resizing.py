"""Channels are mixed before a picture is enlarged: what either does to it, the other leaves alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.convolution import Convolution, read_convolution
from autosched.capture.passes.spelling import respelled
from autosched.core.program import Ref

aten = torch.ops.aten
RESIZES = frozenset(
    f"aten::{name}.vec"
    for name in (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    )
)  # fmt: skip
# So many multiplications take as long as it takes to write a number and read it again: an order of magnitude.
_PRODUCTS_A_NUMBER = 50


@dataclass(frozen=True, slots=True)
class _Part:
    """Channels ``first`` to ``last`` of what is concatenated; ``resize``: the call that enlarges them, if they alone are read of it."""

    value: int
    first: int
    last: int
    resize: Node | None


def mix_before_resizing(draft: Draft) -> int:
    """``conv(cat(resize(x), y))`` of 1x1 pixels becomes ``resize(conv(x)) + conv(y)``, each with its channels of the weight.

    A resize computes each channel from itself alone, by the same linear rule for all, and a convolution of one pixel each pixel from
    itself: in whichever order, the sums are the same but for rounding. Only where it saves more than it takes. Returns the number of
    convolutions.
    """
    fixed, alone, written = draft.fixed_values(), draft.made_for_one(), draft.written()

    def words(node: Node) -> list[Node]:
        convolution = read_convolution(node)
        parts = [] if convolution is None or not _of_one_pixel(convolution, draft, fixed) else _parts(convolution, alone, written, draft)
        return [] if convolution is None or not _worth_it(parts, node, draft) else _apart(node, convolution, parts, draft)

    found = respelled(draft, words)
    draft.remove_dead()
    return found


def _of_one_pixel(convolution: Convolution, draft: Draft, fixed: set[int]) -> bool:
    shape = draft.specs[convolution.weight].shape
    plain = not convolution.transposed and convolution.groups == 1 and set(convolution.stride) == {1} and not any(convolution.padding)
    batched = len(draft.specs[convolution.source].shape) == len(shape)
    return plain and batched and math.prod(shape[2:]) == 1 and convolution.weight in fixed


def _parts(convolution: Convolution, alone: Mapping[int, Node], written: set[int], draft: Draft) -> list[_Part]:
    """Of what the convolution reads, in order; none if that cannot be told."""
    rank = len(draft.specs[convolution.source].shape)
    joined = alone.get(convolution.source)
    values = [convolution.source]
    if joined is not None and joined.target == "aten::cat.default" and joined.argument("dim") in (1, 1 - rank):
        given = joined.argument("tensors")
        values = [item.value for item in given if isinstance(item, Ref)] if isinstance(given, list) else []
    parts: list[_Part] = []
    for value in values:
        if len(draft.specs[value].shape) != rank or draft.specs[value].dtype != draft.specs[convolution.source].dtype:
            return []  # one that has nothing may have any shape, and others become what the widest is
        first, resize = parts[-1].last if parts else 0, alone.get(value)
        source = resize.tensor("input") if resize is not None and resize.target in RESIZES else None
        # What it reads is read later now.
        taken = None if source is None or draft.storage[source] in written else resize
        parts.append(_Part(value, first, first + draft.specs[value].shape[1], taken))
    return parts


def _worth_it(parts: list[_Part], node: Node, draft: Draft) -> bool:
    made = draft.specs[node.outputs[0]] if node.outputs[0] >= 0 else None
    resized = [part for part in parts if part.resize is not None]
    if made is None or not resized:
        return False
    features, pixels = made.shape[1], made.elements // made.shape[1] if made.elements else 0
    saved = written = 0
    for part in resized:
        before = draft.specs[_source(part)]
        channels = part.last - part.first
        saved += channels * features * (pixels - before.elements // channels) if channels else 0
        # It is enlarged with other channels, and added to the rest.
        written += (features - channels) * pixels + (features * pixels if len(parts) > 1 else 0)
    return saved > _PRODUCTS_A_NUMBER * written


def _source(part: _Part) -> int:
    assert part.resize is not None
    source = part.resize.tensor("input")
    assert source is not None
    return source


def _apart(node: Node, convolution: Convolution, parts: list[_Part], draft: Draft) -> list[Node]:
    """The calls in the place of ``node``, which is not changed."""
    made: list[Node] = []

    def emit(op: object, args: tuple[object, ...], name: str = node.name) -> int:
        value = draft.fresh()
        made.append(Node(op, args, {}, (value,), name, node.source))  # type: ignore[arg-type]
        return value

    def convolve(value: int, chosen: list[_Part], bias: object) -> int:
        pieces = [Ref(_slice(node, convolution, part, draft)) for part in chosen]
        weight = pieces[0].value if len(pieces) == 1 else draft.fresh()
        if len(pieces) > 1:
            draft.prologue.append(Node(aten.cat.default, (pieces, 1), {}, (weight,), f"{node.name}_weight", node.source))
        mixed = emit(node.op, (Ref(value), Ref(weight), bias, *node.args[3:]))
        made[-1].kwargs = {name: item for name, item in node.kwargs.items() if name not in ("weight", "bias")}
        return mixed

    rest = [part for part in parts if part.resize is None]
    bias = node.argument("bias")
    sums: list[int] = []
    for part in parts:
        if part.resize is None:
            continue
        mixed = convolve(_source(part), [part], None if rest or sums else bias)
        resize = part.resize
        sums.append(emit(resize.op, (Ref(mixed), *resize.args[1:]), resize.name))
    if rest:
        whole = rest[0].value
        if len(rest) > 1:
            whole = emit(aten.cat.default, ([Ref(part.value) for part in rest], 1), f"{node.name}_rest")
        sums.append(convolve(whole, rest, bias))
    total = sums[0]
    for value in sums[1:]:
        total = emit(aten.add.Tensor, (Ref(total), Ref(value)), f"{node.name}_sum")
    made[-1].outputs = node.outputs
    return made


def _slice(node: Node, convolution: Convolution, part: _Part, draft: Draft) -> int:
    """The weights of a part's channels, which the prologue makes."""
    channels, dense = draft.fresh(), draft.fresh()
    given = (Ref(convolution.weight), 1, part.first, part.last)
    draft.prologue.append(Node(aten.slice.Tensor, given, {}, (channels,), f"{node.name}_channels", node.source))
    layout: dict[str, object] = {"memory_format": torch.contiguous_format}
    draft.prologue.append(Node(aten.clone.default, (Ref(channels),), layout, (dense,), f"{node.name}_part", node.source))
    return dense
