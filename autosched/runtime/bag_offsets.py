"""Inputs that say where each bag of an ``EmbeddingBag`` begins. They ascend from the first index on: no kernel takes other ones."""

from __future__ import annotations

import msgspec
import torch

from autosched.core.program import Call, Program, Ref
from autosched.core.program_json import decode_program

_BAGS = frozenset(("aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only"))
_OFFSETS = 2
_INCLUDE_LAST_OFFSET = 7
# Calls that hand on what they are given first, or parts of it, with the same numbers.
_HANDING_ON = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy", "alias", "clone", "contiguous", "detach", "flatten", "narrow", "reshape", "select", "slice", "split", "squeeze", "to",
        "unbind", "unsqueeze", "view",
    )
)  # fmt: skip


def bag_offsets(program: Program) -> dict[int, bool]:
    """Values that are offsets of bags, directly or as a whole that offsets are taken from, and whether the last one ends the last bag."""
    if program.source:
        return _of_source(program) if "embedding_bag" in program.source else {}
    calls = [call for operator in program.graph.operators for call in operator.calls]
    taken_from = {value: call.args[0] for call in calls if _name(call) in _HANDING_ON and call.args for value in call.outputs}
    found: dict[int, bool] = {}
    for call in calls:
        if _name(call) not in _BAGS:
            continue
        whole = call.args[_OFFSETS]
        # No longer than a path can be: a program may come from a stranger, and go round in circles.
        for _ in calls:
            if not isinstance(whole, Ref) or whole.value not in taken_from:
                break
            whole = taken_from[whole.value]
        if isinstance(whole, Ref):
            found[whole.value] = found.get(whole.value, False) or call.args[_INCLUDE_LAST_OFFSET : _INCLUDE_LAST_OFFSET + 1] == (True,)
    return found


def _of_source(program: Program) -> dict[int, bool]:
    """Of a program that is compiled as a whole, whose launches do not say what they do with an input."""
    try:
        source = decode_program(program.source.encode())
    except msgspec.MsgspecError:
        # One that cannot be read is refused when it is bound.
        return {}
    found = bag_offsets(source)
    leaves = zip(source.input_leaves, program.input_leaves, strict=False)
    named = {theirs.value: ours.value for theirs, ours in leaves if isinstance(theirs, Ref) and isinstance(ours, Ref)}
    return {named[value]: whole for value, whole in found.items() if value in named}


def as_offsets(drawn: torch.Tensor, low: int, high: int, *, whole: bool) -> torch.Tensor:
    """Integers in ``[low, high]`` in ascending order along the last dimension; the first is ``low``, and the last ``high`` if ``whole``."""
    if drawn.dim() == 0 or drawn.numel() == 0:
        return drawn
    ascending = drawn.sort(-1).values
    if whole:
        ascending[..., -1] = high
    ascending[..., 0] = low
    return ascending


def _name(call: Call) -> str:
    return call.target.partition(".")[0]
