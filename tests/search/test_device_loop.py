from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autosched.core.costs import CostTable
from autosched.core.errors import NoFeasibleCandidate
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, violations
from autosched.search import leftover, synthetic
from autosched.search.correction import CorrectionLimits, Trace, correct_with_times, correct_with_traces
from autosched.search.device_study import StudyResult, study_on_device
from autosched.search.effort import PROFILES, Effort
from autosched.search.halving import Ledger, halve
from autosched.search.loop import LoopResult, LoopSettings, LoopState, search_on_device
from autosched.search.portfolio import Portfolio, Proposal, difference, proposals
from autosched.search.priorities import by_path
from autosched.search.problem import Problem
from autosched.search.simulate import makespan_us, simulate
from autosched.search.strategy import STRATEGIES, SearchContext, baselines
from tests.conformance.strategy_suite import flat_costs
from tests.search.bench_double import FakeBench, Killed
from tests.search.test_fluid_twins import with_variants

SETTINGS = LoopSettings(lanes_matter=False, rounds=3, candidates=14)


def context(evaluations: int = 4000, seed: int = 3) -> SearchContext:
    return SearchContext(np.random.default_rng(seed), max_evaluations=evaluations)


def test_every_baseline_is_a_candidate_and_no_canonical_form_comes_twice() -> None:
    problem = synthetic.random_problem(1, 30)
    found = proposals(problem, context(), lanes_matter=False, count=24)
    assert len({proposal.key for proposal in found}) == len(found)
    named = {name for proposal in found for name in proposal.strategies}
    assert {strategy.name for strategy in baselines()} <= named
    assert "portfolio" in named
    assert [proposal.predicted_us for proposal in found] == sorted(proposal.predicted_us for proposal in found)
    for proposal in found:
        assert violations(problem.graph, proposal.schedule) == []


def test_nothing_is_searched_for_where_what_must_be_measured_takes_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = synthetic.random_problem(1, 30)
    monkeypatch.setattr(Portfolio, "propose", lambda *_: pytest.fail("searched"))
    must = [STRATEGIES.get(name) for name in ("sequential", "critical_path")]
    found = proposals(problem, context(), lanes_matter=False, count=2, strategies=must)
    assert {name for proposal in found for name in proposal.strategies} == {"sequential", "critical_path"}


def test_candidates_differ_from_each_other_where_that_is_possible() -> None:
    problem = synthetic.random_problem(2, 40)
    found = proposals(problem, context(), lanes_matter=False, count=6, strategies=())
    pairs = [(a, b) for a in found for b in found if a is not b]
    assert len(found) == 6
    assert all(difference(a.schedule, b.schedule) >= 0.1 for a, b in pairs)
    same = problem.schedule(found[0].schedule.order, [3 - lane for lane in found[0].schedule.lane])
    assert difference(found[0].schedule, same) == 0.0


def test_candidates_differ_by_the_variants_of_their_operators() -> None:
    problem = with_variants(synthetic.random_problem(2, 40), 2)
    has_other = problem.kernel[:, 1] != problem.kernel[:, 0]
    usual, others = (problem.schedule(range(40), [0] * 40, width_index=[place] * 40) for place in (0, 1))
    assert difference(usual, others) == has_other.mean() > 0.1


def test_the_portfolio_beats_every_heuristic_in_its_own_model() -> None:
    problem = synthetic.random_problem(4, 60)
    best = makespan_us(problem, STRATEGIES.get("portfolio").propose(problem, context(20_000))[0])
    for strategy in baselines():
        assert best <= makespan_us(problem, strategy.propose(problem, context())[0]) * (1 + 1e-9)


def made_up(count: int) -> list[Proposal]:
    """Proposals that differ; the first is the baseline."""
    problem = synthetic.random_problem(0, count + 1, shape="wide")
    schedules = [problem.schedule(range(count + 1), [int(place == index) for place in range(count + 1)]) for index in range(count)]
    return [Proposal((f"s{index}",), index == 0, schedule, 0.0, f"key{index}") for index, schedule in enumerate(schedules)]


class Table:
    """Answers from a list of times by proposal; every round has a drift that all schedules share."""

    def __init__(self, chosen: list[Proposal], times: list[float], *, failing: int = -1) -> None:
        self.truth = {proposal.schedule: time for proposal, time in zip(chosen, times, strict=True)}
        self.failing = chosen[failing].schedule if failing >= 0 else None
        self.rng = np.random.default_rng(0)
        self.calls: list[tuple[int, int]] = []

    def __call__(self, schedules, rounds):  # type: ignore[no-untyped-def]
        self.calls.append((len(schedules), rounds))
        drift = 1.0 + 0.5 * self.rng.random(rounds)
        noise = 1.0 + 0.002 * self.rng.standard_normal((len(schedules), rounds))
        return [
            Failure(FailureKind.CRASH, "made to") if schedule == self.failing else list(self.truth[schedule] * drift * noise[place])
            for place, schedule in enumerate(schedules)
        ]


def test_halving_finds_the_fastest_under_drift_and_spends_most_on_the_best() -> None:
    chosen = made_up(16)
    times = [100.0 + 3.0 * ((place * 7 + 5) % 16) for place in range(16)]
    table = Table(chosen, times)
    ranked = halve(chosen, table, Ledger())
    assert ranked[0].proposal is chosen[int(np.argmin(times))]
    assert len(ranked) == 16
    assert ranked[0].rounds == max(item.rounds for item in ranked) > ranked[-1].rounds
    assert table.calls[0] == (16, 2)
    assert any(item.proposal.is_baseline and item.rounds == ranked[0].rounds for item in ranked)  # the reference stays to the end


def test_all_ratios_of_a_halving_are_to_one_reference_however_the_candidates_rank() -> None:
    chosen = [dataclasses.replace(item, is_baseline=place < 3) for place, item in enumerate(made_up(12))]
    times = [100.0, 60.0, 80.0, *(62.0 + place for place in range(9))]
    ranked = halve(chosen, Table(chosen, times), Ledger(), finalists=2)
    truth = {item.key: time / times[0] for item, time in zip(chosen, times, strict=True)}
    assert len({item.rounds for item in ranked}) > 2
    assert {item.proposal.key: item.ratio for item in ranked} == pytest.approx(truth, rel=0.01)


def test_what_later_rounds_measured_is_ranked_beside_what_the_first_did() -> None:
    problem, kernels = synthetic.random_block_problem(6, 40)
    bench = FakeBench(problem, kernels, noise=0.0)
    result = search_on_device(problem, bench, context(), SETTINGS)
    # Each round has a reference of its own, and theirs differ.
    references = [measured[0].median_us / measured[0].ratio for measured in result.rounds]
    assert max(references) > 1.01 * min(references)
    times_us = {key: statistics.median(times) for key, times in bench.times.items()}
    assert set(result.ranking) == set(times_us)
    in_turn = [times_us[key] for key in result.ranking]
    assert in_turn == pytest.approx(sorted(in_turn))


def test_a_failing_candidate_leaves_the_halving_and_is_not_asked_again() -> None:
    chosen = made_up(6)
    table = Table(chosen, [10.0, 9.0, 8.0, 7.0, 6.0, 5.0], failing=5)
    ledger = Ledger()
    ranked = halve(chosen, table, ledger, finalists=2)
    assert ranked[0].proposal is chosen[4]
    assert ledger.failures == {"key5": Failure(FailureKind.CRASH, "made to")}
    assert [count for count, _ in table.calls] == sorted((count for count, _ in table.calls), reverse=True)
    assert halve([chosen[5]], table, ledger) == []


@pytest.mark.parametrize("time", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("known", [False, True])
def test_a_time_that_can_be_none_is_a_failure_and_no_winner(time: float, known: bool) -> None:
    chosen = made_up(4)  # the first is what the others are compared with
    table = Table(chosen, [time, 20.0, time, 10.0])
    ledger = Ledger.resume({"key2": [time, time], **{f"key{place}": [20.0 + place] * 2 for place in (0, 1, 3)}} if known else {})
    ranked = halve(chosen, table, ledger, finalists=1)
    assert {item.proposal.key for item in ranked} == ({"key0", "key1", "key3"} - ({"key0"} if table.calls else set()))
    assert "key2" in ledger.failures
    assert all(np.isfinite(item.ratio) and item.median_us > 0.0 for item in ranked)


def test_a_ledger_answers_from_what_is_known_while_that_suffices_for_all() -> None:
    chosen = made_up(3)
    table = Table(chosen, [10.0, 20.0, 30.0])
    ledger = Ledger.resume({"key0": [1.0, 2.0, 3.0], "key1": [4.0, 5.0], "key2": [6.0, 7.0, 8.0]})
    assert ledger.take(chosen, 2, table) == {"key0": [1.0, 2.0], "key1": [4.0, 5.0], "key2": [6.0, 7.0]}
    assert (table.calls, ledger.measured) == ([], 0)
    taken = ledger.take(chosen, 1, table)
    assert (table.calls, ledger.measured) == ([(3, 1)], 3)
    assert all(taken[f"key{place}"][0] >= 10.0 * (place + 1) * 0.99 for place in range(3))
    assert ledger.known == {
        "key0": [1.0, 2.0, *taken["key0"]],
        "key1": [4.0, 5.0, *taken["key1"]],
        "key2": [6.0, 7.0, *taken["key2"]],
    }


def test_a_resumed_halving_compares_no_times_of_two_runs_with_each_other() -> None:
    chosen = made_up(3)
    # When it was interrupted, the machine was twice as fast: beside what was measured then, the new third would look slow.
    ledger = Ledger.resume({"key0": [50.0] * 2, "key1": [45.0] * 2})
    table = Table(chosen, [100.0, 90.0, 80.0])
    ranked = halve(chosen, table, ledger)
    assert table.calls == [(3, 2)]
    assert {item.proposal.key: item.ratio for item in ranked} == pytest.approx({"key0": 1.0, "key1": 0.9, "key2": 0.8}, rel=0.02)


def test_times_that_are_known_but_of_different_rounds_are_not_compared_with_each_other() -> None:
    chosen = made_up(2)
    # After two rounds of both, each was measured without the other.
    known = {"key0": [50.0] * 4, "key1": [45.0] * 4}
    ledger = Ledger.resume(known, lots={"key0": [1, 1, 2, 2], "key1": [1, 1, 3, 3]})
    table = Table(chosen, [100.0, 90.0])
    assert ledger.take(chosen, 2, table) == {"key0": [50.0] * 2, "key1": [45.0] * 2}
    taken = ledger.take(chosen, 2, table)
    assert table.calls == [(2, 2)]
    assert min(*taken["key0"], *taken["key1"]) > 80.0


def test_fewer_known_times_than_wanted_are_used_up_and_no_more() -> None:
    chosen = made_up(2)
    table = Table(chosen, [10.0, 20.0])
    ledger = Ledger.resume({"key0": [1.0] * 3, "key1": [2.0] * 3})
    assert ledger.used(chosen, 5) == {"key0": [1.0] * 3, "key1": [2.0] * 3}
    assert [len(times) for times in ledger.take(chosen, 2, table).values()] == [2, 2]


def test_two_proposals_with_one_key_are_refused() -> None:
    chosen = made_up(2)
    with pytest.raises(ValueError, match="canonical"):
        halve([chosen[0], dataclasses.replace(chosen[1], key="key0")], Table(chosen, [1.0, 1.0]), Ledger())


def test_the_loop_ends_with_the_fastest_measured_and_never_worse_than_a_baseline() -> None:
    problem, kernels = synthetic.random_block_problem(5, 40)
    seen: list[LoopState] = []
    result = search_on_device(problem, FakeBench(problem, kernels), context(), SETTINGS, progress=seen.append)
    truth = leftover.simulate_compiled(problem, kernels, result.best.schedule).makespan_us
    based = min(
        leftover.simulate_compiled(problem, kernels, strategy.propose(problem, context(300))[0]).makespan_us for strategy in baselines()
    )
    assert truth <= based * 1.01
    assert result.best_us <= result.baseline_us * 1.01
    assert len(seen) == len(result.rounds) >= 2
    assert seen[-1].measurements == result.ledger.measured > 0
    assert seen[-1].incumbent_us == result.best_us


def test_correction_from_traces_brings_predictions_nearer_to_the_device() -> None:
    problem, kernels = synthetic.random_block_problem(6, 50)
    bench = FakeBench(problem, kernels)
    found = [proposal.schedule for proposal in proposals(problem, context(), lanes_matter=False, count=12)]
    traces = [trace for trace in bench.trace(found[:6]) if isinstance(trace, Trace)]
    for costs in (
        correct_with_traces(problem, list(zip(found[:6], traces, strict=True))),
        correct_with_times(problem, [(schedule, max(trace.end_us) + 5.0) for schedule, trace in zip(found[:6], traces, strict=True)]),
    ):
        better = Problem.make(problem.graph, costs)

        def error(table: Problem) -> float:
            truth = [leftover.simulate_compiled(problem, kernels, schedule).makespan_us for schedule in found]
            return statistics.mean(abs(makespan_us(table, item) / true - 1.0) for item, true in zip(found, truth, strict=True))

        assert error(better) < error(problem)


def test_a_queue_for_room_is_no_reason_to_correct() -> None:
    # Three narrow operators on two cores: the third waits, as the simulator says, and nothing of that is a pair's doing.
    quiet = np.ones((3, 3))
    kernel = np.arange(3, dtype=np.int32)[:, None]
    costs = CostTable((1,), kernel, np.full(3, 10.0), quiet, quiet, 0.0, 0.0, 0.0, 3, room=np.full(3, 0.5))
    problem = Problem.from_arrays([[], [], []], costs)
    schedule = problem.schedule(range(3), range(3))
    run = simulate(problem, schedule)
    assert max(run.end_us) > 19.0
    corrected = correct_with_traces(problem, [(schedule, Trace(run.start_us, run.end_us))])
    assert corrected.slowdown_first == pytest.approx(quiet, rel=0.01)
    assert corrected.slowdown_last == pytest.approx(quiet, rel=0.01)


@pytest.mark.parametrize("one_team", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_threads_that_poll_or_spin_or_wait_for_their_team_are_no_reason_to_correct(seed: int, one_team: bool) -> None:
    made = synthetic.random_problem(seed, 30, widths=(1, 2), max_lanes=2)
    room = np.where(np.isin(np.arange(len(made.solo_us)), made.kernel[:, 0]), 0.5, 1.0)
    disturbing = {"one_team": True} if one_team else {"polling_us": 200.0, "team_spin_us": 1e6}
    costs = dataclasses.replace(made.costs, room=room, cross_lane_us=20.0, **disturbing)
    problem = Problem.make(made.graph, costs)
    rng = np.random.default_rng(seed)
    schedule = problem.schedule(range(30), rng.integers(0, 2, size=30), width_index=(rng.random(30) < 0.2).astype(np.int32))
    run = simulate(problem, schedule)
    assert run.makespan_us > makespan_us(made, schedule)
    corrected = correct_with_traces(problem, [(schedule, Trace(run.start_us, run.end_us))])
    assert corrected.solo_us == pytest.approx(problem.solo_us, rel=0.01)
    assert corrected.slowdown_first == pytest.approx(problem.costs.slowdown_first, rel=0.02)
    assert corrected.slowdown_last == pytest.approx(problem.costs.slowdown_last, rel=0.02)


def test_what_a_wide_operator_of_a_team_waited_for_is_to_blame_though_it_ran_elsewhere() -> None:
    kernel = np.array([[0, 3], [1, 3], [2, 3]], dtype=np.int32)
    slower = np.full((4, 4), 1.2)
    costs = CostTable((1, 2), kernel, np.array([5.0, 20.0, 9.0, 6.0]), slower, slower, 0.0, 1.0, 0.0, 2, one_team=True)
    problem = Problem.from_arrays([[], [], []], costs)
    schedule = problem.schedule([0, 1, 2], [0, 1, 0], width_index=[0, 0, 1])
    corrected = correct_with_times(problem, [(schedule, 2.0 * makespan_us(problem, schedule))])
    assert corrected.slowdown_last[1, 0] > 1.2
    moved = np.argwhere((corrected.slowdown_last != slower) | (corrected.slowdown_first != slower))
    assert moved.tolist() == [[1, 0]]


def test_a_table_without_slowdowns_of_wide_operators_is_corrected_alike() -> None:
    kernel = np.array([[0, 3], [1, 4], [2, 5]], dtype=np.int32)
    solo_us, slower = np.array([5.0, 20.0, 9.0, 6.0, 7.0, 8.0]), np.full((3, 3), 1.2)
    small = CostTable((1, 2), kernel, solo_us, slower, slower, 0.0, 1.0, 0.0, 2, one_team=True)
    first, last = small.slowdowns(range(6))
    large = dataclasses.replace(small, slowdown_first=first, slowdown_last=last)
    trace = Trace((0.0, 1.0, 2.0), (8.0, 30.0, 25.0))  # of the last, which ran alone, the clock says that it had company
    found = []
    for costs in (small, large):
        problem = Problem.from_arrays([[], [], []], costs)
        schedule = problem.schedule([0, 1, 2], [0, 1, 0], width_index=[0, 0, 1])
        timed = correct_with_times(problem, [(schedule, 2.0 * makespan_us(problem, schedule))])
        found.append((timed, correct_with_traces(problem, [(schedule, trace)])))
    for mine, its in zip(*found, strict=True):
        assert mine.slowdown_last.shape == (3, 3)
        assert (mine.slowdown_last != slower).any()
        for name in ("slowdown_first", "slowdown_last"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(its, name)[:3, :3])


def test_times_correct_a_table_that_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, _ = synthetic.random_block_problem(7, 20)
    schedules = [problem.schedule(range(20), [(index + shift) % 4 for index in range(20)]) for shift in range(5)]
    made: list[int] = []
    make = Problem.make
    monkeypatch.setattr(Problem, "make", lambda *given, **named: made.append(1) or make(*given, **named))
    costs = correct_with_times(problem, [(schedule, 2.0 * makespan_us(problem, schedule)) for schedule in schedules])
    assert (costs.slowdown_last != problem.costs.slowdown_last).any()
    assert len(made) == 1


def test_correction_stays_within_its_band() -> None:
    problem, _ = synthetic.random_block_problem(7, 20)
    schedule = problem.schedule(range(20), [index % 4 for index in range(20)])
    absurd = Trace(tuple(float(index) for index in range(20)), tuple(1e6 + index for index in range(20)))
    costs = correct_with_traces(problem, [(schedule, absurd)], CorrectionLimits(slowdown_band=1.5, solo_band=1.1))
    assert (costs.slowdown_last <= problem.costs.slowdown_last * 1.5 * (1 + 1e-12)).all()
    assert (costs.slowdown_first >= problem.costs.slowdown_first / 1.5 * (1 - 1e-12)).all()
    assert (costs.solo_us <= problem.solo_us * 1.1 * (1 + 1e-12)).all()
    assert (costs.slowdown_last != problem.costs.slowdown_last).any()


def test_a_killed_loop_goes_on_to_the_same_result() -> None:
    problem, kernels = synthetic.random_block_problem(8, 25)
    whole = FakeBench(problem, kernels)
    expected = search_on_device(problem, whole, context(2000), SETTINGS)
    broken = FakeBench(problem, kernels, die_after=whole.runs // 2)
    with pytest.raises(Killed):
        search_on_device(problem, broken, context(2000), SETTINGS)
    known = {key: list(times) for key, times in broken.times.items() if times}
    resumed_bench = FakeBench(problem, kernels)
    resumed_bench.times = {key: list(times) for key, times in known.items()}
    result = search_on_device(problem, resumed_bench, context(2000), SETTINGS, known_times_us=known, known_traces=dict(broken.known_traces))
    assert result.best.key == expected.best.key
    assert result.best_us == expected.best_us
    assert 0 < sum(map(len, known.values())) == expected.ledger.measured - result.ledger.measured


def test_a_loop_whose_only_find_had_failed_goes_on_to_the_same_result() -> None:
    problem, kernels = synthetic.random_block_problem(8, 25)
    few = dataclasses.replace(SETTINGS, candidates=1)

    def found(bench: FakeBench, **known: Any) -> LoopResult:
        return search_on_device(problem, bench, context(2000), few, strategies=(), **known)

    probe = FakeBench(problem, kernels)
    found(probe)
    second = list(probe.times)[1]
    whole, resumed = (FakeBench(problem, kernels, fail=frozenset({second})) for _ in range(2))
    expected = found(whole)
    assert second in expected.ledger.failures
    result = found(resumed, known_times_us=whole.times, known_failures=expected.ledger.failures, known_traces=whole.known_traces)
    assert resumed.runs == 0
    assert result.rounds == expected.rounds


def test_a_loop_without_traces_still_corrects_and_a_failing_best_is_replaced() -> None:
    problem, kernels = synthetic.random_block_problem(9, 25)
    first = search_on_device(problem, FakeBench(problem, kernels, traces=False), context(2000), SETTINGS)
    assert (first.costs.slowdown_last != problem.costs.slowdown_last).any()
    again = search_on_device(problem, FakeBench(problem, kernels, traces=False, fail=frozenset([first.best.key])), context(2000), SETTINGS)
    assert again.best.key != first.best.key
    assert first.best.key in again.ledger.failures


def test_a_loop_in_which_everything_fails_says_why() -> None:
    problem, kernels = synthetic.random_block_problem(9, 10)

    class Broken(FakeBench):
        def measure(self, schedules, rounds):  # type: ignore[no-untyped-def]
            return [Failure(FailureKind.OOM, "out of memory")] * len(schedules)

    with pytest.raises(NoFeasibleCandidate, match="oom: out of memory"):
        search_on_device(problem, Broken(problem, kernels), context(500), SETTINGS)


def test_every_effort_has_a_profile_and_more_effort_measures_more() -> None:
    quick, balanced, full = (PROFILES[effort] for effort in Effort)
    assert quick.evaluations < balanced.evaluations < full.evaluations
    assert quick.loop(lanes_matter=True).rounds < full.loop(lanes_matter=True).rounds


def test_priorities_follow_the_slack_and_make_another_canonical_form() -> None:
    problem = Problem.from_arrays([[], [0], [0], [1, 2]], flat_costs([1.0, 9.0, 1.0, 1.0]))
    found = by_path(problem, problem.schedule(range(4), [0, 0, 1, 0]))
    assert found.priority == (3, 3, 0, 3)
    assert violations(problem.graph, found) == []
    # As slow as it is in another variant, the third lies on the longest path, and the second is what has slack.
    costs = flat_costs([1.0, 9.0, 1.0, 1.0, 20.0])
    other = np.array([0, 1, 4, 3], dtype=np.int32)
    usual, number = np.zeros((4, 1), dtype=np.int32), (other == 4).astype(np.int32)
    table = dataclasses.replace(costs, kernel=costs.kernel[:4], variant=usual, other_kernel=other, other_variant=number)
    problem = Problem.from_arrays([[], [0], [0], [1, 2]], table)
    assert by_path(problem, problem.schedule(range(4), [0, 0, 1, 0], width_index=[0, 0, 1, 0])).priority == (3, 0, 3, 3)
    random = synthetic.random_problem(2, 20)
    chosen = proposals(random, context(1000), lanes_matter=False, count=20, priority_variants=2)
    assert sum(name.endswith("+priority") for proposal in chosen for name in proposal.strategies) == 2
    assert len({proposal.key for proposal in chosen}) == len(chosen)


def test_a_device_study_is_resumable_and_measures_no_schedule_twice(tmp_path: Path) -> None:
    problem, kernels = synthetic.random_block_problem(10, 20)
    incumbent = proposals(problem, context(200), lanes_matter=False, count=3)[0]

    def study(bench: FakeBench, ledger: Ledger, path: str) -> StudyResult:
        budget = dataclasses.replace(context(), study_path=path)
        return study_on_device(problem, bench, budget, ledger, incumbent=incumbent, lanes_matter=False, trials=16, rounds=3)

    whole = FakeBench(problem, kernels)
    expected = study(whole, Ledger(), str(tmp_path / "whole.db"))
    assert expected.trials == 16
    assert expected.best is not None
    assert all(len(times) == 3 for key, times in whole.times.items() if key != incumbent.key)
    broken = FakeBench(problem, kernels, die_after=whole.runs // 2)
    with pytest.raises(Killed):
        study(broken, Ledger(), str(tmp_path / "broken.db"))
    resumed = FakeBench(problem, kernels)
    resumed.times = {key: list(times) for key, times in broken.times.items() if len(times) >= 3}
    result = study(resumed, Ledger.resume(resumed.times), str(tmp_path / "broken.db"))
    assert result.best is not None
    assert (result.best.key, result.best_us, result.trials) == (expected.best.key, expected.best_us, 16)


def test_a_device_study_whose_file_is_removed_measures_nothing_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problem, kernels = synthetic.random_block_problem(10, 20)
    incumbent = proposals(problem, context(200), lanes_matter=False, count=3)[0]
    path = tmp_path / "study.db"

    class Removing(FakeBench):
        def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
            path.unlink(missing_ok=True)
            return super().measure(schedules, rounds)

    def study(bench: FakeBench, budget: SearchContext) -> StudyResult:
        return study_on_device(problem, bench, budget, Ledger(), incumbent=incumbent, lanes_matter=False, trials=16, rounds=3)

    whole, removing = FakeBench(problem, kernels), Removing(problem, kernels)
    expected = study(whole, context())
    assert study(removing, dataclasses.replace(context(), study_path=str(path))) == expected
    assert removing.times == whole.times
    assert "in memory only" in caplog.text


def test_a_machine_that_becomes_faster_makes_no_later_trial_of_a_study_better() -> None:
    problem, kernels = synthetic.random_block_problem(10, 20)
    incumbent = proposals(problem, context(200), lanes_matter=False, count=3)[0]

    class Accelerating(FakeBench):
        """Twice as fast with each call, which leaves every ratio exactly as it was."""

        calls = 0

        def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
            found = super().measure(schedules, rounds)
            self.calls += 1
            return [item if isinstance(item, Failure) else [0.5**self.calls * time for time in item] for item in found]

    def study(bench: FakeBench) -> StudyResult:
        return study_on_device(problem, bench, context(), Ledger(), incumbent=incumbent, lanes_matter=False, trials=16, rounds=3)

    steady, drifting = study(FakeBench(problem, kernels)), study(Accelerating(problem, kernels))
    assert steady.best is not None
    assert drifting.best is not None
    assert (drifting.best.key, drifting.best_us) == (steady.best.key, 0.5 * steady.best_us)
