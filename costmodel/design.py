"""From a query to what learned models read: directional rows and the analytic prior; and some of the pairs of what goes in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autosched.core.records import MAX_SLOWDOWN
from autosched.costmodel.analytic import analytic_slowdowns
from autosched.costmodel.features import KernelColumns, kernel_columns, pair_rows
from autosched.costmodel.model import Floats, Indices, PairLabels, PairQuery, Prediction


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


def take(query: PairQuery, rows: Indices) -> PairQuery:
    """The same kernels, the pairs at ``rows`` (int64 ``[m]``)."""
    return PairQuery(query.kernels, query.devices, query.kernel_device, query.first[rows], query.last[rows])


def take_labels(labels: PairLabels, rows: Indices) -> PairLabels:
    """Labels of the pairs at ``rows`` (int64 ``[m]``)."""
    return PairLabels(
        labels.slowdown_first[rows],
        labels.slowdown_last[rows],
        labels.makespan_ratio[rows],
        tuple(labels.family[row] for row in rows.tolist()),
        labels.weight[rows],
        labels.work_first_us[rows],
        labels.work_last_us[rows],
    )


def take_prediction(prediction: Prediction, rows: Indices) -> Prediction:
    """Predictions for the pairs at ``rows`` (int64 ``[m]``), copied."""
    return Prediction(**{item.name: getattr(prediction, item.name)[rows] for item in fields(Prediction)})


def join_predictions(parts: Sequence[Prediction]) -> Prediction:
    """Predictions for the pairs of all parts, one part after the other."""
    return Prediction(**{item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Prediction)})
