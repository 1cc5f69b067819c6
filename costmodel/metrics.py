"""How wrong a model is, told so that predicting "nothing happens" cannot look good.

Three of four pairs do not disturb each other, so any average over all rows flatters; what counts is said of *contended* rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.records import MAX_SLOWDOWN
from autosched.costmodel.features import kernel_columns
from autosched.costmodel.model import Floats, PairLabels, PairQuery, Prediction, makespan_ratio

CONTENDED = 1.1
"""A slowdown above this is contention; below it lies the noise of repeats."""

TOP_K = 8
"""Pairs that regret is told of."""

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Metrics:
    """Errors of one model on one set of pairs; both directions are rows. ``None`` where there are no such rows.

    Args:
        rows, contended_rows: how many.
        mean_abs_log: mean absolute error of log slowdown, all rows; what models are ranked by.
        mape_pct: mean absolute percentage error, all rows.
        contended_mape_pct, contended_median_ape_pct, contended_spearman: on rows measured above ``CONTENDED``.
        contended_accuracy_pct: share of rows told correctly to be contended or not.
        makespan_mape_pct: of the pair makespan ratio, for the run as it was measured.
        coverage_pct: share of rows inside the 90 % interval; ``None`` without intervals.
        interval_ratio: median of high over low.
        top_k_regret_pct: mean measured makespan ratio of the ``TOP_K`` pairs predicted best, over that of the truly best, minus 1.
    """

    rows: int
    contended_rows: int
    mean_abs_log: float
    mape_pct: float
    contended_mape_pct: float | None
    contended_median_ape_pct: float | None
    contended_spearman: float | None
    contended_accuracy_pct: float
    makespan_mape_pct: float
    coverage_pct: float | None
    interval_ratio: float | None
    top_k_regret_pct: float | None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Held-out errors of a model fitted on ``pairs`` measured pairs."""

    model: str
    pairs: int
    metrics: Metrics


def inside(truth: Floats, low: Floats, high: Floats) -> NDArray[np.bool_]:
    """Which slowdowns (``[n]``, as their bounds) lie in their interval: bool ``[n]``.

    Rounding apart: serialised pairs are all at the same cap, and so are their bounds.
    """
    held: NDArray[np.bool_] = (truth >= low * (1.0 - _ROUNDING)) & (truth <= high * (1.0 + _ROUNDING))
    return held


def measure(labels: PairLabels, prediction: Prediction) -> Metrics:
    """Compare a prediction with what was measured.

    Raises:
        ValueError: no rows.
    """
    truth = np.clip(np.concatenate([labels.slowdown_first, labels.slowdown_last]), 1.0 / MAX_SLOWDOWN, MAX_SLOWDOWN)
    if not len(truth):
        raise ValueError("no rows to measure on")
    guess = np.concatenate([prediction.slowdown_first, prediction.slowdown_last])
    off = np.abs(guess - truth) / truth
    contended = truth > CONTENDED
    # A prediction is of each kernel once; the measured run may repeat the shorter one, so the ratio is made for that run.
    ratio = makespan_ratio(labels.work_first_us, labels.work_last_us, prediction.slowdown_first, prediction.slowdown_last)
    low, high = prediction.low.T.reshape(-1), prediction.high.T.reshape(-1)
    has_intervals = bool((high > low).any())
    some = bool(contended.any())
    return Metrics(
        rows=len(truth),
        contended_rows=int(contended.sum()),
        mean_abs_log=float(np.abs(np.log(guess / truth)).mean()),
        mape_pct=float(off.mean() * 100),
        contended_mape_pct=float(off[contended].mean() * 100) if some else None,
        contended_median_ape_pct=float(np.median(off[contended]) * 100) if some else None,
        contended_spearman=spearman(guess[contended], truth[contended]),
        contended_accuracy_pct=float(((guess > CONTENDED) == contended).mean() * 100),
        makespan_mape_pct=float((np.abs(ratio - labels.makespan_ratio) / labels.makespan_ratio).mean() * 100),
        coverage_pct=float(inside(truth, low, high).mean() * 100) if has_intervals else None,
        interval_ratio=float(np.median(high / low)) if has_intervals else None,
        top_k_regret_pct=_top_k_regret_pct(labels.makespan_ratio, ratio),
    )


def spearman(a: Floats, b: Floats) -> float | None:
    """Rank correlation with ties at their mean rank; ``None`` below three rows or where one side is constant.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    if len(a) < 3:
        return None
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    spread = float(ranks_a.std() * ranks_b.std())
    if spread == 0.0:
        return None
    value = float(((ranks_a - ranks_a.mean()) * (ranks_b - ranks_b.mean())).mean()) / spread
    return min(1.0, max(-1.0, round(value, 12)))


def pair_classes(query: PairQuery) -> list[str]:
    """What each pair is made of, first x last: ``compute``, ``memory``, or ``small`` (under a tenth of both peaks)."""
    columns = kernel_columns(query.kernels, query.devices, query.kernel_device)
    names = np.where(
        np.maximum(columns.compute, columns.bandwidth) < 0.1, "small", np.where(columns.compute > columns.bandwidth, "compute", "memory")
    )
    return [f"{names[a]} x {names[b]}" for a, b in zip(query.first.tolist(), query.last.tolist(), strict=True)]


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2.0)[place]
    return ranks


def _top_k_regret_pct(truth: Floats, guess: Floats) -> float | None:
    if len(truth) < 2 * TOP_K:
        return None
    order: NDArray[np.int64] = np.argsort(guess, kind="stable")[:TOP_K]
    best = float(np.sort(truth)[:TOP_K].mean())
    value = float(truth[order].mean()) / best - 1.0
    return value * 100 if math.isfinite(value) else None
