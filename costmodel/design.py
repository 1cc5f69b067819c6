"""From a query to what learned models read: directional rows, the analytic prior, and where its two halves lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.costmodel.analytic import analytic_slowdowns
from autosched.costmodel.features import KernelColumns, kernel_columns, pair_rows
from autosched.costmodel.model import MAX_SLOWDOWN, Floats, PairLabels, PairQuery


@dataclass(frozen=True, slots=True)
class Design:
    """Directional rows of a query: first-started kernels in ``[0, n)``, last-started in ``[n, 2n)``.

    Args:
        columns: per-kernel values.
        rows: float32 ``[2n, len(PAIR_FEATURES)]``.
        prior_log: float64 ``[2n]``, log of the analytic slowdown.
    """

    columns: KernelColumns
    rows: NDArray[np.float32]
    prior_log: Floats


def design(query: PairQuery) -> Design:
    """Compute the rows of every pair of ``query``."""
    columns = kernel_columns(query.kernels, query.devices, query.kernel_device)
    first, last = analytic_slowdowns(query, columns)
    rows = pair_rows(columns, query.devices, query.kernel_device, query.first, query.last, first, last)
    return Design(columns, rows, np.log(np.concatenate([first, last])))


def log_targets(labels: PairLabels) -> Floats:
    """Log slowdowns in the order of the rows, cut at ``MAX_SLOWDOWN`` (and its inverse): float64 ``[2n]``."""
    slowdowns = np.concatenate([labels.slowdown_first, labels.slowdown_last])
    result: Floats = np.log(np.clip(slowdowns, 1.0 / MAX_SLOWDOWN, MAX_SLOWDOWN))
    return result


def take(query: PairQuery, rows: NDArray[np.int64]) -> PairQuery:
    """The same kernels, some of the pairs."""
    return PairQuery(query.kernels, query.devices, query.kernel_device, query.first[rows], query.last[rows])


def take_labels(labels: PairLabels, rows: NDArray[np.int64]) -> PairLabels:
    """Labels of some of the pairs."""
    return PairLabels(
        labels.slowdown_first[rows],
        labels.slowdown_last[rows],
        labels.makespan_ratio[rows],
        tuple(labels.family[row] for row in rows.tolist()),
        labels.weight[rows],
        labels.work_first_us[rows],
        labels.work_last_us[rows],
    )
