"""Gradient-boosted trees on log slowdown: what the analytic prior leaves over, monotone where physics demands it.

They begin at the prior, so that few rows do not make it worse. What they say of a pair is two numbers that know nothing of each other,
and beyond the rows they were trained on it is the number of whichever leaf is nearest. So the two are held to what pairs do: see
:func:`bounded`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact
from autosched.core.records import MAX_SLOWDOWN
from autosched.costmodel.design import Design, design, log_targets
from autosched.costmodel.features import PAIR_FEATURES
from autosched.costmodel.model import Floats, PairLabels, PairQuery, Prediction, check_labels, not_fitted, point_prediction
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
)
"""A neighbour that asks for more of a resource never makes a kernel faster; a row can only rise with these."""

ROUNDS = 150
"""Trees in a model."""

_LEAST_RATE = "autosched_least_rate"
"""In the file: the bound. Trees of older versions do not have it; they begin at nothing and are not held to anything."""

LEAST_RATE_QUANTILE = 0.05
"""Of the sums of rates measured in training, the one taken for the least there is; fewer are outliers and noise."""


class XgboostModel:
    """Boosted trees; ``fit`` forgets what it knew.

    Args:
        threads: threads for fitting; 0 is one for small data and all for large.
    """

    name = "xgboost"

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads
        self._booster: xgboost.Booster | None = None
        self._least_rate: float | None = None

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Fit on both directions of every pair, in about a second for a thousand pairs."""
        check_labels(query, labels)
        made, target = design(query), log_targets(labels)
        self.fit_rows(made.rows, target, np.concatenate([labels.weight, labels.weight]), start=made.prior_log, rng=rng)
        rates = np.exp(-target[: len(query)]) + np.exp(-target[len(query) :])
        self._least_rate = min(1.0, float(np.quantile(rates, LEAST_RATE_QUANTILE)))

    def fit_rows(
        self, rows: NDArray[np.float32], target: Floats, weight: Floats, *, rng: np.random.Generator, start: Floats | None = None
    ) -> None:
        """Fit directional rows: ``rows`` float32 ``[n, n_features]``; ``target``, ``weight``, and ``start`` where trees begin: ``[n]``."""
        import xgboost

        names = list(PAIR_FEATURES)
        threads = self._threads or (1 if len(rows) < SMALL else 0)
        data = xgboost.DMatrix(rows, label=target, weight=weight, base_margin=start, feature_names=names, nthread=threads or None)
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

    def predict_rows(self, rows: NDArray[np.float32], start: Floats | None = None) -> Floats:
        """Log slowdown of directional rows: float64 ``[n]``; ``start`` is as in :meth:`fit_rows`.

        Raises:
            UsageError: before ``fit``.
        """
        if self._booster is None:
            raise not_fitted(self.name, "answer")
        if not len(rows):
            return np.zeros(0)
        answer = self._booster.inplace_predict(rows, validate_features=False, base_margin=start)
        result: Floats = np.asarray(answer, dtype=np.float64)
        return result

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair."""
        slowdowns = np.exp(self.predict_design(design(query)))
        first, last = np.split(np.clip(slowdowns, 1.0, MAX_SLOWDOWN), 2)
        if self._least_rate is not None:
            first, last = bounded(first, last, self._least_rate)
        return point_prediction(query, first, last)

    def predict_design(self, made: Design) -> Floats:
        """Log slowdown of every row as the trees say it, neither cut nor held to a bound: float64 ``[2n]``."""
        return self.predict_rows(made.rows, made.prior_log if self._least_rate is not None else None)

    def save(self, directory: Path) -> None:
        """Write ``trees.ubj``, XGBoost's own format that stays readable across its releases."""
        if self._booster is None:
            raise not_fitted(self.name, "be saved")
        if self._least_rate is not None:
            self._booster.set_attr(**{_LEAST_RATE: repr(self._least_rate)})
        # Not by save_model: what a full disk makes of its file is no OSError, or goes unnoticed until the file is read.
        (directory / "trees.ubj").write_bytes(self._booster.save_raw("ubj"))

    @classmethod
    def load(cls, directory: Path) -> XgboostModel:
        """Read ``trees.ubj``.

        Raises:
            ArtifactCorrupt, IncompatibleArtifact: as ``PairModel.load``.
        """
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
        model._least_rate = _read_bound(path, booster.attr(_LEAST_RATE))
        return model


def bounded(first: Floats, last: Floats, least_rate: float) -> tuple[Floats, Floats]:
    """Slowdowns of pairs, both made smaller by one factor where together they would be slower than any pair is: ``[n_pairs]`` each.

    ``1 / first + 1 / last`` is how much work gets done while both run, 1 being what one of them alone does. A device does not idle while
    there is work, so it is at least 1, less what taking turns costs; that is ``least_rate``. Slowdowns stay at 1 or more.
    *Source:* work conservation, Kleinrock, Queueing Systems II, chapter 3.

    >>> bounded(np.array([5.0, 1.0]), np.array([5.0, 24.0]), 1.0)
    (array([2., 1.]), array([ 2., 24.]))
    """
    factor = np.minimum(1.0, (1.0 / first + 1.0 / last) / least_rate)
    return first * factor, last * factor


def _read_bound(path: Path, written: str | None) -> float | None:
    try:
        value = float(written) if written is not None else None
    except ValueError:
        value = 0.0
    if value is not None and not 0.0 < value <= 1.0:
        raise ArtifactCorrupt(str(path), f"{_LEAST_RATE} is {written!r}; expected a number above 0 and at most 1")
    return value
