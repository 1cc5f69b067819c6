"""What a trained model is worth on a store of runs: tables with baselines beside, by family and by class of pair, and for groups."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from autosched.costmodel.baselines import Constant, NoInterference
from autosched.costmodel.composition import finish_times, room_of
from autosched.costmodel.design import design, log_targets, take_labels, take_prediction
from autosched.costmodel.features import PAIR_FEATURES
from autosched.costmodel.metrics import CurvePoint, Metrics, inside, measure, pair_classes
from autosched.costmodel.model import COST_MODELS, Floats, Indices, PairModel, PairQuery, Prediction
from autosched.costmodel.pair_set import PairSet
from autosched.costmodel.torch_model import TorchModel
from autosched.costmodel.trained import TrainedModel
from autosched.costmodel.xgboost_model import XgboostModel
from autosched.datasets.schema import GroupRow
from autosched.datasets.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Composition:
    """Error of the time that ``k`` operators take together, from pair predictions; percent of the measured time."""

    k: int
    groups: int
    model_mape_pct: float
    no_interference_mape_pct: float
    sequential_mape_pct: float


@dataclass(frozen=True, slots=True)
class PredictedGroup:
    """A recorded group of ``k`` and what is predicted of its pairs.

    Args:
        row: the record.
        alone_us: time alone of all repeats of each, microseconds, in order of start.
        first, last, room: as ``composition.finish_times`` takes them.
    """

    row: GroupRow
    alone_us: tuple[float, ...]
    first: Floats
    last: Floats
    room: Floats


@dataclass(frozen=True, slots=True)
class ScheduleError:
    """Predicted against recorded makespans of whole schedules.

    Args:
        graphs, schedules: how many.
        mape_pct, bias_pct: mean absolute and mean signed error, percent of the recorded time.
        spearman: mean over graphs of the rank correlation within each; ``None`` where no graph has different times.
        regret_pct: time of the schedule predicted fastest over that of the truly fastest recorded one, minus 1; mean over graphs.
        random_regret_pct: the same for a schedule drawn blindly.
    """

    model: str
    graphs: int
    schedules: int
    mape_pct: float
    bias_pct: float
    spearman: float | None
    regret_pct: float
    random_regret_pct: float


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Rows by predicted slowdown: how far predictions and measurements agree, and how many lie inside the interval."""

    predicted_from: float
    predicted_to: float
    rows: int
    predicted_mean: float
    measured_mean: float
    inside_pct: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything ``autosched evaluate`` prints and saves.

    ``seen_families`` lists families that were in the training data: errors on them say nothing about unseen models. ``curve`` is that of
    its training; ``schedules`` and ``folder``, the model's, are filled in by whoever has a simulator and paths: ``pipeline.retraining``.
    """

    model: str
    rows: int
    simulated: int
    noise_floor_pct: float | None
    seen_families: tuple[str, ...]
    unseen_families: tuple[str, ...]
    overall: dict[str, Metrics]
    unseen: dict[str, Metrics]
    by_family: dict[str, Metrics]
    by_class: dict[str, Metrics]
    calibration: tuple[CalibrationBin, ...]
    importance: tuple[tuple[str, float], ...]
    composition: tuple[Composition, ...]
    schedules: tuple[ScheduleError, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    folder: str = ""

    def to_json(self) -> bytes:
        """Canonical bytes."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"))


def evaluate(model: TrainedModel, pairs: PairSet, store: Store, *, seed: int) -> Evaluation:
    """Predict every pair and group of a store and compare; ``seed`` is of the permutations."""
    if model.card.engine is not None and pairs.engine is not None and model.card.engine is not pairs.engine:
        logger.warning(
            "the cost model was trained on %s lanes, and these runs are of %s lanes, where operators disturb each other otherwise: "
            "tuning would not use it there",
            model.card.engine,
            pairs.engine,
        )
    models: dict[str, PairModel] = {model.name: model, "analytic": COST_MODELS.get("analytic")(), "no interference": NoInterference()}
    predictions = {name: item.predict(pairs.query) for name, item in models.items()}
    predictions["constant"] = _best_constant(pairs)
    seen = set(model.card.families)
    families = np.asarray(pairs.labels.family)
    unseen_rows = np.flatnonzero(~np.isin(families, sorted(seen)))
    own = predictions[model.name]
    floor = pairs.audit.noise_floor_pct
    return Evaluation(
        model=model.name,
        rows=2 * len(pairs),
        simulated=pairs.simulated,
        noise_floor_pct=None if np.isnan(floor) else floor,
        seen_families=tuple(sorted(set(families.tolist()) & seen)),
        unseen_families=tuple(sorted(set(families.tolist()) - seen)),
        overall={name: measure(pairs.labels, prediction) for name, prediction in predictions.items()},
        unseen={name: _on(pairs, prediction, unseen_rows) for name, prediction in predictions.items()} if len(unseen_rows) else {},
        by_family={name: _on(pairs, own, np.flatnonzero(families == name)) for name in sorted(set(families.tolist()))},
        by_class=_by_class(pairs, own),
        calibration=_calibration(pairs, own),
        importance=permutation_importance(model.inner, replace(pairs, query=model.as_trained(pairs.query)), seed=seed),
        composition=composition(model, pairs, store.groups()),
        curve=model.card.curve,
    )


def permutation_importance(model: PairModel, pairs: PairSet, *, seed: int) -> tuple[tuple[str, float], ...]:
    """Rise of the mean absolute log error when one feature's column is shuffled, largest first; empty for models without columns."""
    made = design(pairs.query)
    truth = log_targets(pairs.labels)
    rng = np.random.default_rng(seed)

    def error(rows: NDArray[np.float32]) -> float | None:
        guess: Floats
        if isinstance(model, XgboostModel):
            guess = model.predict_design(replace(made, rows=rows))
        elif isinstance(model, TorchModel):
            guess = model.predict_rows(rows, made.prior_log)
        else:
            return None
        return float(np.abs(np.maximum(0.0, guess) - truth).mean())

    base = error(made.rows)
    if base is None:
        return ()
    found = []
    for column, name in enumerate(PAIR_FEATURES):
        rows = made.rows.copy()
        rows[:, column] = rng.permutation(rows[:, column])
        shuffled = error(rows)
        assert shuffled is not None
        found.append((name, shuffled - base))
    return tuple(sorted(found, key=lambda item: -item[1]))


def predicted_groups(model: PairModel, pairs: PairSet, groups: Sequence[GroupRow]) -> Iterator[PredictedGroup]:
    """What ``model`` says of the pairs in each group that was not disturbed and whose operators are all among the kernels of ``pairs``."""
    query, left_out = pairs.query, pairs.audit.excluded
    place: dict[tuple[str, str, int], int] = {}
    for index, (kernel, device) in enumerate(zip(query.kernels, query.kernel_device.tolist(), strict=True)):
        # Not the device's name, which another one may have, and so have its other software and lanes.
        place[pairs.scopes[device].scope, kernel.signature, kernel.width] = index
    room = room_of(query.kernels, query.devices, query.kernel_device)
    for row in groups:
        group = row.record
        keys = [(row.scope, name, width) for name, width in zip(group.signatures, group.widths, strict=True)]
        if row.key in left_out or not all(key in place for key in keys):
            continue
        members = np.asarray([place[key] for key in keys], dtype=np.int64)
        size = len(members)
        a, b = np.triu_indices(size, 1)
        asked = PairQuery(query.kernels, query.devices, query.kernel_device, members[a], members[b])
        answer = model.predict(asked)
        first, last = np.ones((size, size)), np.ones((size, size))
        first[a, b], last[b, a] = answer.slowdown_first, answer.slowdown_last
        # Each member was repeated, so what is composed is its repeats in a row.
        alone_us = tuple(once * times for once, times in zip(group.solo_us, group.repeats, strict=True))
        yield PredictedGroup(row, alone_us, first, last, room[members])


def composition(model: PairModel, pairs: PairSet, groups: Sequence[GroupRow]) -> tuple[Composition, ...]:
    """Predict when the last of each group is done, from its pairs; by size of the group."""
    errors: dict[int, list[tuple[float, ...]]] = {}
    for group in predicted_groups(model, pairs, groups):
        truth = group.row.record.together_us
        # Who disturbs nobody needs room all the same: three operators of a thread each do not run at once on two cores.
        undisturbed = np.ones_like(group.first)
        guess, alone = (
            float(finish_times(group.alone_us, first, last, room=group.room).max())
            for first, last in ((group.first, group.last), (undisturbed, undisturbed))
        )
        rivals = (guess, alone, sum(group.alone_us))
        errors.setdefault(len(group.alone_us), []).append(tuple(abs(value - truth) / truth for value in rivals))
    return tuple(
        Composition(size, len(rows), *(float(np.mean([row[part] for row in rows]) * 100) for part in range(3)))
        for size, rows in sorted(errors.items())
    )


def _on(pairs: PairSet, prediction: Prediction, rows: Indices) -> Metrics:
    return measure(take_labels(pairs.labels, rows), take_prediction(prediction, rows))


def _by_class(pairs: PairSet, prediction: Prediction) -> dict[str, Metrics]:
    classes = np.asarray(pair_classes(pairs.query))
    return {name: _on(pairs, prediction, np.flatnonzero(classes == name)) for name in sorted(set(classes.tolist()))}


def _best_constant(pairs: PairSet) -> Prediction:
    """The best constant *for these very rows*: a baseline that knows the answer's middle, and still must be beaten."""
    constant = Constant()
    constant.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    return constant.predict(pairs.query)


def _calibration(pairs: PairSet, prediction: Prediction) -> tuple[CalibrationBin, ...]:
    guess = np.concatenate([prediction.slowdown_first, prediction.slowdown_last])
    truth = np.concatenate([pairs.labels.slowdown_first, pairs.labels.slowdown_last])
    low, high = prediction.low.T.reshape(-1), prediction.high.T.reshape(-1)
    has_intervals = bool((high > low).any())
    edges = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, float("inf"))
    bins = []
    for start, end in itertools.pairwise(edges):
        rows = (guess >= start) & (guess < end)
        if rows.any():
            held = float(inside(truth, low, high)[rows].mean() * 100) if has_intervals else None
            top = end if np.isfinite(end) else float(guess[rows].max())
            bins.append(CalibrationBin(start, top, int(rows.sum()), float(guess[rows].mean()), float(truth[rows].mean()), held))
    return tuple(bins)
