"""A base model, and boosted trees on what it leaves over; the trees count only as far as they help on kernels they have not seen.

With few runs a learned residual makes things worse. So its share (none, half, all) is chosen by folds that hold kernels out, and the
trees learn from the errors that the base makes on held-out kernels, not from those it makes on its own training data.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from autosched.core.decoding import decode_json
from autosched.core.errors import ArtifactCorrupt
from autosched.costmodel.design import design, log_targets, take, take_labels
from autosched.costmodel.graybox import GrayboxModel
from autosched.costmodel.model import (
    COST_MODELS,
    Floats,
    Indices,
    PairLabels,
    PairModel,
    PairQuery,
    Prediction,
    check_labels,
    not_fitted,
    point_prediction,
)
from autosched.costmodel.xgboost_model import XgboostModel
from autosched.datasets.splits import by_kernel

FOLDS = 3
"""Folds that hold kernels out, for the errors that the trees learn from and for their share."""

SHARES = (0.0, 0.5, 1.0)
"""How much of the trees' correction may be added."""

LEAST_PAIRS = 60
"""Below this many pairs folds say nothing and the residual stays off."""


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base: str
    share: float


class StackedModel:
    """Base plus residual.

    Args:
        base: a fitted model that stays as it is (retraining from another device's model), or None for a grey box fitted here.
    """

    name = "stacked"

    def __init__(self, base: PairModel | None = None) -> None:
        self._fixed = base
        self._base: PairModel | None = base
        self._residual: XgboostModel | None = None
        self.share = 0.0

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Fit base and residual, and choose the residual's share."""
        check_labels(query, labels)
        self._base, self._residual, self.share = self._fixed, None, 0.0
        if len(query) >= LEAST_PAIRS:
            self._fit_residual(query, labels, rng)
        if self._fixed is None:
            self._base = GrayboxModel()
            self._base.fit(query, labels, rng=rng)

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair."""
        if self._base is None:
            raise not_fitted(self.name, "answer")
        logs = _log_of(self._base, query)
        if self._residual is not None and self.share > 0:
            logs = logs + self.share * self._residual.predict_rows(design(query).rows)
        return point_prediction(query, np.exp(logs[: len(query)]), np.exp(logs[len(query) :]))

    def save(self, directory: Path) -> None:
        """Write ``stacked.json``, the base under ``base/`` and the trees, if they count, under ``residual/``."""
        if self._base is None:
            raise not_fitted(self.name, "be saved")
        (directory / "base").mkdir()
        self._base.save(directory / "base")
        if self._residual is not None:
            (directory / "residual").mkdir()
            self._residual.save(directory / "residual")
        (directory / "stacked.json").write_bytes(msgspec.json.encode(_Saved(self._base.name, self.share)))

    @classmethod
    def load(cls, directory: Path) -> StackedModel:
        """Read what :meth:`save` wrote.

        Raises:
            ArtifactCorrupt, IncompatibleArtifact: as ``PairModel.load``.
        """
        path = directory / "stacked.json"
        try:
            saved = decode_json(path.read_bytes(), _Saved)
        except (OSError, msgspec.DecodeError) as error:
            raise ArtifactCorrupt(str(path), str(error)) from error
        model = cls()
        model._base = COST_MODELS.get(saved.base).load(directory / "base")
        model.share = saved.share
        if saved.share > 0:
            model._residual = XgboostModel.load(directory / "residual")
        return model

    def _fit_residual(self, query: PairQuery, labels: PairLabels, rng: np.random.Generator) -> None:
        keys = list(zip(query.first.tolist(), query.last.tolist(), strict=True))
        folds = by_kernel(keys, FOLDS, rng)
        count = len(query)
        # What no fold tested has no error to learn from: a fold that leaves nothing to train on is left out, with the pairs in it alone.
        tested = np.zeros(count, dtype=np.bool_)
        for fold in folds:
            tested[fold.test] = True
        if tested.sum() < LEAST_PAIRS:
            return
        rows, target = design(query).rows, log_targets(labels)
        weight = np.concatenate([labels.weight, labels.weight])
        held_out = np.zeros(2 * count)
        for fold in folds:
            base = self._fixed
            if base is None:
                base = GrayboxModel()
                base.fit(take(query, fold.train), take_labels(labels, fold.train), rng=rng)
            held_out[_both(fold.test, count)] = _log_of(base, take(query, fold.test))
        left = target - held_out
        corrections = np.zeros(2 * count)
        for fold in folds:
            train, test = _both(fold.train[tested[fold.train]], count), _both(fold.test, count)
            if not len(train):
                continue
            trees = XgboostModel()
            trees.fit_rows(rows[train], left[train], weight[train], rng=rng)
            corrections[test] = trees.predict_rows(rows[test])
        # Predictions are cut at 1 before they are used, so they are compared after the cut.
        judged = _both(np.flatnonzero(tested), count)
        misses = [np.abs(target - np.maximum(0.0, held_out + share * corrections)) for share in SHARES]
        errors = [float((weight * miss)[judged].mean()) for miss in misses]
        best = int(np.argmin(errors))
        # A gain under 2 % of the error is within what another draw of folds would move it.
        self.share = SHARES[best] if errors[best] < 0.98 * errors[0] else 0.0
        if self.share > 0:
            self._residual = XgboostModel()
            self._residual.fit_rows(rows[judged], left[judged], weight[judged], rng=rng)


def _both(pairs: Indices, count: int) -> Indices:
    """The directional rows of some of ``count`` pairs."""
    return np.concatenate([pairs, pairs + count])


def _log_of(model: PairModel, query: PairQuery) -> Floats:
    """Log slowdowns in the order of the directional rows; not cut at 1 where the model can say so."""
    if isinstance(model, GrayboxModel):
        return model.predict_log(query)
    answer = model.predict(query)
    result: Floats = np.log(np.concatenate([answer.slowdown_first, answer.slowdown_last]))
    return result
