"""How coarse operators are: the lowering a user asks for, and the job that tries two of them and keeps the better."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autosched.capture.export import Captured, capture
from autosched.core.progress import Progress
from autosched.core.records import Failure
from autosched.core.variants import Lowering, lowering_named
from autosched.device.timing import Ratio, noise_floor_pct, paired_ratio
from autosched.runtime.region_compile import missing_compiler

if TYPE_CHECKING:
    from autosched.pipeline.options import Options, Outcome

AUTO = "auto"
"""Tune the device's default lowering and the other of ``rewritten`` and ``fused``, and keep the better."""

_TIMEOUT_S = 120.0
_LEAST_ROUNDS = 15


def default_lowering(kind: str) -> Lowering:
    """What a device gets unless asked otherwise: on a GPU compiled regions, where Triton is there to compile them."""
    return Lowering.FUSED if kind == "cuda" and not missing_compiler(kind) else Lowering.REWRITTEN


def requested_lowerings(asked: str | None, *, rewrite: bool, kind: str) -> tuple[Lowering, ...]:
    """The lowerings to tune, the default first.

    Args:
        asked: a lowering's name, ``auto``, or ``None``.
        rewrite: the older way to ask: ``False`` is ``aten``.
        kind: of the device, ``cpu`` or ``cuda``.

    Raises:
        UsageError: for a name that there is not.
    """
    if asked is None:
        return (default_lowering(kind),) if rewrite else (Lowering.ATEN,)
    if asked != AUTO:
        return (lowering_named(asked),)
    first = default_lowering(kind)
    return (first, Lowering.REWRITTEN if first is Lowering.FUSED else Lowering.FUSED)


def capture_as(
    lowering: Lowering, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, kind: str
) -> tuple[Captured, str]:
    """Capture for a device of ``kind``; and why in another lowering than asked, empty if not.

    Raises:
        UnsupportedGraph: if the model cannot be captured.
    """
    if lowering is not Lowering.INDUCTOR:
        return capture(model, args, kwargs, target=kind, lowering=lowering), ""
    from autosched.pipeline.inductor_capture import capture_inductor
    from autosched.runtime.inductor_bind import Refused

    found = capture_inductor(model, args, kwargs, target=kind)
    if not isinstance(found, Refused):
        return found, ""
    return capture(model, args, kwargs, target=kind, lowering=Lowering.FUSED), f"lowering fused instead of inductor: {found.reason}"


def run_lowerings(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    lowerings: Sequence[Lowering],
    progress: Progress,
) -> Outcome:
    """Run a job for each lowering, each with an equal share of the budget, and keep the winner of interleaved rounds against each other.

    The first one is kept unless another is faster beyond noise. The schedules take turns in two processes, one waiting asleep while
    the other runs.

    Raises:
        AutoschedError: of the first job; another that fails is only noted.
    """
    from autosched.core.errors import AutoschedError
    from autosched.pipeline.job import Job

    budget = dataclasses.replace(options.budget, total_s=options.budget.total_s / len(lowerings))
    kept: Outcome | None = None
    for lowering in lowerings:
        # A rival's time is the same in every job: one measurement of it is enough.
        compiled = options.compiled and kept is None
        asked = dataclasses.replace(options, lowering=lowering, budget=budget, compiled=compiled)
        try:
            outcome = Job(model, args, kwargs, asked, progress).run()
        except AutoschedError as error:
            if kept is None:
                raise
            kept = _noted(kept, f"lowering {lowering} failed: {error}")
            continue
        kept = outcome if kept is None else _better(kept, outcome, options, progress)
    assert kept is not None
    return kept


def _better(first: Outcome, second: Outcome, options: Options, progress: Progress) -> Outcome:
    names = first.report.lowering, second.report.lowering
    progress.stage(f"{names[0]} against {names[1]}", 0.1 * options.budget.total_s)
    fought = _fight(first, second, rounds=2 * options.budget.final_rounds, seconds=0.1 * options.budget.total_s)
    if isinstance(fought, Failure):
        return _noted(first, f"lowering {names[1]} could not be compared ({fought.kind}: {fought.detail}); {names[0]} is kept")
    rng = np.random.default_rng(options.seed)
    base, again, rival = fought
    ratio, noise = paired_ratio(rival, base, rng), noise_floor_pct(base, again, rng)
    wins = ratio.ci_high < 1.0 and 100.0 * (1.0 - ratio.ratio) > noise
    kept, other = (second, names[0]) if wins else (first, names[1])
    return _noted(kept, _sentence(kept.report.lowering, other, ratio, names, noise))


def _fight(first: Outcome, second: Outcome, *, rounds: int, seconds: float) -> tuple[list[float], list[float], list[float]] | Failure:
    """Times of the first schedule, of the first again, and of the second, round by round, in microseconds."""
    sessions = [
        outcome.device.open(outcome.captured.program, outcome.captured.constants, timeout_s=_TIMEOUT_S) for outcome in (first, second)
    ]
    columns: tuple[list[float], list[float], list[float]] = ([], [], [])
    turns = ((sessions[0], first), (sessions[0], first), (sessions[1], second))
    try:
        for session, outcome in turns[1:]:
            warm = session.paired([outcome.schedule], rounds=2)
            if isinstance(warm, Failure):
                return warm
        deadline = time.monotonic() + seconds
        while len(columns[0]) < rounds and (len(columns[0]) < _LEAST_ROUNDS or time.monotonic() < deadline):
            for column, (session, outcome) in zip(columns, turns, strict=True):
                answer = session.paired([outcome.schedule], rounds=1)
                if isinstance(answer, Failure):
                    return answer
                column.extend(answer[0])
    finally:
        for session in sessions:
            session.close()
    return columns


def _sentence(kept: str, other: str, ratio: Ratio, names: tuple[str, str], noise: float) -> str:
    interval = f"95 % interval {ratio.ci_low:.3f} to {ratio.ci_high:.3f}, noise {noise:.1f} %"
    return f"lowering {kept} kept, not {other}: {names[1]} takes {ratio.ratio:.3f} times as long as {names[0]} ({interval})"


def _noted(outcome: Outcome, note: str) -> Outcome:
    report = dataclasses.replace(outcome.report, notes=(*outcome.report.notes, note))
    return dataclasses.replace(outcome, report=report)
