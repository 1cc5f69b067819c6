"""Which kernels of a graph may run beside which, and how often: what may be said of operators, gathered by their kernels.

Sums over the operators of each kernel, not products of matrices: a graph of thousands of operators that has eight widths has tens of
thousands of kernels. And some operators at a time: a table of all of them beside all takes gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autosched.core.graph import OpGraph
from autosched.datasets.choices import as_table, independent_masks

_ROWS = 255
"""Operators whose masks are unpacked at a time: some megabytes in a graph of tens of thousands, and so many fit in a sum of one byte."""


def pairs_that_meet(
    graph: OpGraph, kernel: NDArray[np.int32], count: int, *, one_team: bool, other: NDArray[np.int32] | None = None
) -> NDArray[np.bool_]:
    """Which of the first ``count`` kernels may run beside which: bool ``[count, count]``, symmetric; the others are as in ``CostTable``."""
    meet = np.zeros((count, count), dtype=np.bool_)
    free = independent_masks(graph)
    columns = [*(kernel[:, :1] if one_team else kernel).T, *([] if other is None else [other])]
    # At every width the operators that share a kernel are mostly the same ones: they are gathered once.
    alike: dict[bytes, list[NDArray[np.int32]]] = {}
    for column in columns:
        names, place = np.unique(column, return_inverse=True)
        alike.setdefault(place.astype(np.int32).tobytes(), []).append(names)
    groups = [(np.frombuffer(places, dtype=np.int32), names) for places, names in alike.items()]
    for firsts, first_names in groups:
        for lasts, last_names in groups:
            table = instances(free, firsts, lasts) > 0
            for first in first_names:
                for last in last_names:
                    meet[np.ix_(first, last)] |= table
    return meet


def instances(free: Sequence[int], firsts: NDArray[np.int32], lasts: NDArray[np.int32]) -> NDArray[np.int32]:
    """How many pairs of operators of each two kernels may run at the same time: int32 ``[n_firsts, n_lasts]``.

    Args:
        free: for each operator, a bit mask of those that it may run beside.
        firsts, lasts: ``[n_operators]``: each operator's kernel, numbered from 0 without gaps.
    """
    if not len(free):
        return np.zeros((0, 0), dtype=np.int32)
    found = np.zeros((int(firsts.max()) + 1, int(lasts.max()) + 1), dtype=np.int32)
    by_first, by_last = np.argsort(firsts, kind="stable"), np.argsort(lasts, kind="stable")
    for begin in range(0, len(free), _ROWS):
        members = by_first[begin : begin + _ROWS]
        rows = as_table([free[operator] for operator in members.tolist()], len(free))
        begins = _begins(firsts[members])
        sums = np.add.reduceat(rows.view(np.uint8), begins, axis=0, dtype=np.uint8)
        found[firsts[members[begins]]] += np.add.reduceat(sums[:, by_last], _begins(lasts[by_last]), axis=1, dtype=np.int32)
    return found


def _begins(places: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where each place begins in an array of them in ascending order."""
    begins: NDArray[np.int64] = np.flatnonzero(np.diff(places, prepend=-1))
    return begins
