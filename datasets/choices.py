"""What may be measured: pairs and groups of operators that a graph allows at the same time."""

from __future__ import annotations

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


def independence(graph: OpGraph) -> NDArray[np.bool_]:
    """Which operators may run at the same time: bool ``[n_operators, n_operators]``, symmetric, false on the diagonal."""
    count = len(graph)
    size = (count + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in graph.reachable), dtype=np.uint8)
    after = np.unpackbits(packed.reshape(count, size), axis=1, bitorder="little")[:, :count].astype(np.bool_)
    ordered = after | after.T
    np.fill_diagonal(ordered, True)
    free: NDArray[np.bool_] = ~ordered
    return free


_ALLOCATES = frozenset({"inductor::allocate", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


def launches_nothing(operator: Operator, graph: OpGraph) -> bool:
    """Whether an operator only looks at memory that is there, or takes some and writes nothing into it: none of its calls is a kernel."""
    made = [(call, value) for call in operator.calls for value in call.outputs if value >= 0]
    return (
        bool(made)
        and not operator.mutates
        and all(graph.values[value].storage != value or call.target.split(".")[0] in _ALLOCATES for call, value in made)
    )


def contending(graph: OpGraph) -> NDArray[np.bool_]:
    """Which operators are worth measuring beside each other, as :func:`independence`: what launches nothing slows nobody, and nobody it."""
    found = independence(graph)
    idle = [operator.index for operator in graph.operators if launches_nothing(operator, graph)]
    found[idle, :] = False
    found[:, idle] = False
    return found
