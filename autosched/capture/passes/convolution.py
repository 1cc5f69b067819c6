"""A convolution call, whichever of ATen's spellings it has."""

from __future__ import annotations

from dataclasses import dataclass

from autosched.capture.draft import Node

_TRANSPOSED = frozenset({"aten::conv_transpose1d.default", "aten::conv_transpose2d.input", "aten::conv_transpose3d.input"})
_SPELLINGS = _TRANSPOSED | {"aten::conv1d.default", "aten::conv2d.default", "aten::conv3d.default", "aten::convolution.default"}


@dataclass(frozen=True, slots=True)
class Convolution:
    """Arguments of a convolution; ``stride``, ``padding`` and ``dilation`` have one entry for each spatial dimension, and of a transposed
    one ``output_padding``.
    """

    source: int
    weight: int
    bias: int | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    output_padding: tuple[int, ...] = ()


def read_convolution(node: Node) -> Convolution | None:
    """The convolution that ``node`` is, or None (another operator, or padding given by name)."""
    if node.target not in _SPELLINGS:
        return None
    source, weight = node.tensor("input"), node.tensor("weight")
    dimensions = int(node.kind[-2]) if node.kind != "aten::convolution" else 0
    groups = node.argument("groups")
    lists = [_sizes(node.argument(name), dimensions) for name in ("stride", "padding", "dilation")]
    if source is None or weight is None or not isinstance(groups, int) or any(item is None for item in lists):
        return None
    stride, padding, dilation = (item for item in lists if item is not None)
    transposed = node.target in _TRANSPOSED or (node.kind == "aten::convolution" and bool(node.argument("transposed")))
    more = _sizes(node.argument("output_padding"), dimensions) if transposed else ()
    return None if more is None else Convolution(source, weight, node.tensor("bias"), stride, padding, dilation, transposed, groups, more)


def _sizes(item: object, dimensions: int) -> tuple[int, ...] | None:
    if isinstance(item, int):
        return (item,) * max(dimensions, 1)
    if isinstance(item, list | tuple) and all(isinstance(part, int) for part in item):
        sizes = tuple(int(part) for part in item)
        return sizes * dimensions if len(sizes) == 1 and dimensions else sizes
    return None
