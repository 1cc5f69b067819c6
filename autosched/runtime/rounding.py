"""How coarsely the outputs of a graph are rounded on their way: a sum in bfloat16 is no better for being returned as float32.

An output is judged by that, whatever dtype it ends in: code that rounds in other places, as compiled code does, is as far from the model
as the coarsest dtype on the way allows. Only what is computed counts. Inputs and weights in few bits are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from autosched.core.graph import OpGraph, Value
from autosched.core.program import Call

# From fine to coarse; each is a dtype that ``numerics.tolerance`` knows.
_ORDER = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_RANK = {str(dtype).removeprefix("torch."): rank for rank, dtype in enumerate(_ORDER)}
_RANK |= {"complex128": 0, "complex64": 1, "complex32": 2, "float8_e4m3fnuz": 4, "float8_e5m2fnuz": 5, "float4_e2m1fn_x2": 5}
# A number rounded to eight bits moves by up to 2^-8 of the largest, as one in bfloat16 does of itself.
_EIGHT_BITS = 3
_EXACT = -1
_ROUNDS = ("aten::round", "aten::fake_quantize", "aten::_fake_quantize", "quantized_decomposed::quantize")


def coarsest_of(graph: OpGraph) -> tuple[torch.dtype | None, ...]:
    """For each of ``graph.outputs``, the coarsest dtype that it was rounded to; None where nothing is computed in floating point."""
    ranks: dict[int, int] = {}
    for operator in graph.operators:
        for call in operator.calls:
            _follow(call, graph.values, operator.mutates, ranks)
    return tuple(_named(ranks, value) for value in graph.outputs)


def coarsest_among(calls: Iterable[Call], values: Sequence[Value], wanted: Iterable[int]) -> tuple[torch.dtype | None, ...]:
    """The same for the values ``wanted`` of ``calls`` that change nothing, in order; what they read from outside is exact."""
    ranks: dict[int, int] = {}
    for call in calls:
        _follow(call, values, (), ranks)
    return tuple(_named(ranks, value) for value in wanted)


def _follow(call: Call, values: Sequence[Value], changed: Sequence[int], ranks: dict[int, int]) -> None:
    reads = call.reads()
    before = max((ranks.get(value, _EXACT) for value in reads), default=_EXACT)
    if call.target.startswith(_ROUNDS):
        before = max(before, _EIGHT_BITS)
    for value in (*call.outputs, *(item for item in reads if item in changed)):
        if value >= 0:
            view = value in call.outputs and values[value].storage != value
            ranks[value] = before if view else max(before, _own_rank(value, reads, values), ranks.get(value, _EXACT))


def _own_rank(value: int, reads: Sequence[int], values: Sequence[Value]) -> int:
    dtype = values[value].spec.dtype
    if dtype in ("int8", "uint8"):
        return _EIGHT_BITS if any(values[item].spec.dtype in _RANK for item in reads) else _EXACT
    return _RANK.get(dtype, _EXACT)


def _named(ranks: Mapping[int, int], value: int) -> torch.dtype | None:
    rank = ranks.get(value, _EXACT)
    return _ORDER[rank] if rank != _EXACT else None
