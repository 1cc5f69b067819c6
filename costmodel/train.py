"""Training: hold families out, compare every model with the baselines, let the gate choose, and fit the chosen one on everything."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from autosched.core.errors import UsageError
from autosched.costmodel.baselines import Constant, NoInterference
from autosched.costmodel.conformal import calibrate
from autosched.costmodel.crossval import FAMILY_FOLDS, KERNEL_FOLDS, Factory, HeldOut, cross_validate, folds_of
from autosched.costmodel.gate import LEAST_PAIRS, GateDecision, decide
from autosched.costmodel.metrics import CurvePoint, Metrics, measure
from autosched.costmodel.model import COST_MODELS, Indices, PairLabels, PairModel, PairQuery, Prediction
from autosched.costmodel.pair_set import PairSet
from autosched.costmodel.stacked import StackedModel
from autosched.costmodel.trained import Card, TrainedModel
from autosched.datasets.splits import Fold

logger = logging.getLogger(__name__)

DEFAULT_KINDS = ("graybox", "xgboost", "torch", "stacked")
CURVE_SIZES = (25, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
CURVE_FOLDS = 3

FEW_PAIRS = 20
"""The mean error of fewer held-out pairs says little of a family. On the runs that ship for a Xeon, the two families with fewer are why a
model is two percent better than the prior; on the others it is not."""

_BEGUN_ELSEWHERE = ("start", "start+residual")


@dataclass(frozen=True, slots=True)
class Training:
    """What training made: the model, the errors of every candidate and baseline on held-out rows, and the learning curve."""

    model: TrainedModel
    held_out: dict[str, Metrics]
    decision: GateDecision
    curve: tuple[CurvePoint, ...]


class _Unchanged:
    """The model given by ``start``, as it is: what retraining must beat."""

    def __init__(self, model: PairModel) -> None:
        self.model = model

    @property
    def name(self) -> str:
        return self.model.name

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Nothing: it stays as it is."""

    def predict(self, query: PairQuery) -> Prediction:
        return self.model.predict(query)

    def save(self, directory: object) -> None:
        raise UsageError("a start model as it is cannot be saved; save the model it holds")

    @classmethod
    def load(cls, directory: object) -> _Unchanged:
        raise UsageError("a start model as it is cannot be loaded; load the model it holds")


def train(
    pairs: PairSet,
    *,
    seed: int,
    kinds: Sequence[str] = DEFAULT_KINDS,
    start: TrainedModel | None = None,
    curve: bool = True,
    report: Callable[[str], None] | None = None,
) -> Training:
    """Fit, judge and choose.

    Args:
        pairs: measured pairs.
        seed: of everything random in it.
        kinds: names in ``COST_MODELS`` to try; ``analytic`` and the baselines always take part.
        start: a model trained elsewhere: it competes as it is (``start``) and with a residual fitted here (``start+residual``).
        curve: whether to compute the learning curve, which fits the chosen model up to thirty times more.
        report: told in one line what is done next.

    Returns:
        A model that is never worse on held-out families than the analytic prior, by measurement; with too few rows, the prior itself, or
        ``start`` where that errs less on them.

    Raises:
        UnknownName: a kind that is not registered.
        UsageError: a start model of another kind of device, or one that was trained on these very runs; a kind that fails, or answers
            what is no slowdown.
    """
    say = report or logger.info
    _say_of_several_devices(pairs)
    factories = _factories(kinds, start, pairs)
    unseen = np.arange(len(pairs)) if start is None else _unseen_by(start, pairs)
    if len(pairs) < LEAST_PAIRS:
        decision = _too_few(pairs, start)
        if start is not None and decision.chosen in _BEGUN_ELSEWHERE:
            return Training(_untouched(start, decision), {}, decision, ())
        return Training(_finish(pairs, decision, factories, {}, seed), {}, decision, ())
    name, folds = _folds(pairs, unseen, seed)
    held_out: dict[str, HeldOut] = {}
    for kind, factory in factories.items():
        say(f"{kind}: {len(folds)} folds by {name}")
        held_out[kind] = _held_out(kind, factory, pairs, folds, seed)
    decision = _with_what_it_knew(decide(held_out, name), start, pairs)
    say(f"chosen: {decision.chosen}; {decision.reason}")
    metrics = {kind: rows.metrics() for kind, rows in held_out.items()}
    points: tuple[CurvePoint, ...] = ()
    if curve:
        learned = decision.chosen if decision.chosen != "analytic" else "xgboost"
        say(f"learning curve of {learned}")
        points = learning_curve(pairs, {learned: factories.get(learned) or COST_MODELS.get(learned)}, folds, seed=seed)
    model = _finish(pairs, decision, factories, held_out, seed, points, start)
    return Training(model, metrics, decision, points)


def _say_of_several_devices(pairs: PairSet) -> None:
    names = {scope.device.digest: scope.facts.name for scope in pairs.scopes}
    if len(names) > 1:
        logger.warning(
            "the runs are of several devices (%s), and errors are over all of them: the one chosen may be worse than the prior or a "
            "constant on one; train on the runs of one device alone to judge it there",
            ", ".join(names.values()),
        )


def _unseen_by(start: TrainedModel, pairs: PairSet) -> Indices:
    """The rows (int64 ``[m]``) that say how wrong ``start`` is where it was not trained: of a family, or a device, that is new to it.

    Raises:
        UsageError: if they are too few to judge by.
    """
    families, devices = pairs.labels.family, pairs.query.kernel_device[pairs.query.first].tolist()
    learned = {(digest, family) for digest, names in start.card.origins.items() for family in names}
    known = [(pairs.scopes[device].device.digest, family) in learned for device, family in zip(devices, families, strict=True)]
    unseen: Indices = np.flatnonzero(~np.asarray(known, dtype=np.bool_))
    if len(unseen) < min(len(pairs), LEAST_PAIRS):
        raise UsageError(
            f"{len(pairs) - len(unseen)} of {len(pairs)} pairs are of model families that the start model was trained on, on this very "
            f"device: they do not tell how wrong it is on unseen ones, and {len(unseen)} others are too few to judge by; expected "
            f"{LEAST_PAIRS}. Train on all runs together, without --from, or collect from models of other families"
        )
    alike = sorted(set(start.card.families) & set(families))
    if not learned and alike and {item.facts.name for item in pairs.scopes} & set(start.card.devices):
        logger.warning(
            "the start model was trained on a device of this name, and on %s: if it was this very device, its errors are too low",
            ", ".join(alike),
        )
    return unseen


def _folds(pairs: PairSet, tested: Indices, seed: int) -> tuple[str, list[Fold]]:
    """As ``folds_of``, tested on rows among ``tested`` only.

    Raises:
        UsageError: if whatever is held out leaves nothing to learn from.
    """
    name, folds = folds_of(pairs, np.random.default_rng(seed))
    if name == KERNEL_FOLDS:
        families = sorted(set(pairs.labels.family))
        alike = "the model families have too many operators in common to hold one out"
        logger.warning(
            "%s (%s): errors and intervals are for unseen kernels, not for unseen families",
            alike if len(families) > 1 else "all pairs are of one model family",
            ", ".join(families),
        )
    kept = [replace(fold, test=fold.test[np.isin(fold.test, tested)]) for fold in folds]
    kept = [fold for fold in kept if len(fold.test)]
    if not kept:
        raise UsageError(
            f"none of {len(pairs)} pairs can be held out to judge a model by: the others are all of the same operators; "
            "expected pairs of several. Collect from more models, of other families"
        )
    if few := [f"{fold.name} ({len(fold.test)})" for fold in kept if len(fold.test) < FEW_PAIRS]:
        logger.warning(
            "in the choice of a model every %s counts alike, also those with fewer than %d pairs: %s; collect more of them",
            name,
            FEW_PAIRS,
            ", ".join(few),
        )
    return name, kept


def _held_out(kind: str, factory: Factory, pairs: PairSet, folds: Sequence[Fold], seed: int) -> HeldOut:
    """As ``cross_validate``; what another package brings may raise anything and answer anything, and is named.

    Raises:
        UsageError: if it does.
    """
    repair = "Repair the package that brings it, or uninstall it."
    try:
        found = cross_validate(factory, pairs, folds, seed=seed)
    except Exception as error:
        if kind not in COST_MODELS.plugged():
            raise
        raise UsageError(f"the cost model {kind!r} cannot be fitted and asked: {type(error).__name__}: {error}. {repair}") from error
    slowdowns = np.concatenate([found.prediction.slowdown_first, found.prediction.slowdown_last])
    # Its errors would be no numbers either, and a card with those cannot be read again.
    if wrong := int((~(np.isfinite(slowdowns) & (slowdowns >= 1.0))).sum()):
        raise UsageError(
            f"the cost model {kind!r} answers {wrong} of {len(slowdowns)} slowdowns with what is below 1 or not finite. {repair}"
        )
    return found


def _with_what_it_knew(decision: GateDecision, start: TrainedModel | None, pairs: PairSet) -> GateDecision:
    """That a start model had seen the held-out families on another device is part of why it is chosen."""
    known = sorted(set(start.card.families) & set(pairs.labels.family)) if start is not None else []
    if decision.chosen not in _BEGUN_ELSEWHERE or not known:
        return decision
    return replace(decision, reason=f"{decision.reason}; it had seen {', '.join(known)} on another device")


def _too_few(pairs: PairSet, start: TrainedModel | None) -> GateDecision:
    """Too few rows to fit or judge anything fitted; but a model from elsewhere and the prior, both unfitted, can be compared on them."""
    reason = f"only {len(pairs)} measured pairs; a learned model needs at least {LEAST_PAIRS} to be judged"
    if start is not None:
        errors = [measure(pairs.labels, item.predict(pairs.query)).mean_abs_log for item in (start.inner, COST_MODELS.get("analytic")())]
        reason += f"; mean absolute log error on them: start {errors[0]:.3f}, analytic {errors[1]:.3f}"
        if errors[0] < errors[1]:
            return GateDecision("start", reason, "nothing")
    return GateDecision("analytic", reason, "nothing")


def learning_curve(pairs: PairSet, factories: dict[str, Factory], folds: Sequence[Fold], *, seed: int) -> tuple[CurvePoint, ...]:
    """Held-out errors against the number of measured pairs, on at most ``CURVE_FOLDS`` folds (the largest ones)."""
    used = sorted(folds, key=lambda fold: -len(fold.test))[:CURVE_FOLDS]
    most = min(len(fold.train) for fold in used)
    points = []
    for size in [*(size for size in CURVE_SIZES if size < most), most]:
        for name, factory in factories.items():
            points.append(CurvePoint(name, size, cross_validate(factory, pairs, used, seed=seed, limit=size).metrics()))
    return tuple(points)


def _factories(kinds: Sequence[str], start: TrainedModel | None, pairs: PairSet) -> dict[str, Factory]:
    factories: dict[str, Factory] = {
        "no interference": NoInterference,
        "constant": Constant,
        "analytic": COST_MODELS.get("analytic"),
    }
    for kind in kinds:
        factories[kind] = COST_MODELS.get(kind)
    if start is not None:
        missing = sorted({device.kind for device in pairs.query.devices} - set(start.card.kinds))
        if missing:
            raise UsageError(
                f"the start model was trained on {', '.join(start.card.kinds)}, the runs are of {', '.join(missing)}: train without --from"
            )
        as_it_is, with_residual = _BEGUN_ELSEWHERE
        factories[as_it_is] = partial(_Unchanged, start.inner)
        factories[with_residual] = partial(StackedModel, start.inner)
    return factories


def _finish(
    pairs: PairSet,
    decision: GateDecision,
    factories: dict[str, Factory],
    held_out: dict[str, HeldOut],
    seed: int,
    curve: tuple[CurvePoint, ...] = (),
    start: TrainedModel | None = None,
) -> TrainedModel:
    """Fit the chosen model on every row, with intervals from its held-out errors; what it began with, ``start``, has seen more."""
    model = factories[decision.chosen]()
    model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(seed))
    rows = held_out.get(decision.chosen)
    floor = pairs.audit.noise_floor_pct
    before = start.card if start is not None and decision.chosen in _BEGUN_ELSEWHERE else None
    origins = {digest: set(families) for digest, families in pairs.origins.items()}
    for digest, families in (before.origins if before is not None else {}).items():
        origins.setdefault(digest, set()).update(families)
    card = Card(
        devices=_joined({device.name for device in pairs.query.devices}, before.devices if before is not None else ()),
        kinds=tuple(sorted({device.kind for device in pairs.query.devices})),
        families=_joined(pairs.labels.family, before.families if before is not None else ()),
        pairs=len(pairs),
        simulated=pairs.simulated,
        noise_floor_pct=None if math.isnan(floor) else floor,
        decision=decision,
        held_out={kind: item.metrics() for kind, item in held_out.items()},
        seed=seed,
        curve=curve,
        engine=pairs.engine,
        origins={digest: tuple(sorted(families)) for digest, families in sorted(origins.items())},
        facts=tuple(dict.fromkeys((*pairs.query.devices, *(before.facts if before is not None else ())))),
    )
    inner = model.model if isinstance(model, _Unchanged) else model
    return TrainedModel(inner, calibrate(rows.prediction, rows.labels) if rows is not None else None, card)


def _untouched(start: TrainedModel, decision: GateDecision) -> TrainedModel:
    """``start`` where pairs were too few to hold any out: it learned nothing from them, and its errors and intervals are as they were."""
    card = msgspec.structs.replace(start.card, decision=replace(decision, folds=start.card.decision.folds))
    return TrainedModel(start.inner, start.intervals, card)


def _joined(*parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({item for part in parts for item in part}))


__all__ = ["CURVE_SIZES", "DEFAULT_KINDS", "FAMILY_FOLDS", "Training", "learning_curve", "train"]
