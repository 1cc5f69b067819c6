"""What follows results of convolutions that lie side by side is done to each of them, where it costs nothing.

Nets whose convolutions have kernels of several sizes are spelled so: MixNet.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from autosched.capture.draft import Draft, Node
from autosched.capture.passes.activations import read_activation
from autosched.capture.passes.batch_norm import STATISTICS, convolution_before, is_fixed_norm
from autosched.capture.passes.onednn import packable_dtypes
from autosched.core.program import Ref

aten = torch.ops.aten


def part_batch_norms(draft: Draft) -> int:
    """``batch_norm(cat([conv(x), conv(y)], 1))`` becomes ``cat([batch_norm(conv(x)), batch_norm(conv(y))], 1)``, for each to be folded."""
    fixed, alone = draft.fixed_values(), draft.made_for_one()
    made: dict[Node, list[Node]] = {}
    for norm in draft.nodes:
        source = norm.tensor("input") if is_fixed_norm(norm, fixed) else None
        pieces = () if source is None else _convolutions(draft, source, alone, fixed)
        if not pieces:
            continue
        ends = list(itertools.accumulate(draft.specs[piece].shape[1] for piece in pieces))
        parts = [_part_of(draft, norm, piece, end) for piece, end in zip(pieces, ends, strict=True)]
        made[norm] = [*parts, _joined(norm, parts)]
    return _put(draft, made)


def activate_before_joining(draft: Draft) -> int:
    """On a CPU: ``relu(cat([conv(x), conv(y)], 1))`` becomes ``cat([relu(conv(x)), relu(conv(y))], 1)``; other activations likewise.

    A convolution applies them to its results before it writes them.
    """
    fixed, alone = draft.fixed_values(), draft.made_for_one()
    made: dict[Node, list[Node]] = {}
    for node in draft.nodes:
        source = node.args[0] if read_activation(node) is not None else None
        pieces = _convolutions(draft, source.value, alone, fixed) if isinstance(source, Ref) else ()
        if not isinstance(source, Ref) or not pieces or draft.specs[source.value].dtype not in packable_dtypes():
            continue
        parts = [node.copy((draft.fresh(),)) for _ in pieces]
        for part, piece in zip(parts, pieces, strict=True):
            part.substitute({source.value: piece})
        made[node] = [*parts, _joined(node, parts)]
    return _put(draft, made)


def _convolutions(draft: Draft, joined: int, alone: Mapping[int, Node], fixed: set[int]) -> tuple[int, ...]:
    """The results, side by side in ``joined``, of convolutions with constant weights; none if others are among them, or read elsewhere."""
    node = alone.get(joined)
    given = node.argument("tensors") if node is not None and node.target == "aten::cat.default" else None
    dimensions = len(draft.specs[joined].shape)
    if node is None or not isinstance(given, list) or node.argument("dim") not in (1, 1 - dimensions):
        return ()
    pieces = tuple(piece.value for piece in given if isinstance(piece, Ref))
    if not 1 < len(set(pieces)) == len(given):
        return ()
    for piece in pieces:
        found = convolution_before(alone.get(piece), draft)
        if found is None or len(draft.specs[piece].shape) != dimensions:
            return ()
        if not all(value in fixed for value in (found[1].weight, found[1].bias) if value is not None):
            return ()
    return pieces


def _part_of(draft: Draft, norm: Node, piece: int, end: int) -> Node:
    """The norm of the features of ``piece``, which end at ``end``."""
    begin = end - draft.specs[piece].shape[1]
    part = norm.copy((draft.fresh(), *norm.outputs[1:]))
    known = [value for name in STATISTICS if (value := norm.tensor(name)) is not None]
    source = norm.tensor("input")
    assert source is not None
    mapping = {value: draft.prepare(norm, "part", aten.slice.Tensor, Ref(value), 0, begin, end) for value in dict.fromkeys(known)}
    part.substitute({**mapping, source: piece})
    return part


def _joined(node: Node, parts: list[Node]) -> Node:
    """``parts`` side by side, in the place of ``node``."""
    return Node(aten.cat.default, ([Ref(part.outputs[0]) for part in parts], 1), {}, node.outputs[:1], f"{node.name}_joined", node.source)


def _put(draft: Draft, made: Mapping[Node, list[Node]]) -> int:
    draft.nodes = [each for node in draft.nodes for each in made.get(node, [node])]
    draft.remove_dead()
    return len(made)
