"""What the stages of one job hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autosched.capture.export import Captured
from autosched.core.graph import OpGraph
from autosched.core.progress import Progress
from autosched.datasets.journal import Scope
from autosched.device.base import Device, Session
from autosched.pipeline.bounds import LowerBounds
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.memory import Measured
from autosched.pipeline.model_choice import ChosenModel
from autosched.pipeline.options import Options
from autosched.pipeline.preparing import Prepared
from autosched.pipeline.proving import Prover
from autosched.pipeline.references import References
from autosched.pipeline.replaying import StoreRecording
from autosched.pipeline.scope import scope_of
from autosched.pipeline.timetable import Timetable
from autosched.pipeline.variants import VariantTimes
from autosched.search.problem import Problem


@dataclass(frozen=True, eq=False)
class Run:
    """A job at work: what was asked, on what, and what it has spent so far.

    Args:
        recording: what the device replays; ``None`` for a real device.
        model: what predicts the pairs that are not measured.
    """

    options: Options
    prepared: Prepared
    recording: StoreRecording | None
    model: ChosenModel
    references: References
    prover: Prover
    ledger: Ledger
    timetable: Timetable
    progress: Progress
    rng: np.random.Generator

    @property
    def device(self) -> Device:
        """What it runs on."""
        return self.prepared.device

    @property
    def scope(self) -> Scope:
        """What its measurements are valid for."""
        return scope_of(self.device, self.session.limits)

    @property
    def captured(self) -> Captured:
        """The model in the lowering that is tuned."""
        return self.prepared.captured

    @property
    def session(self) -> Session:
        """The device, open for it."""
        return self.prepared.session

    @property
    def graph(self) -> OpGraph:
        """Its operators."""
        return self.prepared.captured.program.graph


@dataclass(frozen=True, eq=False)
class Costs:
    """What was measured of the parts of a graph.

    Args:
        problem: what the search reads.
        bounds: no schedule is faster.
        variants: times of the variants of each operator; ``None`` where each has but one.
        measured: what a cost model may learn from; ``None`` where it could not tell what was measured.
    """

    problem: Problem
    bounds: LowerBounds
    variants: VariantTimes | None
    measured: Measured | None
