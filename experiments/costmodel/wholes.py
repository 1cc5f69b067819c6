"""Groups and whole schedules of model families that a cost model was not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.baselines import NoInterference
from autosched.costmodel.design import take, take_labels
from autosched.costmodel.evaluate import Composition, ScheduleError, composition
from autosched.costmodel.model import COST_MODELS, PairModel
from autosched.costmodel.pair_set import PairSet
from autosched.datasets.splits import leave_one_out
from autosched.datasets.store import Store
from autosched.pipeline.schedule_errors import schedule_errors


def without_each_family(pairs: PairSet, kind: str, seed: int) -> dict[str, PairModel]:
    """For each model family, a model of ``kind`` fitted on the others; empty with fewer than two families."""
    if len(set(pairs.labels.family)) < 2:
        return {}
    found: dict[str, PairModel] = {}
    for number, fold in enumerate(leave_one_out(pairs.labels.family, pairs.keys)):
        if len(fold.train):
            model = COST_MODELS.get(kind)()
            model.fit(take(pairs.query, fold.train), take_labels(pairs.labels, fold.train), rng=np.random.default_rng((seed, number)))
            found[fold.name] = model
    return found


def composed(pairs: PairSet, store: Store, models: Mapping[str, PairModel], kind: str) -> dict[str, list[Composition]]:
    """Composition errors of groups, each predicted without its own family, the prior and no interference beside."""
    rivals: dict[str, Mapping[str, PairModel]] = {
        kind: models,
        "analytic": dict.fromkeys(models, AnalyticModel()),
        "no interference": dict.fromkeys(models, NoInterference()),
    }
    found: dict[str, list[Composition]] = {}
    for name, by_family in rivals.items():
        parts = [
            row
            for family, model in by_family.items()
            for row in composition(model, pairs, [item for item in store.groups() if item.family == family])
        ]
        for size in sorted({row.k for row in parts}):
            rows = [row for row in parts if row.k == size]
            weights = [row.groups for row in rows]
            columns = ("model_mape_pct", "no_interference_mape_pct", "sequential_mape_pct")
            means = [float(np.average([getattr(row, column) for row in rows], weights=weights)) for column in columns]
            found.setdefault(name, []).append(Composition(size, sum(weights), *means))
    return found


def scheduled(store: Store, models: Mapping[str, PairModel], kind: str) -> tuple[ScheduleError, ...]:
    """Errors on whole schedules, each predicted without its own family; a family that had no pairs is predicted by the prior."""
    return schedule_errors(store, {kind: lambda family: models.get(family) or AnalyticModel()} if models else {})


def ablated(store: Store, models: Mapping[str, PairModel], kind: str) -> dict[str, ScheduleError]:
    """The same errors of ``kind`` without what is known of threads that poll, of those that spin, and of both; none if none do."""
    without = {
        "neither": {"polling_us": 0.0, "team_spin_us": 0.0},
        "helper threads that spin": {"polling_us": 0.0},
        "lanes that poll": {"team_spin_us": 0.0},
        "both": {},
    }
    if not models:
        return {}
    found: dict[str, ScheduleError] = {}
    for label, times_us in without.items():
        rows = schedule_errors(store, {kind: lambda family: models.get(family) or AnalyticModel()}, partial(replace, **times_us))
        # The others stand in the table of all models.
        found.update((label, row) for row in rows if row.model == kind)
    return found if found["neither"] != found["both"] else {}


def lines(groups: Mapping[str, list[Composition]], schedules: tuple[ScheduleError, ...], waiting: Mapping[str, ScheduleError]) -> list[str]:
    """All as tables of Markdown."""
    found: list[str] = []
    if groups:
        found += ["", "three and four operators at once, composed from pairs; held out by model family", ""]
        found += ["| model | k | groups | error of the time together % | all one after the other % |", "|---|---|---|---|---|"]
        found += [
            f"| {name} | {row.k} | {row.groups} | {row.model_mape_pct:.1f} | {row.sequential_mape_pct:.1f} |"
            for name, rows in groups.items()
            for row in rows
        ]
    if schedules:
        found += ["", "whole schedules, no pair of them measured; held out by model family", ""]
        found += ["| model | graphs | schedules | makespan MAPE % | bias % | Spearman | regret of its choice % | of a blind choice % |"]
        found += ["|---|---|---|---|---|---|---|---|"]
        found += [
            f"| {row.model} | {row.graphs} | {row.schedules} | {row.mape_pct:.1f} | {row.bias_pct:+.1f} "
            f"| {'-' if row.spearman is None else f'{row.spearman:.2f}'} | {row.regret_pct:.1f} | {row.random_regret_pct:.1f} |"
            for row in schedules
        ]
    if waiting:
        found += ["", "the same, by what the simulator knows of threads that do no work", ""]
        found += ["| known | makespan MAPE % | bias % | Spearman | regret of its choice % |", "|---|---|---|---|---|"]
        found += [
            f"| {name} | {row.mape_pct:.1f} | {row.bias_pct:+.1f} | {'-' if row.spearman is None else f'{row.spearman:.2f}'} "
            f"| {row.regret_pct:.1f} |"
            for name, row in waiting.items()
        ]
    return found
