"""What a cost model is: the protocol, what it is asked, what it answers, and the registry of its kinds.

A pair is ordered: ``first`` is started first. A slowdown is a kernel's time beside the other over its time alone; 1.0 is
undisturbed, and :data:`core.records.MAX_SLOWDOWN` stands for "waited until the other was done".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import UsageError
from autosched.core.records import MAX_SLOWDOWN
from autosched.core.registry import Registry
from autosched.datasets.facts import DeviceFacts, KernelFacts

Indices: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairQuery:
    """Ordered pairs to predict.

    Args:
        kernels: the distinct kernels, each with its solo time.
        devices: the distinct devices.
        kernel_device: int64 ``[n_kernels]``, on which device each kernel was timed.
        first, last: int64 ``[n_pairs]``, kernel indices; both of a pair on one device.
    """

    kernels: tuple[KernelFacts, ...]
    devices: tuple[DeviceFacts, ...]
    kernel_device: Indices
    first: Indices
    last: Indices

    def __post_init__(self) -> None:
        if len(self.kernel_device) != len(self.kernels):
            raise UsageError(f"kernel_device has {len(self.kernel_device)} entries for {len(self.kernels)} kernels; expected one each")
        if len(self.first) != len(self.last):
            raise UsageError(f"first has {len(self.first)} entries and last {len(self.last)}; expected equal lengths")
        for name in ("first", "last"):
            indices: Indices = getattr(self, name)
            if len(indices) and not (indices.min() >= 0 and indices.max() < len(self.kernels)):
                raise UsageError(f"{name} names kernels outside 0 to {len(self.kernels) - 1}; expected places in kernels")
        if len(self.first) and (self.kernel_device[self.first] != self.kernel_device[self.last]).any():
            raise UsageError("a pair names kernels of two devices; expected both timed on one device")

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Answers for ``n_pairs`` pairs, all float64.

    Args:
        slowdown_first, slowdown_last: ``[n_pairs]``, at least 1.
        makespan_ratio: ``[n_pairs]``, time of both over the sum of their times alone, each run once.
        low, high: ``[n_pairs, 2]``, the 90 % interval of (first, last); equal to the slowdowns where none is calibrated.
    """

    slowdown_first: Floats
    slowdown_last: Floats
    makespan_ratio: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class PairLabels:
    """What was measured for the pairs of a query: float64 ``[n_pairs]`` each, except ``family``.

    Args:
        slowdown_first, slowdown_last: as in ``Prediction``.
        makespan_ratio: of the run as it was measured, in which each kernel may have been repeated.
        family: the model family each pair was taken from; folds never split one.
        weight: trust in the row, 1.0 for an undisturbed one.
        work_first_us, work_last_us: time alone of all repetitions in the run that ``makespan_ratio`` is of, microseconds.
    """

    slowdown_first: Floats
    slowdown_last: Floats
    makespan_ratio: Floats
    family: tuple[str, ...]
    weight: Floats
    work_first_us: Floats
    work_last_us: Floats


class PairModel(Protocol):
    """Predicts how much two kernels slow each other down.

    Contract. ``fit`` may be called again and then forgets what it knew, unless the class documents otherwise. ``predict`` never
    returns a value below 1 or a non-finite one, answers every pair of the query, in order, and does not change the model.
    ``save`` writes only into the directory given; ``load`` of what ``save`` wrote predicts the same to the last bit. An
    unfitted model that needs data raises ``UsageError`` from ``predict`` and ``save``.
    """

    @property
    def name(self) -> str:
        """Its name in :data:`COST_MODELS`."""

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Learn from measured pairs.

        Raises:
            UsageError: no rows, or labels that are not finite and positive.
        """

    def predict(self, query: PairQuery) -> Prediction:
        """Predict every pair of ``query``."""

    def save(self, directory: Path) -> None:
        """Write the model's files into an existing directory."""

    @classmethod
    def load(cls, directory: Path) -> PairModel:
        """Read what :meth:`save` wrote; the caller has checked every file's hash before.

        Raises:
            ArtifactCorrupt: a file that is missing or not what the model writes.
            IncompatibleArtifact: another feature set or a newer layout.
        """


COST_MODELS: Registry[type[PairModel]] = Registry("cost model", "autosched.cost_models")
COST_MODELS.add("analytic", "autosched.costmodel.analytic:AnalyticModel")
COST_MODELS.add("graybox", "autosched.costmodel.graybox:GrayboxModel")
COST_MODELS.add("xgboost", "autosched.costmodel.xgboost_model:XgboostModel")
COST_MODELS.add("torch", "autosched.costmodel.torch_model:TorchModel")
COST_MODELS.add("stacked", "autosched.costmodel.stacked:StackedModel")


def not_fitted(model: str, cannot: str) -> UsageError:
    """The error of a model that has learned nothing yet and is asked to ``cannot``."""
    return UsageError(f"the {model} model cannot {cannot} before it was fitted; call fit, or use the analytic model")


def check_labels(query: PairQuery, labels: PairLabels) -> None:
    """Refuse what no model can learn from.

    Raises:
        UsageError: no rows, unequal lengths, or a label that is not finite and above zero.
    """
    if len(query) == 0:
        raise UsageError("no measured pairs to learn from; expected at least one: run 'autosched collect' first, or use the analytic model")
    for name in ("slowdown_first", "slowdown_last", "makespan_ratio", "weight", "work_first_us", "work_last_us"):
        values: Floats = getattr(labels, name)
        if len(values) != len(query):
            raise UsageError(f"{name} has {len(values)} rows for {len(query)} pairs; expected as many")
        if not np.isfinite(values).all() or (values <= 0).any():
            bad = int((~np.isfinite(values) | (values <= 0)).sum())
            raise UsageError(f"{name} holds {bad} values that are not finite and positive; run the audit and drop those rows")
    if len(labels.family) != len(query):
        raise UsageError(f"family has {len(labels.family)} rows for {len(query)} pairs; expected as many")


def makespan_ratio(solo_first_us: Floats, solo_last_us: Floats, slowdown_first: Floats, slowdown_last: Floats) -> Floats:
    """Time of both together over the sum of their times alone, both started at once, each run once: float64 ``[n]``.

    The one that ends first runs at its slowed rate throughout; the rest of the other then runs undisturbed. This is the
    definition of the labels read backwards, so labels and ratio agree.
    """
    first_done = solo_first_us * slowdown_first
    last_done = solo_last_us * slowdown_last
    first_ends_first = first_done <= last_done
    early = np.where(first_ends_first, first_done, last_done)
    rest = np.where(first_ends_first, solo_last_us - early / slowdown_last, solo_first_us - early / slowdown_first)
    together: Floats = early + np.maximum(0.0, rest)
    ratio: Floats = together / (solo_first_us + solo_last_us)
    return ratio


def point_prediction(query: PairQuery, slowdown_first: Floats, slowdown_last: Floats) -> Prediction:
    """Slowdowns of every pair (``[n_pairs]`` each) clipped to the legal range, with the makespan ratio and an interval of no width."""
    solo = np.asarray([kernel.solo_us for kernel in query.kernels], dtype=np.float64)
    first = np.clip(slowdown_first, 1.0, MAX_SLOWDOWN)
    last = np.clip(slowdown_last, 1.0, MAX_SLOWDOWN)
    ratio = makespan_ratio(solo[query.first], solo[query.last], first, last)
    both = np.stack([first, last], axis=1) if len(query) else np.empty((0, 2))
    return Prediction(first, last, ratio, both, both.copy())
