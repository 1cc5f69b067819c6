"""One tuning job or comparison, from a model to a judged table: capture, measure, search, prove, judge."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosched.capture.export import Captured
from autosched.config import loops_dir, studies_path
from autosched.core.errors import NoFeasibleCandidate
from autosched.core.progress import Progress
from autosched.core.records import Failure
from autosched.core.report import TuneReport
from autosched.core.schedule import Schedule
from autosched.core.variants import Lowering
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Journal, Scope
from autosched.device.base import Comparison, Device, Session
from autosched.pipeline.baselines import Rivals
from autosched.pipeline.bounds import LowerBounds, lower_bounds
from autosched.pipeline.candidates import Candidate, by_key, propose, prove
from autosched.pipeline.collecting import scope_row
from autosched.pipeline.demands import demands
from autosched.pipeline.diary import Diary, question_of
from autosched.pipeline.granularity import REPLAY
from autosched.pipeline.graph_proofs import audit_note, launch_facts, stress_capture
from autosched.pipeline.judge import Duel, External, Judgement, Times, duel, finalists, interleave, judge
from autosched.pipeline.measuring import Ledger, cost_table, measure_pairs, measure_solo
from autosched.pipeline.memory import (
    ChosenModel,
    Measured,
    choose_model,
    open_journal,
    prediction_note,
    remember_runs,
    timed_schedules,
)
from autosched.pipeline.options import Options, Outcome
from autosched.pipeline.preparing import Prepared, prepare
from autosched.pipeline.references import References, Yardstick
from autosched.pipeline.refine import TUNED, refine
from autosched.pipeline.replaying import StoreRecording, open_device, recording_of, replayed_report
from autosched.pipeline.rows import strategy_rows
from autosched.pipeline.variants import VariantTimes, measure_variants
from autosched.search.problem import Problem
from autosched.search.strategy import STRATEGIES, SearchContext

_log = logging.getLogger(__name__)

_SEQUENTIAL = ("sequential", "sequential_wide")
# Exact searches explode, and optuna's own overhead dwarfs a quick budget: they run when asked for by name.
_ON_REQUEST = frozenset({"exact", "brute_force", "cp_sat", "optuna"})


class Job:
    """Runs once. Its stages are methods in the order they happen.

    Args:
        prepared: the lowering to tune, where it has been captured and its operators measured before; whoever gives it closes its session.
        rivals: baselines that other jobs on this model have too; whoever gives them closes them.
        yardstick: the model's own answers, for all its jobs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: Options,
        progress: Progress,
        prepared: Prepared | None = None,
        rivals: Rivals | None = None,
        yardstick: Yardstick | None = None,
    ) -> None:
        self._model = model
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._options = options
        self._progress = progress
        self._ledger = Ledger()
        self._rng = np.random.default_rng(options.seed)
        self._bounds: LowerBounds | None = None
        self._recording: StoreRecording | None = None
        self._chosen = ChosenModel(None, "analytic", "")
        self._measured: Measured | None = None
        self._variants: VariantTimes | None = None
        self._given = prepared
        self._rivals = rivals
        self._yardstick = yardstick or Yardstick(model, args, kwargs, options.seed)

    def run(self) -> Outcome:
        """Do all of it.

        Raises:
            UnsupportedGraph, DeviceMissing, WorkerLost: see their classes.
            NoFeasibleCandidate: if not even a sequential schedule runs.
        """
        options = self._options
        # A missing device and a misspelt strategy are said before a minute is spent on capture.
        device = self._given.device if self._given is not None else open_device(options.device)
        self._recording = recording_of(device)
        self._chosen = choose_model(device.key, options.cost_model)
        require_strategies(options)
        with contextlib.ExitStack() as stack:
            prepared = self._given
            if prepared is None:
                prepared = self._prepared(device)
                stack.callback(prepared.session.close)
            rivals = self._rivals
            if rivals is None:
                rivals = self._own_rivals(device)
                stack.callback(rivals.close)
            self._ledger.notes += prepared.notes
            return self._tuned(prepared, rivals)

    def _prepared(self, device: Device) -> Prepared:
        lowering, call = self._options.lowering, (self._model, self._args, self._kwargs, device, self._progress)
        found = prepare(lowering, *call)
        if isinstance(found, str):
            self._ledger.notes.append(f"lowering fused instead of inductor: {found}")
            found = prepare(Lowering.FUSED, *call)
            # Only Inductor's own code is ever refused.
            assert not isinstance(found, str)
        return found

    def _own_rivals(self, device: Device) -> Rivals:
        kind = device.key.kind if self._recording is None else REPLAY
        options = self._options
        return Rivals(
            self._model, self._args, self._kwargs, kind, compiled=options.compiled, source=options.source, progress=self._progress
        )

    def _tuned(self, prepared: Prepared, rivals: Rivals) -> Outcome:
        options, device, captured, session = self._options, prepared.device, prepared.captured, prepared.session
        self._progress.stage("reference outputs")
        references = self._yardstick.of(captured.program)
        begin = time.monotonic()
        deadline = begin + options.budget.total_s
        self._progress.stage("operators alone", options.budget.total_s)
        private = self._recording is not None
        # Whoever gives what is prepared has made the journal as fresh as was asked.
        fresh = options.fresh and self._given is None
        with open_journal(device, fresh=fresh, private=private) as journal, self._diary(device, captured) as diary:
            problem = self._measure(prepared, journal)
            candidates, failures = self._propose(problem, session, deadline)
            proofs = self._prove(session, captured, candidates, references, failures)
            if options.refine:
                candidates += self._refine(session, problem, candidates, proofs, references, deadline, diary)
            outcome = self._judge(session, device, captured, problem, candidates, proofs, failures, references, rivals, begin, deadline)
            diary.finish()
            return outcome

    def _diary(self, device: Device, captured: Captured) -> Diary:
        options = self._options
        asked = question_of(
            captured.program.graph.hash, Scope(device.key, device.software).digest, options.seed, options.budget.search, options.strategies
        )
        path = loops_dir() / f"{asked}.jsonl"
        if options.fresh:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return Diary(path if self._recording is None else None, asked)

    def _study_path(self) -> Path | None:
        """Where Optuna's studies of this machine lie, for its dashboard; None where that folder cannot be written."""
        path = studies_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return path

    def _measure(self, prepared: Prepared, journal: Journal) -> Problem:
        device, session, program = prepared.device, prepared.session, prepared.captured.program
        graph, budget = program.graph, self._options.budget
        variants = measure_variants(session, program, journal, budget.solo_rounds, self._ledger, prepared.refused)
        self._variants = variants
        solo = variants.solo if variants is not None else measure_solo(session, graph, journal, budget.solo_rounds, self._ledger)
        self._progress.stage("operators in pairs")
        if self._recording is not None:
            pairs, launches = self._recording.all_pairs, self._recording.launches
        else:
            share_s = budget.total_s * budget.pair_share
            pairs = measure_pairs(session, graph, device_facts(device.key), solo, journal, share_s, self._ledger, self._progress, variants)
            launches = launch_facts(session, graph)
            if note := audit_note(session, graph):
                self._ledger.notes.append(note)
        table = cost_table(session, graph, device.key, solo, pairs, launches, self._chosen.model)
        if variants is not None:
            table = dataclasses.replace(table, variant=variants.best)
        else:
            # What was measured of compiled variants stands for this graph alone: no feature tells a model which variant it was.
            self._measured = Measured(solo, pairs, launches)
        self._ledger.notes.append(prediction_note(self._chosen, graph, table, pairs))
        wanted = demands(graph, launches, device_facts(device.key))
        problem = Problem.make(graph, table, demand=wanted.demand, memory_bound=wanted.memory_bound)
        self._bounds = lower_bounds(problem, device_facts(device.key), launches)
        return problem

    def _propose(self, problem: Problem, session: Session, deadline: float) -> tuple[list[Candidate], dict[str, Failure]]:
        self._progress.stage("search")
        limits = session.limits
        wanted = list(self._options.strategies) if self._options.strategies is not None else self._default_names()
        if limits.widths == (1,):
            wanted = [name for name in wanted if name != "sequential_wide"]
        # The static baselines are measured whatever was asked for: without them no speed-up means anything.
        required = [name for name in _SEQUENTIAL if name == "sequential" or len(limits.widths) > 1]
        names = [name for name in dict.fromkeys([*required, *wanted]) if name != TUNED]
        evaluations = self._options.budget.search.evaluations
        left_s = max(deadline - time.monotonic(), 0.0)
        context = SearchContext(self._rng, evaluations, time.monotonic() + 0.3 * left_s, max_lanes=limits.max_lanes, widths=limits.widths)
        return propose(problem, names, context, lanes_matter=limits.lanes_matter)

    def _default_names(self) -> list[str]:
        return [name for name in STRATEGIES.names() if name not in _ON_REQUEST]

    def _prove(
        self,
        session: Session,
        captured: Captured,
        candidates: Sequence[Candidate],
        references: References,
        failures: dict[str, Failure],
    ) -> dict[str, Comparison]:
        """Prove every distinct candidate; whoever fails moves to ``failures``."""
        proofs: dict[str, Comparison] = {}
        groups = by_key(candidates)
        self._progress.stage("verification")
        for done, (key, group) in enumerate(groups.items()):
            answer = prove(session, captured.program.graph, group[0].schedule, references)
            self._ledger.count(answer)
            if isinstance(answer, Failure):
                failures.update({candidate.name: answer for candidate in group})
            else:
                proofs[key] = answer
            self._progress.update(done=done + 1, total=len(groups), measured=self._ledger.measurements, failed=self._ledger.failures)
        return proofs

    def _refine(
        self,
        session: Session,
        problem: Problem,
        candidates: Sequence[Candidate],
        proofs: dict[str, Comparison],
        references: References,
        deadline: float,
        diary: Diary,
    ) -> list[Candidate]:
        self._progress.stage("device loop")
        proved = [candidate for candidate in candidates if candidate.key in proofs]
        return refine(
            session,
            problem,
            proved,
            proofs,
            references,
            budget=self._options.budget,
            # A quarter of the time is kept for the final comparison.
            deadline=deadline - 0.25 * self._options.budget.total_s,
            rng=self._rng,
            ledger=self._ledger,
            progress=self._progress,
            diary=diary,
            study_path=self._study_path(),
            variants=self._variants,
        )

    def _judge(
        self,
        session: Session,
        device: Device,
        captured: Captured,
        problem: Problem,
        candidates: Sequence[Candidate],
        proofs: Mapping[str, Comparison],
        failures: dict[str, Failure],
        references: References,
        rivals: Rivals,
        begin: float,
        deadline: float,
    ) -> Outcome:
        options = self._options
        groups = {key: group for key, group in by_key(candidates).items() if key in proofs}
        static = [group[0].name for group in groups.values() if any(item.name in _SEQUENTIAL for item in group)]
        if not static:
            raise NoFeasibleCandidate(
                f"not even a sequential schedule runs: {_listed(failures)}. Try --no-rewrite, and report the operator."
            )
        self._progress.stage("baselines")
        began_baselines = time.monotonic()
        externals = rivals.ready(captured, references.outputs[0])
        # A rival's compile time is not taken from the budget of the search.
        deadline += time.monotonic() - began_baselines
        self._progress.stage("final comparison", max(deadline - time.monotonic(), 0.0))
        schedules = [(group[0].name, group[0].schedule) for group in groups.values()]
        times = interleave(
            session,
            schedules,
            externals,
            rounds=options.budget.final_rounds,
            deadline=deadline,
            progress=self._progress,
            anchor=static[0],
        )
        self._ledger.measurements += sum(len(column) for column in times.columns.values())
        self._ledger.failures += len(times.failures)
        if not times.columns.get(static[0]):
            raise NoFeasibleCandidate(f"the sequential schedule cannot be timed: {_listed({**failures, **times.failures})}")
        searched = [group[0].name for group in groups.values() if group[0].name not in static]
        judgement = self._judged(session, captured, groups, times, searched, static, externals, failures)
        kept = next(group[0] for group in groups.values() if group[0].name == judgement.chosen)
        traced = session.schedules([kept.schedule], rounds=5, trace=True)[0]
        rows = strategy_rows(groups, failures, times, proofs, judgement, externals, session, static)
        report = TuneReport(
            model=options.name,
            graph_hash=captured.program.graph.hash,
            device=device.key,
            lowering=captured.program.lowering,
            operators=len(captured.program.graph),
            chosen=judgement.chosen,
            best_baseline=judgement.best_baseline,
            verdict=judgement.verdict,
            ratio_low=judgement.ratio.ci_low,
            ratio_high=judgement.ratio.ci_high,
            strategies=tuple(rows),
            measurements=self._ledger.measurements,
            failures=self._ledger.failures,
            search_s=time.monotonic() - begin,
            noise_floor_pct=judgement.noise_pct,
            seed=options.seed,
            effort=options.effort,
            notes=(
                *self._ledger.notes,
                *dict.fromkeys(item.note for item in externals if item.note),
            ),
            unstable=judgement.unstable,
            critical_path_us=self._bounds.critical_path_us if self._bounds is not None else None,
            work_us=self._bounds.work_us if self._bounds is not None else None,
        )
        if self._recording is not None:
            report = replayed_report(report, groups, session)
        else:
            self._remember(device, captured, session, groups, times, report)
        trace = None if isinstance(traced, Failure) else traced
        return Outcome(report, captured, kept.schedule, device, trace, _planned(problem, kept.schedule), _alone(problem, kept.schedule))

    def _remember(
        self,
        device: Device,
        captured: Captured,
        session: Session,
        groups: Mapping[str, Sequence[Candidate]],
        times: Times,
        report: TuneReport,
    ) -> None:
        """Leave what was measured to the next training of a cost model."""
        graph, name, scope = captured.program.graph, self._options.name, scope_row(device)
        peaks = {row.name: row.peak_memory_bytes for row in report.strategies}
        # What a restless machine said of whole schedules is worth nothing; operators and pairs carry their own disturbance.
        sound = {} if report.unstable else groups
        timed = timed_schedules(scope.scope, graph, name, self._chosen.name, sound, times, peaks)
        if self._measured is not None:
            remember_runs(scope, graph, name, session.limits, self._measured, timed)

    def _judged(
        self,
        session: Session,
        captured: Captured,
        groups: Mapping[str, Sequence[Candidate]],
        times: Times,
        searched: Sequence[str],
        static: Sequence[str],
        externals: Sequence[External],
        failures: dict[str, Failure],
    ) -> Judgement:
        """Judge; a winner that races under injected delays is struck out, and the rest is judged again."""
        schedules = {group[0].name: group[0].schedule for group in groups.values()}
        left = list(searched)
        while True:
            best, base = finalists(times, left, static)
            fought = self._duel(session, schedules[best], schedules[base]) if best is not None else None
            judgement = judge(times, left, static, [item.name for item in externals], fought, self._options.seed)
            if judgement.chosen in static:
                return judgement
            race = stress_capture(session, captured.program.graph, schedules[judgement.chosen], self._options.seed)
            if race is None:
                return judgement
            left.remove(judgement.chosen)
            times.columns.pop(judgement.chosen)
            times.failures[judgement.chosen] = failures[judgement.chosen] = race
            self._ledger.failures += 1

    def _duel(self, session: Session, candidate: Schedule, base: Schedule) -> Duel | Failure:
        budget = self._options.budget
        fought = duel(session, candidate, base, rounds=budget.final_rounds, seconds=0.1 * budget.total_s)
        self._ledger.measurements += 3 * len(fought.base_us) if isinstance(fought, Duel) else 1
        return fought


def require_strategies(options: Options) -> None:
    """Find out before a minute is spent on capture that a strategy is misspelt.

    Raises:
        UnknownName: naming it.
    """
    for name in options.strategies or ():
        if name != TUNED:
            STRATEGIES.get(name)


def _planned(problem: Problem, schedule: Schedule) -> tuple[tuple[float, ...], tuple[float, ...]]:
    from autosched.search.simulate import simulate

    simulation = simulate(problem, schedule)
    return tuple(float(item) for item in simulation.start_us), tuple(float(item) for item in simulation.end_us)


def _alone(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """Time alone of each operator at the width that ``schedule`` gives it."""
    widths = problem.costs.widths
    return tuple(float(problem.solo_us[problem.kernel[index, widths.index(schedule.width[index])]]) for index in range(problem.count))


def _listed(failures: Mapping[str, Failure]) -> str:
    return "; ".join(f"{name}: {failure.kind}, {failure.detail}" for name, failure in failures.items()) or "no reason given"
