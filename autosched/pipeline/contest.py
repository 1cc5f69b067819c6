"""The job that chooses how coarse operators are: prepare every lowering, time each in order, tune those that can win, keep one.

What may be spent. ``Budget.total_s`` counts from when the first lowering is ready and covers all of this. ``Budget.compile_share`` of it,
or what ``reserve`` leaves of a slow model's, is for the lowerings that a compiler has a part in: half of that for the first of them, what
is left then for the other; all of it for the first where half is known to be too little for the other. A region of ``fused`` that is not
begun in time stays calls; Inductor's code for the whole model is compiled in processes that are ended when their time is over, and not
begun where it cannot be done in it (see ``attempts``). Nothing is begun with less than ``LEAST_COMPILE_S`` left, and its capture and the
start of its process must fit into the share too.
Where compiled baselines are measured, Inductor's code is made after them, in the mode of the fastest (``adopting`` says when in two); like
the baselines themselves it is not in the budget then, and ``fused`` has the whole share.
Where none of the lowerings answers as the model does, its own calls (``aten``) are tuned.
Everything after that goes to the contenders (see ``qualification``), normally one; where compiling took longer than its share, the job
still has a tenth of its budget for them, and a quarter if it ends within a tenth after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autosched.core.errors import AutoschedError, NoFeasibleCandidate
from autosched.core.program import Program
from autosched.core.progress import Progress
from autosched.core.report import LoweringOutcome, LoweringRow, TuneReport
from autosched.core.variants import Lowering
from autosched.device.base import Device
from autosched.pipeline.adopting import fastest_mode
from autosched.pipeline.baselines import Rivals
from autosched.pipeline.granularity import COMPILED, Considered, share_of_products
from autosched.pipeline.job import Job
from autosched.pipeline.left_out import LeftOut, after
from autosched.pipeline.lowering_duel import DUEL_SHARE, duels
from autosched.pipeline.measuring import Ledger, solo_time
from autosched.pipeline.memory import forget_measurements, open_journal
from autosched.pipeline.options import Options, Outcome
from autosched.pipeline.original import Original
from autosched.pipeline.preparing import NotHad, Prepared, compiling_needs_s, prepare
from autosched.pipeline.qualification import Qualified, contenders, enter, qualify, why_dropped
from autosched.pipeline.readiness import ready_searches
from autosched.pipeline.references import Yardstick
from autosched.pipeline.replaying import open_device
from autosched.pipeline.request import require_strategies
from autosched.pipeline.reserve import reserve_s
from autosched.pipeline.scope import scope_of
from autosched.runtime.cuda import blas_lt

LEAST_COMPILE_S = 5.0
"""Starting a compiler takes about this long: with less left, nothing comes of it."""

LEAST_REGIONS_S = 10.0
"""The same of the processes that compile regions on a GPU: each has a context there. On an H200 with 16 cores none had made a region after
9.0 s, in two jobs, and while they went, what came next took some 5 s longer than elsewhere (``experiments/results/h200/suite``)."""

# Shares of the budget: rounds of all sequential orders; what tuning should get, and has at least; when all is over at the latest.
_QUALIFYING = 0.05
_WISHED_TUNING = 0.25
_LEAST_TUNING = 0.1
_LATEST = 1.1
# A second lowering is tuned only if each then has this share: two half-tuned ones tell less than one tuned well.
_WORTHWHILE = 0.2
# One more lowering to compile is not worth the last layer of a convolutional net.
_MANY_PRODUCTS = 0.1


@dataclass
class _Course:
    """What happened so far; ``rows`` by lowering, in the order considered."""

    rows: dict[str, LoweringRow]
    ledger: Ledger = field(default_factory=Ledger)
    left_out: list[LeftOut] = field(default_factory=list)
    errors: list[AutoschedError] = field(default_factory=list)

    def note(self, lowering: str, **changes: Any) -> None:
        """Change the row of ``lowering``."""
        self.rows[lowering] = dataclasses.replace(self.rows[lowering], **changes)

    def lacked(self, what: str, more_s: float, *, told: bool = True) -> None:
        """``what`` was left out, for which the budget is short of ``more_s`` seconds; ``told`` as in ``LeftOut``."""
        self.left_out = [*after(self.left_out, [LeftOut(what, max(more_s, 0.0), told)])]

    def no_code(self, lowering: str, found: NotHad) -> None:
        """``lowering`` is out for want of time, or because its code cannot be used."""
        self.note(lowering, outcome=LoweringOutcome.FAILED if found.needs_s is None else LoweringOutcome.SKIPPED, why=found.why)

    def failed(self, lowering: str, error: AutoschedError) -> None:
        """``lowering`` is out."""
        self.errors.append(error)
        self.note(lowering, outcome=LoweringOutcome.FAILED, why=str(error))


def run_contest(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    choice: Considered,
    progress: Progress,
) -> Outcome:
    """Try the lowerings of ``choice``, and return the outcome of the best one's job; its report says what became of each.

    Raises:
        AutoschedError: as ``Job.run``, if no lowering comes through; the error of the first that failed.
    """
    require_strategies(options.strategies)
    device = open_device(options.device)
    if options.fresh:
        # Once, at the start: what qualification measures is for the jobs after it.
        forget_measurements(device)
    course = _Course({name: LoweringRow(name, LoweringOutcome.SKIPPED) for name in choice.lowerings})
    rivals = Rivals(model, args, kwargs, device, compiled=options.compiled, source=options.source, progress=progress)
    with rivals, contextlib.ExitStack() as stack:
        after_rivals = options.compiled and Lowering.INDUCTOR in choice.lowerings
        turns = [lowering for lowering in choice.lowerings if not (after_rivals and lowering is Lowering.INDUCTOR)]
        original = Original(model, args, kwargs)
        ready, begin = _prepared(stack, original, options, turns, device, progress, course)
        if not ready and after_rivals:
            after_rivals = False
            ready, begin = _prepared(stack, original, options, (Lowering.INDUCTOR,), device, progress, course)
        if not ready:
            raise course.errors[0]
        yardstick = Yardstick(model, args, kwargs, options.seed)
        if after_rivals:
            since = time.monotonic()
            ready += _adopted(stack, ready, rivals, yardstick, (original, device, progress), course, options)
            # Neither the compilers of baselines nor choosing kernels as they do is in the budget.
            begin += time.monotonic() - since
        field_of = _qualified(ready, options, begin, device, progress, course) if len(ready) > 1 else []
        queue, able = _queue(ready, field_of)
        if able > 1 and (left_s := _spare_s(options, begin)) < able * _WORTHWHILE * options.budget.total_s:
            _drop(queue[1:able], left_s, options, begin, course)
            able = 1

        def job_on(prepared: Prepared, left_s: float) -> Job:
            return Job(model, args, kwargs, _asked(options, prepared, left_s), progress, prepared, rivals, yardstick)

        outcomes: list[Outcome] = []
        for place, prepared in enumerate(queue):
            # Beyond those that can win only while nothing has come through.
            if place >= able and outcomes:
                break
            left_s = _left_s(options, begin, others=max(able - 1 - place, 0), tuned=bool(outcomes))
            outcomes += _tuned(job_on(prepared, left_s), course)
        if not outcomes:
            for plain in _last_resort(stack, original, device, progress, course):
                queue.append(plain)
                outcomes += _tuned(job_on(plain, _left_s(options, begin, others=0, tuned=False)), course)
        if not outcomes:
            raise course.errors[0]
        kept, why = duels(outcomes, queue, options, course.ledger, progress)
        for lowering, reason in why.items():
            course.note(lowering, why=reason)
    return _reported(kept, outcomes, (*course.rows.values(), *choice.skipped), course, time.monotonic() - begin)


def _prepared(
    stack: contextlib.ExitStack,
    original: Original,
    options: Options,
    lowerings: Sequence[Lowering],
    device: Device,
    progress: Progress,
    course: _Course,
) -> tuple[list[Prepared], float]:
    """The lowerings that can be had, and when the first of them was ready (``time.monotonic``)."""
    share_s = options.budget.compile_share * options.budget.total_s
    ready: list[Prepared] = []
    begin = time.monotonic()
    for place, lowering in enumerate(lowerings):
        compiled = lowering in COMPILED
        left_s = share_s - (time.monotonic() - begin) if ready else share_s
        limit_s = left_s / (1 + _fitting(lowerings[place + 1 :], left_s, original, device) if compiled else 1)
        if ready:
            # Its capture and the start of its process, which no limit ends, are within the share too: about what they took the first one,
            # without its regions. The model is exported but once.
            limit_s = min(limit_s, left_s - max(ready[0].prepared_s - ready[0].regions_s - original.export_s, 0.0))
        # The first one is what there is without a choice: it is had whatever it takes, but for regions beyond their time.
        if not ready and compiled and limit_s < LEAST_REGIONS_S:
            limit_s = 0.0
        if ready and compiled and limit_s < LEAST_COMPILE_S:
            why = f"{max(limit_s, 0.0):.1f} s of the budget were left for compiling it; at least {LEAST_COMPILE_S:.0f} s are needed"
            course.note(lowering, why=why)
            course.lacked(f"the lowering {lowering}", _lacking_s(options, LEAST_COMPILE_S - limit_s))
            continue
        try:
            found = prepare(lowering, original, device, progress, limit_s=max(limit_s, 0.0) if compiled else None)
        except AutoschedError as error:
            course.failed(lowering, error)
            continue
        if isinstance(found, NotHad):
            course.no_code(lowering, found)
            if found.needs_s is not None:
                course.lacked(f"the lowering {lowering}", _lacking_s(options, found.needs_s - limit_s))
            continue
        stack.callback(found.session.close)
        course.note(lowering, operators=len(found.captured.program.graph), prepared_s=found.prepared_s)
        for item in found.left_out:
            course.lacked(item.what, _lacking_s(options, item.more_s), told=item.told)
        if not ready:
            ready_searches(progress)
            begin = time.monotonic()
            progress.stage("other lowerings", options.budget.total_s)
            share_s = min(share_s, options.budget.total_s - reserve_s(found, options.budget.total_s - share_s))
        ready.append(found)
    return ready, begin


def _adopted(
    stack: contextlib.ExitStack,
    ready: Sequence[Prepared],
    rivals: Rivals,
    yardstick: Yardstick,
    call: tuple[Original, Device, Progress],
    course: _Course,
    options: Options,
) -> list[Prepared]:
    """Inductor's code in the modes that are to be taken apart, or in its defaults where none of them can be had; nothing if those neither.

    What no baseline has compiled gets the compilers' share of the budget.
    """
    captured = ready[0].captured
    compiled = rivals.ready(captured, yardstick.of(captured.program).answer)
    kind = ready[0].device.key.kind
    fastest = fastest_mode(compiled, guarded=kind == "cpu", products=_has_other_products(captured.program, kind))
    had: list[Prepared] = []
    for lowering in dict.fromkeys((*fastest.lowerings, Lowering.INDUCTOR)):
        if had and lowering not in fastest.lowerings:
            course.note(lowering.value, outcome=LoweringOutcome.DROPPED, why=fastest.why)
            break
        course.rows.setdefault(lowering.value, LoweringRow(lowering.value, LoweringOutcome.SKIPPED))
        # Compiling what a baseline has compiled before takes no longer than that did.
        known = fastest.measured and lowering in fastest.lowerings
        with rivals.compile_time.turn() as most_s:
            limit_s = most_s if known else min(most_s, options.budget.compile_share * options.budget.total_s)
            try:
                found = prepare(lowering, *call, limit_s=limit_s)
            except AutoschedError as error:
                course.failed(lowering.value, error)
                continue
        if isinstance(found, NotHad):
            course.no_code(lowering, found)
            if found.needs_s is not None and not known:
                course.lacked(f"the lowering {lowering}", _lacking_s(options, found.needs_s - limit_s))
            continue
        stack.callback(found.session.close)
        course.note(lowering.value, operators=len(found.captured.program.graph), prepared_s=found.prepared_s)
        had.append(found)
    return had


def _has_other_products(program: Program, kind: str) -> bool:
    """Whether a device of ``kind`` can run many of the model's matrix products by another library than ``torch.compile`` does."""
    return kind == "cuda" and blas_lt.supported() and share_of_products(program) >= _MANY_PRODUCTS


def _tuned(job: Job, course: _Course) -> list[Outcome]:
    """The outcome of ``job``, noted; nothing if it failed."""
    try:
        outcome = job.run()
    except AutoschedError as error:
        course.failed(job.lowering, error)
        return []
    course.note(job.lowering, outcome=LoweringOutcome.TUNED, why="")
    return [outcome]


def _last_resort(stack: contextlib.ExitStack, original: Original, device: Device, progress: Progress, course: _Course) -> list[Prepared]:
    """The model's own calls, where every other lowering answers otherwise: rounding may be enough, if the model chooses by it."""
    if not any(isinstance(error, NoFeasibleCandidate) for error in course.errors):
        return []
    course.rows[Lowering.ATEN] = LoweringRow(Lowering.ATEN, LoweringOutcome.SKIPPED)
    try:
        found = prepare(Lowering.ATEN, original, device, progress)
    except AutoschedError as error:
        course.failed(Lowering.ATEN, error)
        return []
    # Only what a compiler makes is ever not had.
    assert isinstance(found, Prepared)
    stack.callback(found.session.close)
    course.note(Lowering.ATEN, operators=len(found.captured.program.graph), prepared_s=found.prepared_s)
    return [found]


def _fitting(lowerings: Sequence[Lowering], left_s: float, original: Original, device: Device) -> int:
    """How many of ``lowerings`` a compiler has a part in, and can do it in an equal share of ``left_s``: others get no time set aside."""
    compiled = [item for item in lowerings if item in COMPILED]
    each_s = left_s / (1 + len(compiled))
    if not original.export_s:
        return len(compiled)
    return sum(compiling_needs_s(item, original, device) <= each_s for item in compiled)


def _lacking_s(options: Options, compile_s: float) -> float:
    """What the budget is short of for so many more seconds of compiling."""
    return compile_s / options.budget.compile_share


def _qualified(
    ready: Sequence[Prepared], options: Options, begin: float, device: Device, progress: Progress, course: _Course
) -> list[Qualified]:
    """The lowerings that could be timed in order, fastest first; their rows filled in, and those dropped that cannot win."""
    progress.stage("operators alone, in every lowering", max(options.budget.total_s - (time.monotonic() - begin), 0.0))
    entrants = []
    total_s = options.budget.total_s
    for place, prepared in enumerate(ready):
        free_s = (1.0 - _WISHED_TUNING - _QUALIFYING) * total_s - (time.monotonic() - begin)
        time_s = solo_time(total_s, free_s / (len(ready) - place), len(ready))
        try:
            with open_journal(scope_of(device, prepared.session.limits), private=False) as journal:
                entrants.append(enter(prepared, journal, options.budget.solo_rounds, course.ledger, time_s))
        except AutoschedError as error:
            course.failed(prepared.lowering, error)
    timed, failed = qualify(entrants, seconds=_QUALIFYING * total_s, seed=options.seed, ledger=course.ledger, progress=progress)
    for entrant, failure in failed:
        course.note(entrant.prepared.lowering, outcome=LoweringOutcome.FAILED, why=f"in order: {failure.kind}: {failure.detail}")
    able = contenders(timed) if timed else []
    for item in timed:
        samples = item.sequential
        course.note(
            item.entrant.prepared.lowering,
            outcome=LoweringOutcome.TUNED if item in able else LoweringOutcome.DROPPED,
            why="" if item in able else why_dropped(item, timed[0]),
            sequential_us=samples.median_us,
            ci_us=(samples.ci_low_us, samples.ci_high_us),
            bound_us=item.bound_us,
        )
    return timed


def _queue(ready: Sequence[Prepared], qualified: Sequence[Qualified]) -> tuple[list[Prepared], int]:
    """What to tune, in that order, and how many of them are to be tuned; the rest stand in for those that fail."""
    if not qualified:
        return list(ready), 1
    able = contenders(qualified)
    rest = [item for item in qualified if item not in able]
    return [dataclasses.replace(item.entrant.prepared, measured=True) for item in (*able, *rest)], len(able)


def _drop(prepared: Sequence[Prepared], left_s: float, options: Options, begin: float, course: _Course) -> None:
    """Leave lowerings untuned that could win, because ``left_s`` seconds are enough for one only."""
    why = f"{max(left_s, 0.0):.0f} s were left for tuning, enough for one lowering"
    # Of what is spent by now nothing becomes more.
    lacks_s = (time.monotonic() - begin) / (1.0 - DUEL_SHARE - (1 + len(prepared)) * _WORTHWHILE) - options.budget.total_s
    for item in prepared:
        course.note(item.lowering, outcome=LoweringOutcome.DROPPED, why=why)
        course.lacked(f"tuning {item.lowering} as well", lacks_s)


def _left_s(options: Options, begin: float, *, others: int, tuned: bool) -> float:
    """What one more job may take: an equal part of what is left, a duel set aside where there will be one.

    Where compiling took longer than its share, tuning has a quarter of the budget as far as the job ends soon after it, and a tenth at
    the least.
    """
    total_s, spent_s = options.budget.total_s, time.monotonic() - begin
    left_s = _spare_s(options, begin) if others or tuned else total_s - spent_s
    least_s = max(_LEAST_TUNING * total_s, min(_WISHED_TUNING * total_s, _LATEST * total_s - spent_s))
    return max(left_s, least_s) / (others + 1)


def _spare_s(options: Options, begin: float) -> float:
    """What is left for tuning with a duel set aside."""
    return (1.0 - DUEL_SHARE) * options.budget.total_s - (time.monotonic() - begin)


def _asked(options: Options, prepared: Prepared, left_s: float) -> Options:
    budget = dataclasses.replace(options.budget, total_s=left_s)
    return dataclasses.replace(options, lowering=Lowering(prepared.lowering), budget=budget)


def _reported(kept: Outcome, outcomes: Sequence[Outcome], rows: Sequence[LoweringRow], course: _Course, took_s: float) -> Outcome:
    """The outcome with what the whole contest found and cost."""
    tuned_us = {outcome.report.lowering: _kept_us(outcome.report) for outcome in outcomes}
    named = tuple(
        dataclasses.replace(
            row,
            tuned_us=tuned_us.get(row.lowering),
            outcome=LoweringOutcome.KEPT if row.lowering == kept.report.lowering else row.outcome,
            why="" if row.lowering == kept.report.lowering else row.why,
        )
        for row in rows
    )
    report = dataclasses.replace(
        kept.report,
        lowerings=named,
        measurements=course.ledger.measurements + sum(outcome.report.measurements for outcome in outcomes),
        failures=course.ledger.failures + sum(outcome.report.failures for outcome in outcomes),
        search_s=took_s,
    )
    return dataclasses.replace(kept, report=report, left_out=after(course.left_out, kept.left_out))


def _kept_us(report: TuneReport) -> float | None:
    return next((row.measured_us for row in report.strategies if row.name == report.chosen), None)
