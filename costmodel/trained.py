"""A model as it is used: the one the gate chose, with its intervals, and a card that says what it may be asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path

import msgspec
import numpy as np

from autosched.core.errors import UsageError
from autosched.core.records import Engine
from autosched.costmodel.analytic import AnalyticModel
from autosched.costmodel.conformal import Conformal
from autosched.costmodel.design import take, take_prediction
from autosched.costmodel.gate import GateDecision
from autosched.costmodel.metrics import CurvePoint, Metrics
from autosched.costmodel.model import PairLabels, PairModel, PairQuery, Prediction
from autosched.datasets.facts import DeviceFacts

logger = logging.getLogger(__name__)


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a model comes from and how wrong it was, for people and for checks.

    Args:
        devices: names of the devices it was trained on; ``kinds`` their kinds.
        engine: what ran the lanes of those that are CPUs: what operators do to each other there is half the engine's doing. ``None`` if
            none is one, or from before cards said so.
        families: model families of the training rows.
        pairs, simulated: training rows, and how many of them no device measured.
        noise_floor_pct: of repeats; ``None`` without repeats.
        decision: the gate's.
        held_out: metrics on held-out rows by model, baselines beside.
        seed: of the training.
        curve: held-out errors against the number of measured pairs.
        origins: model families of the training rows of each device, by the digest of its key, of which several share a name; empty from
            before cards said so.
        facts: the devices as the features saw them: with the rates that all operators of the training reached where a device states none;
            empty from before cards said so.
    """

    devices: tuple[str, ...]
    kinds: tuple[str, ...]
    families: tuple[str, ...]
    pairs: int
    simulated: int
    noise_floor_pct: float | None
    decision: GateDecision
    held_out: Mapping[str, Metrics]
    seed: int
    curve: tuple[CurvePoint, ...] = ()
    engine: Engine | None = None
    origins: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    facts: tuple[DeviceFacts, ...] = ()

    def markdown(self) -> str:
        """The card as a page of text."""
        simulated = f"\n**{self.simulated} of {self.pairs} rows are simulated, not measured.**\n" if self.simulated else ""
        floor = "unknown (no repeats)" if self.noise_floor_pct is None else f"{self.noise_floor_pct:.1f} %"
        rows = [f"| {name} | {_cells(metrics)} |" for name, metrics in self.held_out.items()]
        table = [
            f"Errors on rows held out by {self.decision.folds} (percent; contended: slowdown above 1.1):",
            "",
            "| model | MAPE | contended median APE | contended Spearman | makespan MAPE | 90 % interval holds |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
        return "\n".join(
            [
                f"# Cost model: {self.decision.chosen}",
                simulated,
                f"- devices: {', '.join(self.devices)}{f', lanes: {self.engine}' if self.engine else ''}",
                f"- model families: {', '.join(self.families)}",
                f"- pairs: {self.pairs}; noise floor of repeats: {floor}; seed {self.seed}",
                f"- chosen because: {self.decision.reason}",
                "",
                *(table if rows else ["Nothing was held out, so nothing is known of its errors."]),
                "",
            ]
        )


class TrainedModel:
    """Answers with the chosen model and its intervals; kinds of device it has not seen are answered by the analytic prior, and said so."""

    def __init__(self, inner: PairModel, intervals: Conformal | None, card: Card) -> None:
        self.inner = inner
        self.intervals = intervals
        self.card = card
        self._warned = False

    @property
    def name(self) -> str:
        """The chosen model's name."""
        return self.inner.name

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Not possible: intervals and gate belong to the data it was trained on; see ``train``.

        Raises:
            UsageError: always.
        """
        raise UsageError("a trained model is not fitted in place; use 'autosched train DIR --from MODEL'")

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair; without intervals for kinds of device that were not in the training data."""
        known = np.asarray([device.kind in self.card.kinds for device in query.devices])[query.kernel_device[query.first]]
        if known.all():
            return self._answer(query)
        if not self._warned:
            self._warned = True
            kinds = sorted({device.kind for device in query.devices} - set(self.card.kinds))
            logger.warning(
                "the cost model was trained on %s, not on %s: the analytic prior answers there",
                ", ".join(self.card.kinds),
                ", ".join(kinds),
            )
        prior = AnalyticModel().predict(query)
        if not known.any():
            return prior
        rows = np.flatnonzero(known)
        learned = self._answer(take(query, rows))
        merged = take_prediction(prior, np.arange(len(query)))
        for item in fields(Prediction):
            getattr(merged, item.name)[rows] = getattr(learned, item.name)
        return merged

    def as_trained(self, query: PairQuery) -> PairQuery:
        """The same pairs with the peaks that a device had in training, where those observed among the kernels of ``query`` are lower.

        One graph seldom reaches what all of them together did; its operators would look greedier than equal ones did in training.
        """
        known = self.card.facts
        return replace(query, devices=tuple(device if device in known else reduce(_highest, known, device) for device in query.devices))

    def save(self, directory: Path) -> None:
        """See ``persist.save_model``, which adds the manifest.

        Raises:
            UsageError: always.
        """
        raise UsageError("a trained model cannot be saved without its manifest; use persist.save_model")

    @classmethod
    def load(cls, directory: Path) -> TrainedModel:
        """See ``persist.load_model``.

        Raises:
            UsageError: always.
        """
        raise UsageError("a trained model cannot be loaded without its manifest; use persist.load_model")

    def _answer(self, query: PairQuery) -> Prediction:
        prediction = self.inner.predict(self.as_trained(query))
        return self.intervals.apply(prediction) if self.intervals is not None else prediction


def _highest(device: DeviceFacts, known: DeviceFacts) -> DeviceFacts:
    """``device`` with the higher of both peaks, if it is the same device."""
    gflops = max(device.peak_gflops, known.peak_gflops)
    bandwidth = max(device.bandwidth_gb_s, known.bandwidth_gb_s)
    found = replace(device, peak_gflops=gflops, bandwidth_gb_s=bandwidth)
    return found if found == replace(known, peak_gflops=gflops, bandwidth_gb_s=bandwidth) else device


def _cells(metrics: Metrics) -> str:
    values = (
        metrics.mape_pct,
        metrics.contended_median_ape_pct,
        metrics.contended_spearman,
        metrics.makespan_mape_pct,
        metrics.coverage_pct,
    )
    return " | ".join("-" if value is None else f"{value:.2f}" if abs(value) <= 1 else f"{value:.1f}" for value in values)
