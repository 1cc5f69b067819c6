"""Gradient-boosted trees on log slowdown, with the analytic prediction among the features and monotone where physics demands it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UsageError
from autosched.costmodel.design import design, log_targets
from autosched.costmodel.features import PAIR_FEATURES
from autosched.costmodel.model import Floats, PairLabels, PairQuery, Prediction, check_labels, point_prediction
from autosched.costmodel.threads import SMALL

if TYPE_CHECKING:
    import xgboost

RISING = (
    "other_compute_fraction",
    "other_bandwidth_fraction",
    "other_unit_fraction",
    "sum_units",
    "sum_compute",
    "sum_bandwidth",
    "max_saturation",
    "analytic_log_slowdown",
)
"""A neighbour that asks for more of a resource never makes a kernel faster; a row can only rise with these."""

ROUNDS = 150


class XgboostModel:
    """Boosted trees; ``fit`` forgets what it knew.

    Args:
        threads: threads for fitting; 0 is one for small data and all for large.
    """

    name = "xgboost"

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads
        self._booster: xgboost.Booster | None = None

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Fit on both directions of every pair, in about a second for a thousand pairs."""
        check_labels(query, labels)
        made = design(query)
        self.fit_rows(made.rows, log_targets(labels), np.concatenate([labels.weight, labels.weight]), rng=rng)

    def fit_rows(self, rows: NDArray[np.float32], target: Floats, weight: Floats, *, rng: np.random.Generator) -> None:
        """Fit directional rows: ``rows`` float32 ``[n, n_features]``, ``target`` and ``weight`` ``[n]``."""
        import xgboost

        names = list(PAIR_FEATURES)
        threads = self._threads or (1 if len(rows) < SMALL else 0)
        data = xgboost.DMatrix(rows, label=target, weight=weight, feature_names=names, nthread=threads or None)
        options = {
            "objective": "reg:pseudohubererror" if len(rows) >= 200 else "reg:squarederror",
            "huber_slope": 0.5,
            "eta": 0.1,
            # Deeper trees only where there are rows to fill them.
            "max_depth": 3 if len(rows) < 400 else 5,
            "min_child_weight": 4.0,
            "subsample": 0.8,
            "colsample_bytree": 0.8,
            "lambda": 2.0,
            "tree_method": "hist",
            "base_score": 0.0,
            "seed": int(rng.integers(2**31)),
            "nthread": threads,
            "monotone_constraints": "(" + ",".join("1" if name in RISING else "0" for name in names) + ")",
        }
        if options["objective"] == "reg:squarederror":
            del options["huber_slope"]
        self._booster = xgboost.train(options, data, num_boost_round=ROUNDS)

    def predict_rows(self, rows: NDArray[np.float32]) -> Floats:
        """Log slowdown of directional rows: float64 ``[n]``.

        Raises:
            UsageError: before ``fit``.
        """
        if self._booster is None:
            raise UsageError("the xgboost model was asked before it was fitted; call fit, or use the analytic model")
        if not len(rows):
            return np.zeros(0)
        answer = self._booster.inplace_predict(rows, validate_features=False)
        result: Floats = np.asarray(answer, dtype=np.float64)
        return result

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair."""
        slowdowns = np.exp(self.predict_rows(design(query).rows))
        return point_prediction(query, slowdowns[: len(query)], slowdowns[len(query) :])

    def save(self, directory: Path) -> None:
        """Write ``trees.ubj``, XGBoost's own format that stays readable across its releases."""
        if self._booster is None:
            raise UsageError("the xgboost model cannot be saved before it was fitted")
        self._booster.save_model(directory / "trees.ubj")

    @classmethod
    def load(cls, directory: Path) -> XgboostModel:
        """Read ``trees.ubj``."""
        import xgboost

        path = directory / "trees.ubj"
        if not path.is_file():
            raise ArtifactCorrupt(str(path), "the file is missing")
        model = cls()
        booster = xgboost.Booster()
        try:
            booster.load_model(path)
        except xgboost.core.XGBoostError as error:
            raise ArtifactCorrupt(str(path), str(error).splitlines()[0]) from error
        if booster.feature_names != list(PAIR_FEATURES):
            raise IncompatibleArtifact(str(path), [f"features: {booster.feature_names} there, {list(PAIR_FEATURES)} here"])
        model._booster = booster
        return model
