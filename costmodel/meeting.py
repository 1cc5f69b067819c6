"""Which kernels of a graph may run beside which, and how often: what may be said of operators, gathered by their kernels.

Sums over the operators of each kernel, not products of matrices: a graph of thousands of operators that has eight widths has tens of
thousands of kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosched.core.graph import OpGraph
from autosched.datasets.choices import independence


def pairs_that_meet(
    graph: OpGraph, kernel: NDArray[np.int32], count: int, *, one_team: bool, other: NDArray[np.int32] | None = None
) -> NDArray[np.bool_]:
    """Which of the first ``count`` kernels may run beside which: bool ``[count, count]``, symmetric; the others are as in ``CostTable``."""
    meet = np.zeros((count, count), dtype=np.bool_)
    if not len(graph):
        return meet
    free = independence(graph)
    columns = [*(kernel[:, :1] if one_team else kernel).T, *([] if other is None else [other])]
    # At every width the operators that share a kernel are mostly the same ones: they are gathered once.
    alike: dict[bytes, list[NDArray[np.int32]]] = {}
    for column in columns:
        names, place = np.unique(column, return_inverse=True)
        alike.setdefault(place.astype(np.int32).tobytes(), []).append(names)
    groups = [(np.frombuffer(places, dtype=np.int32), names) for places, names in alike.items()]
    for firsts, first_names in groups:
        beside = gathered(free, firsts, np.logical_or)
        for lasts, last_names in groups:
            table = gathered(beside.T, lasts, np.logical_or).T
            for first in first_names:
                for last in last_names:
                    meet[np.ix_(first, last)] |= table
    return meet


def instances(free: NDArray[np.bool_], kernel: NDArray[np.int32]) -> NDArray[np.int32]:
    """How many pairs of operators of each two kernels may run at the same time: int32 ``[n_kernels, n_kernels]``.

    Args:
        free: bool ``[n_operators, n_operators]``, symmetric.
        kernel: ``[n_operators]``: each operator's, numbered from 0 without gaps.
    """
    if not len(kernel):
        return np.zeros((0, 0), dtype=np.int32)
    return gathered(gathered(free, kernel, np.add).T, kernel, np.add)


def gathered(rows: NDArray[Any], places: NDArray[np.int32], how: np.ufunc) -> NDArray[Any]:
    """The rows of each place taken together: ``[n_places, ...]``; ``places`` says where each row belongs, numbered without gaps."""
    order = np.argsort(places, kind="stable")
    begins = np.searchsorted(places[order], np.arange(int(places.max()) + 1))
    found: NDArray[Any] = how.reduceat(rows[order], begins, axis=0, dtype=np.bool_ if how is np.logical_or else np.int32)
    return found
