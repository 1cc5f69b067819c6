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
from autosched.datasets.choices import PairChoice, contending

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
    member = np.zeros((len(graph), len(signatures)), dtype=np.float32)
    for operator in graph.operators:
        member[operator.index, row[operator.signature]] = 1.0
    free = contending(graph)
    instances = member.T @ free.astype(np.float32) @ member
    times = _solo_by_signature(graph, solo, widths, row)
    copies = member.sum(axis=0)
    ranked: list[tuple[float, str, int, str, int]] = []
    for a, b in zip(*np.nonzero(np.triu(instances)), strict=True):
        # Instances that share an operator cannot all overlap; on the diagonal each pair is counted from both sides.
        disjoint = min(instances[a, b], copies[a], copies[b]) if a != b else copies[a] / 2
        for i, width_a in enumerate(widths):
            for j, width_b in enumerate(widths):
                if width_a > 1 and width_b > 1:
                    continue  # schedules keep wide operators on one lane, so two never meet
                shorter = np.minimum(times[a, i], times[b, j])
                if not np.isnan(shorter) and not (a == b and j < i):
                    worth = float(shorter * disjoint) * _width_worth(width_a, width_b)
                    ranked.append((-worth, signatures[a], width_a, signatures[b], width_b))
    ranked.sort()
    chosen: list[PairChoice] = []
    for _, sig_a, width_a, sig_b, width_b in ranked:
        if len(chosen) >= max_pairs:
            break
        op_a, op_b = _representatives(free, member[:, row[sig_a]], member[:, row[sig_b]])
        orders = [(op_a, op_b, sig_a, width_a, sig_b, width_b), (op_b, op_a, sig_b, width_b, sig_a, width_a)]
        if sig_a == sig_b and width_a == width_b:
            del orders[1]
        for first, last, first_sig, first_width, last_sig, last_width in orders:
            if (first_sig, first_width, last_sig, last_width) not in known and len(chosen) < max_pairs:
                chosen.append(PairChoice(first, last, first_width, last_width))
    return chosen


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


def _representatives(free: NDArray[np.bool_], a: NDArray[np.float32], b: NDArray[np.float32]) -> tuple[int, int]:
    of_a, of_b = np.flatnonzero(a), np.flatnonzero(b)
    pairs = np.argwhere(free[np.ix_(of_a, of_b)])
    return int(of_a[pairs[0][0]]), int(of_b[pairs[0][1]])
