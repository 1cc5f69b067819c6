"""Whether a learned model may be used at all: only if it beats both the analytic prior and a constant where it was not trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autosched.costmodel.crossval import HeldOut

MARGIN = 0.02
"""The error must be smaller by this share; less is what another seed would change."""

_RIVALS = ("analytic", "constant")

LEAST_PAIRS = 40
"""Fewer measured pairs than this decide nothing."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """Which model is used, and why in one sentence. ``folds`` says what was held out."""

    chosen: str
    reason: str
    folds: str


def group_errors(held_out: HeldOut) -> dict[str, float]:
    """Mean absolute error of log slowdown of each held-out group."""
    prediction, labels = held_out.prediction, held_out.labels
    first = np.abs(np.log(prediction.slowdown_first / labels.slowdown_first))
    last = np.abs(np.log(prediction.slowdown_last / labels.slowdown_last))
    error = (first + last) / 2
    groups = np.asarray(held_out.group)
    return {name: float(error[groups == name].mean()) for name in sorted(set(held_out.group))}


def decide(held_out: Mapping[str, HeldOut], folds: str) -> GateDecision:
    """Choose among models; ``held_out`` must hold ``analytic`` and ``constant``, everything else that is not a baseline is a candidate.

    A candidate passes if the mean of its groups' errors is under that of both by ``MARGIN``, and it is better than each in at least
    half of the groups, so that one large group cannot decide alone. Of those that pass the smallest error is chosen.
    """
    count = len(next(iter(held_out.values())).rows)
    if count < LEAST_PAIRS:
        return GateDecision("analytic", f"only {count} measured pairs; a learned model needs at least {LEAST_PAIRS} to be judged", folds)
    errors = {name: group_errors(rows) for name, rows in held_out.items()}
    mean = {name: float(np.mean(list(by_group.values()))) for name, by_group in errors.items()}
    learned = [name for name in held_out if name not in (*_RIVALS, "no interference")]
    passed = [name for name in learned if not _lacks(name, errors, mean)]
    table = ", ".join(f"{name} {value:.3f}" for name, value in sorted(mean.items(), key=lambda item: item[1]))
    if not passed:
        beaten_by = "" if mean["analytic"] <= mean["constant"] else "; the analytic prior is no better than a constant here"
        nearest = min(learned, key=lambda name: mean[name], default=None)
        lacks = f": {nearest} is the nearest, but {_lacks(nearest, errors, mean)}" if nearest is not None else ""
        return GateDecision("analytic", f"no learned model is good enough on a held-out {folds}{lacks} ({table}){beaten_by}", folds)
    best = min(passed, key=lambda name: mean[name])
    # One that errs less on the mean is named with what it lacks: the numbers beside it would contradict the choice.
    closer = [f"{name} errs less, but {_lacks(name, errors, mean)}" for name in learned if mean[name] < mean[best]]
    return GateDecision(best, "; ".join([f"smallest mean absolute log error on a held-out {folds}: {table}", *closer]), folds)


def _lacks(name: str, errors: Mapping[str, Mapping[str, float]], mean: Mapping[str, float]) -> str:
    """What a candidate lacks to pass; empty if nothing."""
    lacks = []
    for rival in _RIVALS:
        wins = sum(errors[name][group] < errors[rival][group] for group in errors[name])
        if mean[name] >= (1.0 - MARGIN) * mean[rival]:
            lacks.append(f"its mean error is not {MARGIN:.0%} below that of {rival}")
        elif wins * 2 < len(errors[name]):
            lacks.append(f"it is better than {rival} on {wins} of {len(errors[name])} only")
    return " and ".join(lacks)
