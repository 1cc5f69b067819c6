"""What may be measured: pairs and groups of operators that a graph allows at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.graph import Operator, OpGraph


@dataclass(frozen=True, slots=True)
class PairChoice:
    """One pair to measure: operator indices in start order, and their widths."""

    first: int
    last: int
    first_width: int
    last_width: int


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Three or four operators to measure together, in start order, with their widths."""

    operators: tuple[int, ...]
    widths: tuple[int, ...]


def independent_masks(graph: OpGraph) -> list[int]:
    """For each operator, a bit mask of those that may run at the same time."""
    everything = (1 << len(graph)) - 1
    ordered = zip(graph.reachable, graph.ancestors, strict=True)
    return [everything & ~(after | before | 1 << index) for index, (after, before) in enumerate(ordered)]


def as_table(masks: Sequence[int], count: int) -> NDArray[np.bool_]:
    """Bit masks as rows: bool ``[n_masks, count]``."""
    size = (count + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), dtype=np.uint8)
    table: NDArray[np.bool_] = np.unpackbits(packed.reshape(len(masks), size), axis=1, count=count, bitorder="little").view(np.bool_)
    return table


def independence(graph: OpGraph) -> NDArray[np.bool_]:
    """Which operators may run at the same time: bool ``[n_operators, n_operators]``, symmetric, false on the diagonal."""
    return as_table(independent_masks(graph), len(graph))


_ALLOCATES = frozenset({"inductor::allocate", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


def launches_nothing(operator: Operator, graph: OpGraph) -> bool:
    """Whether an operator only looks at memory that is there, or takes some and writes nothing into it: none of its calls is a kernel."""
    made = [(call, value) for call in operator.calls for value in call.outputs if value >= 0]
    return (
        bool(made)
        and not operator.mutates
        and all(graph.values[value].storage != value or call.target.split(".")[0] in _ALLOCATES for call, value in made)
    )


def contending_masks(graph: OpGraph) -> list[int]:
    """As :func:`independent_masks`, of operators worth measuring beside each other: what launches nothing slows nobody, and nobody it."""
    working = [not launches_nothing(operator, graph) for operator in graph.operators]
    among = int.from_bytes(np.packbits(working, bitorder="little").tobytes(), "little")
    return [mask & among if works else 0 for mask, works in zip(independent_masks(graph), working, strict=True)]


def contending(graph: OpGraph) -> NDArray[np.bool_]:
    """Which operators are worth measuring beside each other, as :func:`independence`."""
    return as_table(contending_masks(graph), len(graph))
