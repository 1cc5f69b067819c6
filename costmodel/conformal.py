"""Intervals that hold what they promise: widths taken from errors on held-out model families, not from the model's own opinion.

*Source:* split conformal prediction with a condition on the predicted class (Mondrian), Vovk, Gammerman, Shafer, Algorithmic Learning
in a Random World, chapters 2 and 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autosched.costmodel.design import take_labels, take_prediction
from autosched.costmodel.model import Floats, PairLabels, Prediction

LEVEL = 0.90
"""Share of the rows that an interval is to hold."""

EDGES = (0.095, 0.70)
"""Predicted log slowdowns that part undisturbed, contended and queued rows: slowdowns of 1.1 and 2; their errors differ in size."""

MOST_STRETCH = 10.0
"""Families so unlike each other that more would be needed say nothing about the next one."""

LEAST_ROWS = 40
"""A class with fewer errors uses those of all classes of its direction: its tails would be guesses."""


@dataclass(frozen=True, slots=True)
class Conformal:
    """Signed errors of log slowdown that bound ``LEVEL`` of the held-out rows, by direction (first, last) and predicted class.

    Args:
        low, high: ``[2][len(EDGES) + 1]``, added to the predicted log slowdown.
        rows: errors it was made from.
    """

    low: tuple[tuple[float, ...], ...]
    high: tuple[tuple[float, ...], ...]
    rows: int

    def apply(self, prediction: Prediction) -> Prediction:
        """The same prediction with its interval. ``low`` may lie under 1: measured slowdowns do, by noise."""
        low, high = [], []
        for direction, slowdowns in enumerate((prediction.slowdown_first, prediction.slowdown_last)):
            logs = np.log(slowdowns)
            place = np.digitize(logs, EDGES)
            # A bound of nothing leaves the slowdown as it is: at the cap, where many rows are, a rounding error would be a miss.
            low.append(slowdowns * np.exp(np.asarray(self.low[direction])[place]))
            high.append(slowdowns * np.exp(np.asarray(self.high[direction])[place]))
        return replace(prediction, low=np.stack(low, axis=1), high=np.stack(high, axis=1))


def calibrate(prediction: Prediction, labels: PairLabels) -> Conformal:
    """Make intervals from predictions for rows the model was not fitted on.

    Rows of one model family err together, so intervals that hold 90 % of the rows they were made from hold less of a family they have
    not seen. They are stretched until they hold what they promise of each family when made from the others.

    Raises:
        ValueError: no rows.
    """
    table = _calibrate(prediction, labels)
    stretch = _stretch(prediction, labels) if len(set(labels.family)) > 2 else 1.0
    low, high = (tuple(tuple(stretch * item for item in row) for row in side) for side in (table.low, table.high))
    return replace(table, low=low, high=high)


def _stretch(prediction: Prediction, labels: PairLabels) -> float:
    """The factor by which intervals made from all families but one must be widened to hold ``LEVEL`` of that one's rows, over all rows."""
    groups = np.asarray(labels.family)
    needed: list[Floats] = []
    for name in np.unique(groups):
        mine, others = np.flatnonzero(groups == name), np.flatnonzero(groups != name)
        table = _calibrate(take_prediction(prediction, others), take_labels(labels, others))
        held, truth = table.apply(take_prediction(prediction, mine)), take_labels(labels, mine)
        for side, guess, found in (
            (0, held.slowdown_first, truth.slowdown_first),
            (1, held.slowdown_last, truth.slowdown_last),
        ):
            error = np.log(found) - np.log(guess)
            bound = np.where(error < 0, np.log(held.low[:, side]) - np.log(guess), np.log(held.high[:, side]) - np.log(guess))
            needed.append(np.abs(error) / np.maximum(np.abs(bound), 1e-6))
    return float(np.clip(np.quantile(np.concatenate(needed), LEVEL), 1.0, MOST_STRETCH))


def _calibrate(prediction: Prediction, labels: PairLabels) -> Conformal:
    lows: list[tuple[float, ...]] = []
    highs: list[tuple[float, ...]] = []
    for guess, truth in ((prediction.slowdown_first, labels.slowdown_first), (prediction.slowdown_last, labels.slowdown_last)):
        if not len(guess):
            raise ValueError("no rows to calibrate on")
        errors = np.log(truth) - np.log(guess)
        place = np.digitize(np.log(guess), EDGES)
        bounds = []
        for part in range(len(EDGES) + 1):
            mine = errors[place == part]
            bounds.append(_bounds(mine if len(mine) >= LEAST_ROWS else errors))
        lows.append(tuple(low for low, _ in bounds))
        highs.append(tuple(high for _, high in bounds))
    return Conformal(tuple(lows), tuple(highs), 2 * len(labels.slowdown_first))


def _bounds(errors: Floats) -> tuple[float, float]:
    """Order statistics that hold a new error with probability ``LEVEL``, half of the rest on each side."""
    ordered = np.sort(errors)
    count = len(ordered)
    tail = (1.0 - LEVEL) / 2
    below = math.floor((count + 1) * tail) - 1
    above = math.ceil((count + 1) * (1.0 - tail)) - 1
    # Too few rows to bound a tail at all: twice the largest error stands for "unknown".
    low = float(ordered[below]) if below >= 0 else 2.0 * min(0.0, float(ordered[0]))
    high = float(ordered[above]) if above < count else 2.0 * max(0.0, float(ordered[-1]))
    return min(low, 0.0), max(high, 0.0)
