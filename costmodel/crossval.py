"""Predictions for rows a model was not fitted on, fold by fold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from autosched.costmodel.conformal import calibrate
from autosched.costmodel.design import join_predictions, take, take_labels, take_prediction
from autosched.costmodel.metrics import Metrics, measure
from autosched.costmodel.model import Indices, PairLabels, PairModel, Prediction
from autosched.costmodel.pair_set import PairSet
from autosched.datasets.splits import Fold, by_kernel, leave_one_out

Factory: TypeAlias = Callable[[], PairModel]

FAMILY_FOLDS = "model family"
KERNEL_FOLDS = "kernel"
"""What was held out, in the words of a card: whole model families, or kernels where all pairs are of one family."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One model's predictions for held-out rows.

    Args:
        rows: int64, which pair of the set each prediction is for.
        group: the fold each prediction comes from.
        prediction, labels: row for row.
    """

    rows: Indices
    group: tuple[str, ...]
    prediction: Prediction
    labels: PairLabels

    def metrics(self) -> Metrics:
        """Errors, with the coverage of intervals calibrated on the *other* groups."""
        return measure(self.labels, self.with_intervals())

    def with_intervals(self) -> Prediction:
        """Each group's rows with intervals that errors on its pairs had no part in; without where there are no other pairs."""
        groups = np.asarray(self.group)
        names = sorted(set(self.group))
        if len(names) < 2:
            return self.prediction
        low, high = self.prediction.low.copy(), self.prediction.high.copy()
        for name in names:
            mine = np.flatnonzero(groups == name)
            # Folds by kernel test a pair twice, once for each of its kernels.
            others = np.flatnonzero((groups != name) & ~np.isin(self.rows, self.rows[mine]))
            if not len(others):
                continue
            table = calibrate(take_prediction(self.prediction, others), take_labels(self.labels, others))
            answered = table.apply(take_prediction(self.prediction, mine))
            low[mine], high[mine] = answered.low, answered.high
        return replace(self.prediction, low=low, high=high)


def folds_of(pairs: PairSet, rng: np.random.Generator) -> tuple[str, list[Fold]]:
    """Folds by model family, or by kernel where there is one family only; and which of the two it is.

    Raises:
        UsageError: not even two kernels.
    """
    if len(set(pairs.labels.family)) > 1:
        folds = leave_one_out(pairs.labels.family, pairs.keys)
        usable = [fold for fold in folds if len(fold.train) and len(fold.test)]
        if len(usable) > 1:
            return FAMILY_FOLDS, usable
    return KERNEL_FOLDS, by_kernel(pairs.keys, 4, rng)


def cross_validate(factory: Factory, pairs: PairSet, folds: Sequence[Fold], *, seed: int, limit: int | None = None) -> HeldOut:
    """Fit on each fold's training rows (at most ``limit`` of them, drawn at random) and predict its test rows."""
    parts: list[Prediction] = []
    rows: list[Indices] = []
    groups: list[str] = []
    for number, fold in enumerate(folds):
        rng = np.random.default_rng((seed, number))
        train = fold.train
        if limit is not None and limit < len(train):
            train = np.sort(rng.choice(train, limit, replace=False))
        model = factory()
        model.fit(take(pairs.query, train), take_labels(pairs.labels, train), rng=rng)
        parts.append(model.predict(take(pairs.query, fold.test)))
        rows.append(fold.test)
        groups += [fold.name] * len(fold.test)
    place = np.concatenate(rows)
    return HeldOut(place, tuple(groups), join_predictions(parts), take_labels(pairs.labels, place))
