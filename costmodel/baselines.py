"""What every learned model must beat: no interference at all, and one number for all pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from autosched.core.errors import UsageError
from autosched.costmodel.design import log_targets
from autosched.costmodel.model import PairLabels, PairQuery, Prediction, check_labels, not_fitted, point_prediction


class NoInterference:
    """Predicts 1.0. Only a baseline in tables; it is not registered, so that nothing can be tuned with it."""

    name = "no interference"

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Nothing to learn."""

    def predict(self, query: PairQuery) -> Prediction:
        """1.0 for every pair."""
        return point_prediction(query, np.ones(len(query)), np.ones(len(query)))

    def save(self, directory: Path) -> None:
        """Baselines are not saved.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"the model {self.name!r} cannot be saved; it is only compared with")

    @classmethod
    def load(cls, directory: Path) -> NoInterference:
        """Always possible."""
        return cls()


class Constant:
    """The median slowdown of the first-started and of the last-started in training.

    The median of log slowdowns minimises the mean absolute log error, which is what models are ranked by: no constant does better.
    """

    name = "constant"

    def __init__(self) -> None:
        self._slowdowns: tuple[float, float] | None = None

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Take the two medians."""
        check_labels(query, labels)
        logs = log_targets(labels)
        count = len(query)
        self._slowdowns = (float(np.exp(np.median(logs[:count]))), float(np.exp(np.median(logs[count:]))))

    def predict(self, query: PairQuery) -> Prediction:
        """The same two numbers for every pair."""
        if self._slowdowns is None:
            raise not_fitted(self.name, "answer")
        first, last = self._slowdowns
        return point_prediction(query, np.full(len(query), first), np.full(len(query), last))

    def save(self, directory: Path) -> None:
        """Baselines are not saved.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"the model {self.name!r} cannot be saved; it is only compared with")

    @classmethod
    def load(cls, directory: Path) -> Constant:
        """An unfitted one."""
        return cls()
