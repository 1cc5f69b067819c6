"""One tuning job or comparison, from a model to a judged table: capture, measure, search, prove, refine, judge."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosched.config import loops_dir, studies_path
from autosched.core.in_place import chains_of, in_graph_order
from autosched.core.program import Program
from autosched.core.progress import Progress
from autosched.core.records import Failure
from autosched.core.variants import Lowering
from autosched.datasets.facts import DeviceFacts, device_facts
from autosched.datasets.journal import Journal
from autosched.device.base import Device
from autosched.pipeline.agreeing import agreeing_variants
from autosched.pipeline.baselines import Rivals
from autosched.pipeline.bounds import lower_bounds
from autosched.pipeline.candidates import Candidate, by_key, propose
from autosched.pipeline.demands import demands
from autosched.pipeline.diary import Diary, question_of
from autosched.pipeline.final import decide
from autosched.pipeline.graph_proofs import audit_note, launch_facts
from autosched.pipeline.left_out import LeftOut
from autosched.pipeline.measuring import Ledger, SoloTime, cost_table, measure_pairs, measure_solo, solo_time, undisturbed, would_again
from autosched.pipeline.memory import Measured, forget_measurements, open_journal
from autosched.pipeline.model_choice import choose_model, engine_of, prediction_note
from autosched.pipeline.no_schedule import no_schedule
from autosched.pipeline.options import Options, Outcome
from autosched.pipeline.original import Original
from autosched.pipeline.preparing import NotHad, Prepared, prepare
from autosched.pipeline.proving import OUT_OF_TIME, STATIC, Prover
from autosched.pipeline.readiness import ready_searches
from autosched.pipeline.references import Yardstick
from autosched.pipeline.refine import Refined, refine
from autosched.pipeline.replaying import open_device, recording_of
from autosched.pipeline.request import TUNED, require_strategies
from autosched.pipeline.run import Costs, Run
from autosched.pipeline.scope import scope_of
from autosched.pipeline.timetable import LEAST_ROWS, Timetable
from autosched.pipeline.variants import Refusals, VariantTimes, measure_variants
from autosched.search.problem import Problem
from autosched.search.strategy import STRATEGIES, SearchContext

# Exact searches explode, and optuna's own overhead dwarfs a quick budget: they run when asked for by name.
_ON_REQUEST = frozenset({"exact", "optuna"})


class Job:
    """Runs once; its stages are the functions below, in the order they happen, and ``final.decide``.

    Args:
        prepared: the lowering to tune, where it has been captured and its operators measured before; whoever gives it closes its session.
        rivals: baselines that other jobs on this model have too; whoever gives them has entered them.
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
        self._given = prepared
        self._rivals = rivals
        self._yardstick = yardstick or Yardstick(model, args, kwargs, options.seed)

    @property
    def lowering(self) -> str:
        """What is tuned, unless it cannot be had."""
        return self._options.lowering.value

    def run(self) -> Outcome:
        """Do all of it.

        Raises:
            UnsupportedGraph, DeviceMissing, WorkerLost: see their classes.
            NoFeasibleCandidate: if not even a sequential schedule runs.
        """
        options = self._options
        # A missing device and a misspelt strategy are said before a minute is spent on capture.
        device = self._given.device if self._given is not None else open_device(options.device)
        engine = engine_of(device)
        model = choose_model(device.key, engine, options.cost_model)
        require_strategies(options.strategies)
        with contextlib.ExitStack() as stack:
            rivals = self._rivals
            if rivals is None:
                rivals = stack.enter_context(self._own_rivals(device))
            prepared = self._given
            if prepared is None:
                prepared = self._prepared(device)
                stack.callback(prepared.session.close)
            ready_searches(self._progress)
            self._ledger.notes += prepared.notes
            if engine is not None and (ran := scope_of(device, prepared.session.limits).software.engine) is not engine:
                # Others' lanes are not this program's.
                model = choose_model(device.key, ran, options.cost_model)
            timetable = Timetable.starting(options.budget.total_s, unbounded=options.complete)
            self._progress.stage("reference outputs", options.budget.total_s)
            references = self._yardstick.of(prepared.captured.program)
            prover = Prover(prepared.session, prepared.captured.program.graph, references, self._ledger, timetable.pace)
            rng = np.random.default_rng(options.seed)
            run = Run(options, prepared, recording_of(device), model, references, prover, self._ledger, timetable, self._progress, rng)
            return self._tuned(run, rivals)

    def _prepared(self, device: Device) -> Prepared:
        lowering, call = self._options.lowering, (Original(self._model, self._args, self._kwargs), device, self._progress)
        found = prepare(lowering, *call)
        if isinstance(found, NotHad):
            self._ledger.notes.append(f"lowering fused instead of {lowering}: {found.why}")
            found = prepare(Lowering.FUSED, *call)
            # Only Inductor's own code is ever refused.
            assert isinstance(found, Prepared)
        return found

    def _own_rivals(self, device: Device) -> Rivals:
        options = self._options
        return Rivals(
            self._model, self._args, self._kwargs, device, compiled=options.compiled, source=options.source, progress=self._progress
        )

    def _tuned(self, run: Run, rivals: Rivals) -> Outcome:
        # Whoever gives what is prepared has made the journal as fresh as was asked.
        if run.options.fresh and self._given is None and run.recording is None:
            forget_measurements(run.device)
        with open_journal(run.scope, private=run.recording is not None) as journal, _diary(run) as diary:
            costs = _measured(run, journal)
            candidates, failures = _proposed(run, costs.problem, diary)
            found = _refined(run, costs, candidates, diary) if run.options.refine else Refined()
            entries = run.prover.entries([*candidates, *found.best])
            if not any(entry.is_static for entry in entries):
                raise no_schedule(failures, self._model, run.captured.program, run.references)
            outcome = decide(run, costs, entries, found.ranking, failures, rivals)
            diary.finish()
            return outcome


def _write_back_note(program: Program) -> str:
    """Which of what the model changes is in a schedule's time as it is when a call changes it, and which is not."""
    if not program.writes:
        return ""
    sizes = [program.graph.values[item.target].spec.bytes for item in program.writes]
    chains = [chain for chain in chains_of(program) if chain.repeatable and in_graph_order(program.graph, chain)]
    in_place = sum(sizes[chain.write] for chain in chains)
    said = f"the model changes {sum(sizes) / 2**20:,.1f} MiB of its own or its inputs' memory"
    if in_place:
        said += f", {in_place / 2**20:,.1f} MiB of it where it lies, in calls as in what is timed"
    if len(chains) < len(sizes):
        rest = "the rest" if in_place else "it"
        said += f"; schedules are timed making {rest} anew, and no time includes what a call does to write that back"
    return said


def _measured(run: Run, journal: Journal) -> Costs:
    """Operators alone and in pairs, and what follows from them."""
    session, graph, budget, ledger = run.session, run.graph, run.options.budget, run.ledger
    run.progress.stage("operators alone", run.timetable.left_s())
    time_s = solo_time(budget.total_s, again=run.prepared.measured)
    facts = device_facts(run.device.key)
    variants = _variants(run, journal, facts, time_s)
    solo = variants.solo if variants is not None else measure_solo(session, graph, facts, journal, budget.solo_rounds, ledger, time_s)
    run.progress.stage("operators in pairs", run.timetable.left_s())
    if run.recording is not None:
        pairs, launches = run.recording.known_by(graph, variants)
    else:
        share_s = run.timetable.left_s() * budget.pair_share
        pairs = measure_pairs(session, graph, facts, solo, journal, share_s, ledger, run.progress, variants)
        launches = launch_facts(session, graph) if variants is None else variants.launches(session, graph)
        if note := audit_note(session, graph):
            ledger.notes.append(note)
    others = variants.other_solo if variants is not None else ()
    table = cost_table(session, graph, run.device.key, solo, pairs, launches, run.model.model, others)
    if variants is not None:
        table = variants.in_table(table)
    ledger.notes.append(prediction_note(run.model, graph, table, [pair for pair in pairs if undisturbed(pair, facts)]))
    if note := _write_back_note(run.captured.program):
        ledger.notes.append(note)
    wanted = demands(graph, launches, facts)
    problem = Problem.make(graph, table, demand=wanted.demand, memory_bound=wanted.memory_bound)
    measured = Measured(solo, pairs, launches)
    if variants is not None:
        measured = Measured(variants.answers, journal.pairs(), variants.own_names(graph, launches))
    return Costs(problem, lower_bounds(problem, facts, launches), variants, measured)


def _variants(run: Run, journal: Journal, facts: DeviceFacts, time_s: SoloTime) -> VariantTimes | None:
    """The variants of every operator; of those that are to run, not of a recording, the ones with which the model answers as it did."""
    session, program, ledger = run.session, run.captured.program, run.ledger

    def measured(refused: Refusals) -> VariantTimes | None:
        return measure_variants(session, program, facts, journal, run.options.budget.solo_rounds, ledger, refused, time_s)

    if run.recording is not None:
        return measured(run.prepared.refused)
    return agreeing_variants(measured, run.prover.refutation, program.graph, session.limits.widths, run.prepared.refused, ledger)


def _proposed(run: Run, problem: Problem, diary: Diary) -> tuple[list[Candidate], dict[str, Failure]]:
    """What the strategies propose, proved as far as there is time; and what failed, by name.

    The sequential schedules come first: without them there is no verdict, and they tell how long proofs and turns take here.
    """
    limits, lanes_matter = run.session.limits, run.session.limits.lanes_matter
    wanted = list(run.options.strategies) if run.options.strategies is not None else _default_names()
    static = [name for name in STATIC if name == "sequential" or len(limits.widths) > 1]
    names = [name for name in dict.fromkeys(wanted) if name != TUNED and name not in STATIC]
    context = SearchContext(run.rng, run.options.budget.search.evaluations, None, max_lanes=limits.max_lanes, widths=limits.widths)
    run.progress.stage("sequential schedules", run.timetable.left_s())
    first, failures = propose(problem, static, context, lanes_matter=lanes_matter)
    # Whatever came of them before: there is no verdict without them.
    _prove(run, first, failures, Diary(None, ""))
    _set_pace(run, first)
    run.progress.stage("search", run.timetable.left_s())
    context = dataclasses.replace(context, deadline_s=run.timetable.search_until_s(LEAST_ROWS))
    found, broken = propose(problem, names, context, lanes_matter=lanes_matter)
    failures.update(broken)
    run.progress.stage("verification", run.timetable.left_s())
    _prove(run, found, failures, diary, until_s=run.timetable.prove_until_s(LEAST_ROWS, refine=run.options.refine))
    return [*first, *found], failures


def _default_names() -> list[str]:
    return [name for name in STRATEGIES.names() if name not in _ON_REQUEST]


def _prove(run: Run, candidates: Sequence[Candidate], failures: dict[str, Failure], diary: Diary, *, until_s: float = math.inf) -> None:
    """Prove every distinct candidate, the best predicted first, until the time is up, but one at least.

    Whoever fails is added to ``failures``. Whoever has cost an interrupted job its measuring process, as ``diary`` tells, fails at once.
    """
    groups = sorted(by_key(candidates).values(), key=lambda group: (group[0].predicted_us, group[0].key))
    unproved: list[str] = []
    for done, group in enumerate(groups):
        key = group[0].key
        answer = diary.failures.get(key)
        if answer is None or not would_again(answer):
            answer = run.prover.refutation(group[0].schedule, until_s=until_s if done else math.inf)
            if answer is not None and answer != OUT_OF_TIME and would_again(answer):
                diary.add({}, {key: answer})
        if answer == OUT_OF_TIME:
            unproved += [candidate.name for candidate in group]
        elif answer is not None:
            failures.update({candidate.name: answer for candidate in group})
        run.progress.update(done=done + 1, total=len(groups), measured=run.ledger.measurements, failed=run.ledger.failures)
    if unproved:
        more_s = run.timetable.more_proofs_s(len(unproved), len(groups) + len(STATIC), refine=run.options.refine)
        what = f"proving and measuring {len(unproved)} {'strategy' if len(unproved) == 1 else 'strategies'} ({', '.join(unproved)})"
        run.ledger.left_out.append(LeftOut(what, more_s))


def _set_pace(run: Run, static: Sequence[Candidate]) -> None:
    """Learn from the sequential schedules how long one turn takes."""
    schedules = [entry.schedule for entry in run.prover.entries(static)]
    if not schedules or isinstance(run.session.paired(schedules, rounds=1), Failure):
        return
    # The first request has prepared them.
    begin_s = time.monotonic()
    run.session.paired(schedules, rounds=2)
    run.timetable.pace.timed(time.monotonic() - begin_s, 2 * len(schedules))


def _refined(run: Run, costs: Costs, candidates: Sequence[Candidate], diary: Diary) -> Refined:
    run.progress.stage("device loop", run.timetable.left_s())
    budget = run.options.budget
    if run.recording is not None:
        # Where runs are simulated, the search has tried more small changes than any device could.
        budget = dataclasses.replace(budget, search=dataclasses.replace(budget.search, idle_climbs=0))
    return refine(
        run.session,
        costs.problem,
        run.prover.entries(candidates),
        run.prover,
        budget=budget,
        timetable=run.timetable,
        rng=run.rng,
        ledger=run.ledger,
        progress=run.progress,
        diary=diary,
        study_path=_study_path(),
        variants=costs.variants,
    )


def _diary(run: Run) -> Diary:
    options = run.options
    asked = question_of(run.graph.hash, run.scope.digest, options.seed, options.budget.search, options.strategies)
    path = loops_dir() / f"{asked}.jsonl"
    if options.fresh:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return Diary(path if run.recording is None else None, asked)


def _study_path() -> Path | None:
    """Where Optuna's studies of this machine lie, for its dashboard; None where that folder cannot be written."""
    path = studies_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path
