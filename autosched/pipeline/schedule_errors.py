"""How far predicted makespans of whole schedules lie from recorded ones, and what choosing by them costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from autosched.core.costs import CostTable
from autosched.core.errors import NoFeasibleCandidate
from autosched.core.graph import OpGraph
from autosched.costmodel.baselines import NoInterference
from autosched.costmodel.evaluate import ScheduleError
from autosched.costmodel.metrics import spearman
from autosched.costmodel.model import COST_MODELS, PairModel
from autosched.datasets.schema import ScheduleRow
from autosched.datasets.store import Store
from autosched.pipeline.replaying import StoreRecording
from autosched.pipeline.schedule_runs import is_disturbed
from autosched.search.problem import Problem
from autosched.search.simulate import simulate

ModelFor = Callable[[str], PairModel]
"""The model to predict a model family with: for an honest table, one that was not trained on it."""

LEAST_SCHEDULES = 3
"""A graph with fewer recorded schedules has nothing to choose from."""


@dataclass(frozen=True, slots=True)
class _Graph:
    predicted_us: np.ndarray[tuple[int], np.dtype[np.float64]]
    measured_us: np.ndarray[tuple[int], np.dtype[np.float64]]


def schedule_errors(
    store: Store,
    models: Mapping[str, ModelFor],
    change: Callable[[CostTable], CostTable] = lambda costs: costs,
    scopes: Collection[str] | None = None,
) -> tuple[ScheduleError, ...]:
    """One row for each model, the analytic prior and no interference, over every graph with at least three recorded schedules.

    Args:
        models: by name; each on its own, without the recorded pairs that a tuning job would use.
        change: what is done to every cost table before it is simulated, to see what something in it accounts for.
        scopes: whose schedules count; all by default.
    """
    everyone: dict[str, ModelFor] = {**models}
    everyone.setdefault("analytic", lambda family: COST_MODELS.get("analytic")())
    everyone["no interference"] = lambda family: NoInterference()
    found: dict[str, list[_Graph]] = {name: [] for name in everyone}
    for scope in sorted({row.scope for row in store.schedules()}):
        recording = StoreRecording(store, scope)
        if recording.scope.scope != scope or (scopes is not None and scope not in scopes):
            continue
        for row in store.graphs():
            recorded = recording.schedules_of.get(row.key, [])
            timed = [item for item in recorded if not is_disturbed(item.schedule, item.record, recording.scope.facts)]
            if len(timed) < LEAST_SCHEDULES:
                continue
            for name, model_for in everyone.items():
                made = _predict(recording, row.graph, timed, model_for(row.family), change)
                if made is not None:
                    found[name].append(made)
    return tuple(_error(name, graphs) for name, graphs in found.items() if graphs)


def _predict(
    recording: StoreRecording, graph: OpGraph, timed: list[ScheduleRow], model: PairModel, change: Callable[[CostTable], CostTable]
) -> _Graph | None:
    try:
        problem = Problem.make(graph, change(recording.problem(graph, model, pairs=[]).costs))
    except NoFeasibleCandidate:
        return None
    timed = [row for row in timed if problem.is_costed(row.schedule)]
    if len(timed) < LEAST_SCHEDULES:
        return None
    predicted = [simulate(problem, row.schedule).makespan_us for row in timed]
    return _Graph(np.asarray(predicted), np.asarray([row.record.samples.median_us for row in timed]))


def _error(name: str, graphs: list[_Graph]) -> ScheduleError:
    off = np.concatenate([graph.predicted_us / graph.measured_us - 1.0 for graph in graphs])
    ranks = [spearman(graph.predicted_us, graph.measured_us) for graph in graphs]
    known = [rank for rank in ranks if rank is not None]
    regret = [graph.measured_us[int(np.argmin(graph.predicted_us))] / graph.measured_us.min() - 1.0 for graph in graphs]
    blind = [graph.measured_us.mean() / graph.measured_us.min() - 1.0 for graph in graphs]
    return ScheduleError(
        model=name,
        graphs=len(graphs),
        schedules=len(off),
        mape_pct=float(np.abs(off).mean() * 100),
        bias_pct=float(off.mean() * 100),
        spearman=float(np.mean(known)) if known else None,
        regret_pct=float(np.mean(regret) * 100),
        random_regret_pct=float(np.mean(blind) * 100),
    )
