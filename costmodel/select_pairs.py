"""Which pairs to measure when not all can be: those that could overlap for the longest time.

A pair of kernels is worth measuring if operators of both may run at the same time and both launch something. Its worth is the time that
could be spent together: the shorter solo time, times how many disjoint instances of the pair the graph has.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, SoloRecord
from autosched.costmodel.meeting import instances
from autosched.datasets.choices import PairChoice, contending_masks

__all__ = ["PairChoice", "select_pairs"]

NARROW_WIDE_WORTH = 0.25
"""A wide kernel beside a narrow one wants more cores than a lane leaves it: sharing is well predicted, so it is worth less."""


def select_pairs(
    graph: OpGraph,
    solo: Sequence[Sequence[SoloRecord | Failure]],
    *,
    widths: Sequence[int],
    max_pairs: int,
    known: Collection[tuple[str, int, str, int]] = (),
) -> list[PairChoice]:
    """Choose at most ``max_pairs`` ordered pairs, the most worth first; both start orders of a pair stand together.

    Args:
        graph: the operators.
        solo: ``[n_operators][len(widths)]``; a failed one is never chosen.
        widths: as in ``CostTable``.
        max_pairs: most pairs to return; an order counts as one.
        known: ``(first signature, width, last signature, width)`` of pairs that are measured already.

    Returns:
        Deterministic: equal worth is ordered by signature and width, and each kernel is represented by its first operators.
    """
    signatures = sorted({operator.signature for operator in graph.operators})
    row = {signature: index for index, signature in enumerate(signatures)}
    kernel = np.array([row[operator.signature] for operator in graph.operators], dtype=np.int32)
    free = contending_masks(graph)
    operators_of = [int.from_bytes(np.packbits(kernel == place, bitorder="little").tobytes(), "little") for place in range(len(signatures))]
    times = _solo_by_signature(graph, solo, widths, row)
    chosen: list[PairChoice] = []
    # Each pair is one choice at least, unless it is known.
    for a, width_a, b, width_b in _most_worth(instances(free, kernel, kernel), np.bincount(kernel), times, widths, max_pairs + len(known)):
        if len(chosen) >= max_pairs:
            break
        op_a, op_b = _representatives(free, np.flatnonzero(kernel == a).tolist(), operators_of[b])
        orders = [(op_a, op_b, a, width_a, b, width_b), (op_b, op_a, b, width_b, a, width_a)]
        if a == b and width_a == width_b:
            del orders[1]
        for first, last, of_first, first_width, of_last, last_width in orders:
            name = (signatures[of_first], first_width, signatures[of_last], last_width)
            if name not in known and len(chosen) < max_pairs:
                chosen.append(PairChoice(first, last, first_width, last_width))
    return chosen


def _most_worth(
    counts: NDArray[np.int32], copies: NDArray[np.int64], times: NDArray[np.float64], widths: Sequence[int], most: int
) -> list[tuple[int, int, int, int]]:
    """The pairs of kernels most worth knowing, as ``(row, width, row, width)``, at most so many; of equal ones the first.

    Row by row, and no more is kept than is asked for: a graph of a thousand different operators that has eight widths has ten million.

    Args:
        counts: int ``[n_signatures, n_signatures]``: pairs of operators that may run at the same time.
        copies: int ``[n_signatures]``: operators of each.
        times: float64 ``[n_signatures, n_widths]``, microseconds, NaN where there is none.
    """
    columns = np.array([(i, j) for i, a in enumerate(widths) for j, b in enumerate(widths) if not (a > 1 and b > 1)], dtype=np.int64)
    # Schedules keep wide operators on one lane, so two never meet.
    of_a, of_b = columns.reshape(-1, 2).T
    share = np.array([_width_worth(widths[i], widths[j]) for i, j in columns.tolist()])
    kept = _Ranked(most)
    for a in range(len(counts)):
        beside = a + np.flatnonzero(counts[a, a:])
        # Instances that share an operator cannot all overlap; on the diagonal each pair is counted from both sides.
        disjoint = np.where(beside == a, copies[a] / 2, np.minimum(np.minimum(counts[a, beside], copies[a]), copies[beside]))
        worth = np.minimum(times[a, of_a][None, :], times[np.ix_(beside, of_b)]) * disjoint[:, None] * share
        usable = ~np.isnan(worth) & ~((beside == a)[:, None] & (of_b < of_a))
        place, column = np.nonzero(usable)
        kept.add(worth[place, column], np.stack([np.full(len(place), a), of_a[column], beside[place], of_b[column]], axis=1))
    return [(a, widths[i], b, widths[j]) for a, i, b, j in kept.best().tolist()]


class _Ranked:
    """The most worth of what is added, in order: by worth, then by what it is; a few times as many are held as are asked for."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = -np.inf
        self._worth: list[NDArray[np.float64]] = []
        self._what: list[NDArray[np.int64]] = []

    def add(self, worth: NDArray[np.float64], what: NDArray[np.int64]) -> None:
        """``worth`` of each row of ``what``."""
        enough = worth >= self._least
        self._worth.append(worth[enough])
        self._what.append(what[enough])
        if sum(map(len, self._worth)) > 4 * self._most + 100_000:
            self.best()

    def best(self) -> NDArray[np.int64]:
        """The rows of the best."""
        worth = np.concatenate([*self._worth, np.zeros(0)])
        what = np.concatenate([*self._what, np.zeros((0, 4), dtype=np.int64)])
        order = np.lexsort((*what.T[::-1], -worth))[: self._most]
        self._worth, self._what = [worth[order]], [what[order]]
        if 0 < len(order) == self._most:
            self._least = float(worth[order[-1]])
        return self._what[0]


def _width_worth(a: int, b: int) -> float:
    if a == 1 and b == 1:
        return 1.0
    return NARROW_WIDE_WORTH


def _solo_by_signature(
    graph: OpGraph, solo: Sequence[Sequence[SoloRecord | Failure]], widths: Sequence[int], row: dict[str, int]
) -> NDArray[np.float64]:
    """float64 ``[n_signatures, n_widths]``, microseconds, NaN where every measurement failed."""
    samples: dict[tuple[int, int], list[float]] = {}
    for operator in graph.operators:
        for column in range(len(widths)):
            record = solo[operator.index][column]
            if isinstance(record, SoloRecord):
                samples.setdefault((row[operator.signature], column), []).append(record.samples.median_us)
    times = np.full((len(row), len(widths)), np.nan)
    for (index, column), values in samples.items():
        times[index, column] = statistics.median(values)
    return times


def _representatives(free: Sequence[int], of_a: Sequence[int], of_b: int) -> tuple[int, int]:
    """The first operator of one kernel, and beside it the first of another, a bit mask, that may run at the same time."""
    op_a, beside = next((operator, free[operator] & of_b) for operator in of_a if free[operator] & of_b)
    return op_a, (beside & -beside).bit_length() - 1
