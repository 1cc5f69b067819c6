"""The device loop on a session: nothing is timed before it is proved, and what is refuted never comes back. Times are simulated."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from autosched.core.costs import CostTable
from autosched.core.errors import UsageError
from autosched.core.progress import Silent
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.base import Comparison
from autosched.pipeline.budget import budget_for
from autosched.pipeline.candidates import make_candidate, propose, prove
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.overrun import Overrun, ended_at
from autosched.pipeline.proving import Prover
from autosched.pipeline.references import References
from autosched.pipeline.refine import SessionBench, refine
from autosched.pipeline.timetable import Pace, Timetable
from autosched.pipeline.variants import VariantTimes
from autosched.search.climb import ClimbResult
from autosched.search.portfolio import Proposal
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext
from tests.conformance.graphs import TwoBranches, two_branches_program
from tests.conformance.session_double import SessionDouble

GRAPH = two_branches_program(TwoBranches())[0].graph
NOTHING = References((), ())


def problem() -> Problem:
    count = len(GRAPH)
    kernel = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
    ones = np.ones((2 * count, 2 * count))
    solo = np.full(2 * count, 50.0)
    return Problem.make(GRAPH, CostTable((1, 2), kernel, solo, ones, ones, 1.0, 5.0, 10.0, 2))


def spread() -> Schedule:
    return make_schedule(GRAPH, range(len(GRAPH)), [index % 2 for index in range(len(GRAPH))])


def by_lanes(schedule: Schedule) -> float:
    """The more evenly two lanes share the operators, the faster."""
    return 1000.0 - 10.0 * min(schedule.lane.count(0), schedule.lane.count(1))


def test_refine_returns_what_measured_fastest_and_proves_all_it_times() -> None:
    session, made, ledger = SessionDouble(by_lanes, noise=0.001), problem(), Ledger()
    first = make_candidate(made, "sequential", True, sequential(GRAPH), lanes_matter=True)
    timetable = Timetable.starting(40.0)
    prover = Prover(session, GRAPH, NOTHING, ledger, timetable.pace)
    assert prover.refutation(first.schedule) is None
    quick = budget_for("quick")
    budget = dataclasses.replace(quick, search=dataclasses.replace(quick.search, evaluations=500))
    found = refine(
        session, made, prover.entries([first]), prover, budget=budget, timetable=timetable, rng=np.random.default_rng(0), ledger=ledger,
        progress=Silent(),
    )  # fmt: skip
    [best] = found.best
    assert best.name == "tuned"
    assert by_lanes(best.schedule) < by_lanes(first.schedule)
    assert prover.entries([best])
    assert found.ranking[0] == best.key
    assert first.key in found.ranking
    assert session.compared.count(sequential(GRAPH)) == 1  # its proof was at hand
    assert ledger.measurements > 0


def test_what_comes_of_changed_variants_is_ranked_before_what_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    session, made, ledger = SessionDouble(by_lanes, noise=0.001), problem(), Ledger()
    first = make_candidate(made, "sequential", True, sequential(GRAPH), lanes_matter=True)
    timetable = Timetable.starting(40.0)
    prover = Prover(session, GRAPH, NOTHING, ledger, timetable.pace)
    assert prover.refutation(first.schedule) is None
    changed: list[Schedule] = []

    def change(bench: SessionBench, schedule: Schedule, *others: object, most: int) -> Schedule:
        changed.append(dataclasses.replace(schedule, variant=(1,) * len(GRAPH)))
        return changed[-1]

    monkeypatch.setattr("autosched.pipeline.refine.try_variants", change)
    quick = budget_for("quick")
    budget = dataclasses.replace(quick, search=dataclasses.replace(quick.search, evaluations=500))
    found = refine(
        session, made, prover.entries([first]), prover, budget=budget, timetable=timetable, rng=np.random.default_rng(0), ledger=ledger,
        progress=Silent(), variants=cast(VariantTimes, object()),
    )  # fmt: skip
    [best] = found.best
    assert best.schedule == changed[0]
    assert found.ranking[0] == best.key
    assert len(set(found.ranking)) == len(found.ranking) > 1


def test_a_refuted_schedule_is_never_timed_and_is_refuted_once() -> None:
    session, ledger = SessionDouble(by_lanes), Ledger()
    bad = spread()
    session.comparisons[bad.lane] = Comparison(False, 0.5, False)
    bench = SessionBench(session, Prover(session, GRAPH, NOTHING, ledger, Pace()), ledger, Pace())
    answers = bench.measure([bad, sequential(GRAPH)], 3)
    again = bench.measure([bad], 3)
    assert isinstance(answers[0], Failure)
    assert answers[0].kind is FailureKind.MISMATCH
    assert list(answers[1]) == [1000.0] * 3
    assert isinstance(again[0], Failure)
    assert session.compared.count(bad) == 1


def test_one_schedule_that_kills_the_worker_does_not_take_the_others_with_it() -> None:
    bad = spread()
    session = SessionDouble(lambda schedule: Failure(FailureKind.CRASH, "boom") if schedule == bad else 10.0)
    bench = SessionBench(session, Prover(session, GRAPH, NOTHING, Ledger(), Pace()), Ledger(), Pace())
    answers = bench.measure([bad, sequential(GRAPH)], 2)
    assert isinstance(answers[0], Failure)
    assert list(answers[1]) == [10.0, 10.0]


@pytest.mark.parametrize("kind", [FailureKind.CRASH, FailureKind.TIMEOUT])
def test_what_a_process_takes_to_be_replaced_is_no_schedules_pace(kind: FailureKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else fewer schedules would be proved, tried and compared, for the sake of one that is out."""
    bad, worse, now_s, pace = spread(), sequential(GRAPH, width=2), 100.0, Pace()
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    class Session(SessionDouble):
        def compare(self, schedule: Schedule, inputs: object, references: object) -> Comparison | Failure:
            nonlocal now_s
            now_s += 120.0 if schedule == worse else 1.0
            return Failure(kind, "it is gone") if schedule == worse else super().compare(schedule, inputs, references)

        def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
            nonlocal now_s
            now_s += 240.0 if bad in schedules else 0.5 * rounds * len(schedules)
            return super().paired(schedules, rounds=rounds)

    session = Session(lambda schedule: Failure(kind, "it is gone") if schedule == bad else 10.0)
    prover = Prover(session, GRAPH, NOTHING, Ledger(), pace)
    bench = SessionBench(session, prover, Ledger(), pace)
    bench.measure([sequential(GRAPH), bad, worse], 2)
    bench.measure([sequential(GRAPH)], 2)
    assert now_s > 500.0
    assert (pace.proof_s, pace.turn_s) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("comparison", "words"),
    [(Comparison(True, 0.5, False), "original model"), (Comparison(False, 0.0, True), "bitwise")],
)
def test_wrong_numbers_are_a_mismatch(comparison: Comparison, words: str) -> None:
    session = SessionDouble(by_lanes)
    session.comparisons[spread().lane] = comparison
    answer = prove(session, GRAPH, spread(), NOTHING)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.MISMATCH
    assert words in answer.detail


def test_an_illegal_schedule_never_reaches_the_device() -> None:
    session = SessionDouble(by_lanes)
    backwards = dataclasses.replace(sequential(GRAPH), order=tuple(reversed(range(len(GRAPH)))))
    answer = prove(session, GRAPH, backwards, NOTHING)
    assert isinstance(answer, Failure)
    assert answer.kind is FailureKind.ILLEGAL
    assert session.compared == []


def test_a_strategy_of_a_broken_package_or_with_something_else_than_schedules_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.search.heuristics import wavefront
    from autosched.search.strategy import STRATEGIES

    monkeypatch.setattr(wavefront, "WAVEFRONT", dataclasses.replace(wavefront.WAVEFRONT, function=lambda made, context: ["a schedule"]))
    monkeypatch.setitem(STRATEGIES._places, "absent", "no_such_package_anywhere:STRATEGY")
    context = SearchContext(np.random.default_rng(0), 10)
    found, failures = propose(problem(), ["wavefront", "absent", "sequential"], context, lanes_matter=True)
    assert [candidate.name for candidate in found] == ["sequential"]
    assert set(failures) == {"wavefront", "absent"}
    assert "no_such_package_anywhere" in failures["absent"].detail


def test_a_strategy_that_breaks_is_a_failure_and_an_unknown_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.search.heuristics import wavefront

    def explode(made: Problem, context: SearchContext) -> list[Schedule]:
        raise ZeroDivisionError("a plugin's bug")

    monkeypatch.setattr(wavefront, "WAVEFRONT", dataclasses.replace(wavefront.WAVEFRONT, function=explode))
    context = SearchContext(np.random.default_rng(0), 10)
    found, failures = propose(problem(), ["sequential", "wavefront"], context, lanes_matter=True)
    assert [candidate.name for candidate in found] == ["sequential"]
    assert "a plugin's bug" in failures["wavefront"].detail
    with pytest.raises(UsageError, match="known"):
        propose(problem(), ["no_such_strategy"], context, lanes_matter=True)


def test_a_strategy_that_does_not_come_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.search.heuristics import wavefront

    def forever(made: Problem, context: SearchContext) -> list[Schedule]:
        while True:
            with contextlib.suppress(Exception):
                sum(range(100))

    monkeypatch.setattr(wavefront, "WAVEFRONT", Rule("wavefront", forever))
    monkeypatch.setattr("autosched.pipeline.candidates._OVERRUN_S", 0.2)
    context = SearchContext(np.random.default_rng(0), 10, deadline_s=time.monotonic() + 0.1)
    found, failures = propose(problem(), ["wavefront", "critical_path"], context, lanes_matter=True)
    assert [candidate.name for candidate in found] == ["critical_path"]
    assert failures["wavefront"] == Failure(FailureKind.TIMEOUT, "it had not ended 0 s after its time was up")


def test_nothing_is_raised_once_a_strategy_has_come_back() -> None:
    """Neither later, nor in place of what the strategy raises, nor looked for: a traced function would not come past its beginning."""
    for _ in range(200):
        with contextlib.suppress(Overrun, KeyError), ended_at(time.monotonic() + 1e-4):
            time.sleep(1e-4)
            raise KeyError
        sum(range(1000))
    traced: list[str] = []

    def follow() -> None:
        sys.settrace(lambda frame, event, argument: traced.append(event))
        try:
            sum([1, 2])
            (lambda: 1)()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert traced


def test_a_strategy_that_passes_over_its_end_and_then_comes_back_has_ended() -> None:
    for _ in range(3):
        with ended_at(time.monotonic() + 0.3), contextlib.suppress(BaseException):
            while True:
                sum(range(100))
        sum(range(1000))


@pytest.mark.parametrize("baseline", [False, True])
def test_a_strategy_that_proposes_nothing_is_a_failure_and_one_that_yields_is_none(baseline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.search.heuristics import trtllm, wavefront

    def yielding(made: Problem, context: SearchContext) -> Iterator[Schedule]:
        yield spread()

    nothing, one = Rule("wavefront", lambda made, context: [], baseline), Rule("trtllm", yielding, baseline)  # type: ignore[arg-type]
    monkeypatch.setattr(wavefront, "WAVEFRONT", nothing)
    monkeypatch.setattr(trtllm, "TRTLLM", one)
    found, failures = propose(problem(), ["wavefront", "trtllm"], SearchContext(np.random.default_rng(0), 10), lanes_matter=True)
    assert [candidate.name for candidate in found] == ["trtllm"]
    assert failures["wavefront"].kind is FailureKind.ILLEGAL
    assert "expected at least one" in failures["wavefront"].detail


def test_a_strategy_that_takes_all_the_time_it_is_given_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.search.heuristics import trtllm, wavefront

    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given_s: dict[str, float] = {}

    def hungry(name: str, share: float) -> Rule:
        def take(made: Problem, context: SearchContext) -> list[Schedule]:
            nonlocal now
            assert context.deadline_s is not None
            given_s[name] = context.deadline_s - now
            now += share * given_s[name]
            return [spread()]

        return Rule(name, take)

    monkeypatch.setattr(wavefront, "WAVEFRONT", hungry("wavefront", 1.0))
    monkeypatch.setattr(trtllm, "TRTLLM", hungry("trtllm", 0.0))
    context = SearchContext(np.random.default_rng(0), 10, deadline_s=now + 6.0)
    found, _ = propose(problem(), ["wavefront", "trtllm", "sequential"], context, lanes_matter=True)
    assert len(found) == 3
    # What one does not need is there for those after it.
    assert given_s == pytest.approx({"wavefront": 2.0, "trtllm": 2.0})


@pytest.mark.parametrize(
    "broken",
    [
        {"order": tuple(reversed(range(len(GRAPH))))},
        {"order": (0,) * len(GRAPH)},
        {"lane": (-7,) * len(GRAPH)},
        {"extra_edges": ((0, 10**6),)},
        {"width": (1,)},
    ],
)
def test_an_illegal_schedule_of_a_strategy_is_a_failure_and_not_predicted(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, tuple[int, ...]]
) -> None:
    from autosched.search.heuristics import wavefront

    def simulated(*_: object) -> None:
        pytest.fail("what compiled code makes of it is anything")

    bad = dataclasses.replace(sequential(GRAPH), **broken)
    monkeypatch.setattr(wavefront, "WAVEFRONT", dataclasses.replace(wavefront.WAVEFRONT, function=lambda made, context: [bad]))
    monkeypatch.setattr("autosched.pipeline.candidates.simulate", simulated)
    found, failures = propose(problem(), ["wavefront"], SearchContext(np.random.default_rng(0), 10), lanes_matter=True)
    assert found == []
    assert failures["wavefront"].kind is FailureKind.ILLEGAL


@pytest.mark.parametrize(("effort", "climbs"), [("quick", False), ("balanced", True)])
def test_small_changes_get_the_time_that_is_left_unless_the_job_is_to_be_quick(
    monkeypatch: pytest.MonkeyPatch, effort: str, climbs: bool
) -> None:
    session, made, ledger = SessionDouble(by_lanes, noise=0.001), problem(), Ledger()
    first = make_candidate(made, "sequential", True, sequential(GRAPH), lanes_matter=True)
    timetable = Timetable.starting(40.0)
    prover = Prover(session, GRAPH, NOTHING, ledger, timetable.pace)
    assert prover.refutation(first.schedule) is None
    begun: list[tuple[Schedule, float]] = []
    changed = dataclasses.replace(sequential(GRAPH), priority=(1,) * len(GRAPH))

    def climb(made: Problem, bench: object, context: SearchContext, ledger: object, *, incumbent: Proposal, **_: object) -> ClimbResult:
        assert context.deadline_s is not None
        begun.append((incumbent.schedule, context.deadline_s))
        return ClimbResult(dataclasses.replace(incumbent, schedule=changed), 1, 1)

    monkeypatch.setattr("autosched.pipeline.refine.climb", climb)
    preset = budget_for(effort)
    budget = dataclasses.replace(preset, search=dataclasses.replace(preset.search, evaluations=500, trials=0))
    timetable.pace.timed(1.0, 100)
    found = refine(
        session, made, prover.entries([first]), prover, budget=budget, timetable=timetable, rng=np.random.default_rng(0), ledger=ledger,
        progress=Silent(),
    )  # fmt: skip
    [best] = found.best
    assert len(begun) == int(climbs)
    assert (best.schedule == changed) == climbs
    if climbs:
        [(schedule, until_s)] = begun
        assert by_lanes(schedule) < by_lanes(first.schedule), "it begins with what the loop found"
        assert until_s < timetable.loop_until_s(2, budget.final_rounds), "a batch that is begun must end in time"
