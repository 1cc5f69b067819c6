"""What a job is asked, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autosched.capture.export import Captured
from autosched.core.records import ScheduleRecord
from autosched.core.report import TuneReport
from autosched.core.schedule import Schedule
from autosched.core.variants import Lowering
from autosched.device.base import Device
from autosched.device.compiled_baseline import ModelSource
from autosched.pipeline.budget import Budget
from autosched.pipeline.left_out import LeftOut


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Args:
        lowering: what an operator is.
        strategies: names to try; ``None`` for every one that suits an unattended run.
        refine: whether to spend the rest of the budget on the device loop, the strategy ``tuned``.
        compiled: whether to time ``torch.compile`` as well.
        fresh: whether to forget what earlier runs measured.
        source: where another process can build the same model; without it, that process gets the exported program.
        complete: whether every proposal is measured, whatever it takes: for a table of all of them.
        cost_model: a folder of ``autosched train``; ``None`` for the one of this machine, or one that ships for its device.
    """

    device: str
    effort: str
    budget: Budget
    seed: int
    lowering: Lowering
    fresh: bool
    strategies: tuple[str, ...] | None
    refine: bool
    compiled: bool
    name: str
    dtype: str | None = None
    source: ModelSource | None = None
    cost_model: Path | None = None
    complete: bool = False


@dataclass(frozen=True)
class Outcome:
    """Everything a job leaves behind. ``planned_us`` are starts and ends, ``solo_us`` times alone, by operator; ``left_out``: for want of
    time."""

    report: TuneReport
    captured: Captured
    schedule: Schedule
    device: Device
    trace: ScheduleRecord | None
    planned_us: tuple[tuple[float, ...], tuple[float, ...]]
    solo_us: tuple[float, ...]
    left_out: tuple[LeftOut, ...] = ()
