"""The final say: what is kept, what is claimed, and what a restless machine may not decide. All times are simulated."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from autosched.core.progress import Silent
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.device.timing import Ratio, noise_floor_pct, paired_ratio
from autosched.pipeline.judge import Duel, External, Judgement, Times, claimable, duel, finalists, interleave, judge
from tests.conformance.graphs import TwoBranches, two_branches_program
from tests.conformance.session_double import SessionDouble

GRAPH = two_branches_program(TwoBranches())[0].graph
LANES = [index % 2 for index in range(len(GRAPH))]
SEQUENTIAL = sequential(GRAPH)
WIDE = sequential(GRAPH, width=2)
SPREAD = make_schedule(GRAPH, range(len(GRAPH)), LANES)


def run(
    sequential_us: float,
    wide_us: float,
    spread_us: float | Failure,
    *,
    externals: list[External] | None = None,
    noise: float = 0.01,
    drift: float = 0.0,
    rounds: int = 40,
) -> tuple[Times, Judgement]:
    times_us = {SEQUENTIAL: sequential_us, WIDE: wide_us, SPREAD: spread_us}
    session = SessionDouble(lambda schedule: times_us[schedule], noise=noise, drift=drift)
    named = [("sequential", SEQUENTIAL), ("sequential_wide", WIDE), ("beam", SPREAD)]
    outside = externals or []
    times = interleave(session, named, outside, rounds=rounds, deadline=time.monotonic() + 60, progress=Silent(), anchor="sequential")
    best, base = finalists(times, ["beam"], ["sequential", "sequential_wide"])
    schedules = dict(named)
    fought = duel(session, schedules[best], schedules[base], rounds=rounds, seconds=60.0) if best is not None else None
    return times, judge(times, ["beam"], ["sequential", "sequential_wide"], [item.name for item in outside], fought)


def test_a_clear_winner_is_kept_with_its_interval() -> None:
    _, judgement = run(1000.0, 900.0, 700.0)
    assert judgement.chosen == "beam"
    assert judgement.ratio.ci_low < 700 / 900 < judgement.ratio.ci_high
    assert "beam kept" in judgement.verdict
    assert "sequential_wide" in judgement.verdict


@pytest.mark.parametrize(("spread_us", "rounds"), [(9000.0, 7), (1500.0, 15)])
def test_a_late_duel_ends_early_only_where_the_candidate_is_no_rival(spread_us: float, rounds: int) -> None:
    session = SessionDouble(lambda schedule: spread_us if schedule == SPREAD else 1000.0, noise=0.01)
    fought = duel(session, SPREAD, SEQUENTIAL, rounds=40, seconds=0.0)
    assert isinstance(fought, Duel)
    assert {len(column) for column in (fought.candidate_us, fought.base_us, fought.again_us)} == {rounds}


_WILD = (500.0, 2000.0, 600.0, 1500.0) * 3, (1900.0, 550.0, 1600.0, 500.0) * 3
# An A/A floor of 30 %, and one round in which everything takes ten times as long.
_OUTLIER = (500.0, 1000.0, 700.0, 9000.0) * 3, (700.0, 1400.0, 980.0, 9500.0) * 3


@pytest.mark.parametrize(
    ("times_us", "factor", "told"), [(_WILD, 18.0, True), (_WILD, 2.0, False), (_OUTLIER, 9.0, True), (_OUTLIER, 1.3, False)]
)
def test_who_is_no_rival_has_lost_on_the_most_restless_machine(
    times_us: tuple[tuple[float, ...], tuple[float, ...]], factor: float, told: bool
) -> None:
    base, again = times_us
    candidate = tuple(factor * time_us for time_us in base)
    times = Times({"sequential": [*base], "beam": [*candidate]}, {}, "sequential", [*again])
    judgement = judge(times, ["beam"], ["sequential"], [], Duel(candidate, base, again))
    assert judgement.restless
    assert judgement.unstable is not told
    assert ("too noisy" not in judgement.verdict) is told


def test_a_gain_within_noise_keeps_the_best_sequential_schedule_and_says_why() -> None:
    _, judgement = run(1000.0, 1300.0, 990.0, noise=0.03)
    assert judgement.chosen == "sequential"
    assert judgement.ratio.ratio == 1.0
    assert "sequential kept" in judgement.verdict
    assert "noise floor" in judgement.verdict


def test_a_candidate_that_was_only_lucky_loses_the_duel() -> None:
    times, _ = run(1000.0, 1300.0, 950.0)
    fought = Duel((1000.0, 1010.0, 990.0) * 8, (1000.0, 1005.0, 995.0) * 8, (1001.0, 1004.0, 996.0) * 8)
    judgement = judge(times, ["beam"], ["sequential", "sequential_wide"], [], fought)
    assert judgement.chosen == "sequential"


def test_a_candidate_that_dies_in_the_duel_is_not_kept() -> None:
    times, _ = run(1000.0, 1300.0, 700.0)
    judgement = judge(times, ["beam"], ["sequential", "sequential_wide"], [], Failure(FailureKind.CRASH, "boom"))
    assert judgement.chosen == "sequential"
    assert "boom" in judgement.verdict
    assert judgement.ratio == Ratio(1.0, 1.0, 1.0, 40)
    assert not judgement.restless
    assert not judgement.unstable


@pytest.mark.parametrize(("candidates", "words"), [(["beam"], "no candidate could be measured"), ([], "nothing else to choose from")])
def test_without_a_candidate_the_best_sequential_schedule_is_kept(candidates: list[str], words: str) -> None:
    times, _ = run(1000.0, 900.0, Failure(FailureKind.CRASH, "boom"))
    judgement = judge(times, candidates, ["sequential", "sequential_wide"], [], None)
    assert judgement.chosen == "sequential_wide"
    assert judgement.ratio == Ratio(1.0, 1.0, 1.0, 40)
    assert words in judgement.verdict
    assert not judgement.unstable


def test_a_report_has_the_raw_times_of_every_round_and_the_second_column_of_the_anchor() -> None:
    times, _ = run(1000.0, 1300.0, 950.0)
    rounds = times.rounds()
    assert [(item.name, item.again) for item in rounds] == [*((name, False) for name in times.columns), (times.anchor, True)]
    for item, column in zip(rounds, [*times.columns.values(), times.again], strict=True):
        assert item.times_us == pytest.approx(column, abs=0.005)
    assert Times({}, {}, "sequential", []).rounds() == ()


def test_a_slower_candidate_is_never_kept() -> None:
    _, judgement = run(1000.0, 900.0, 1100.0)
    assert judgement.chosen == "sequential_wide"
    assert "slower" in judgement.verdict


def test_drift_that_hits_everyone_changes_nothing() -> None:
    _, judgement = run(1000.0, 1200.0, 900.0, drift=0.002)
    assert judgement.chosen == "beam"
    assert 0.88 < judgement.ratio.ratio < 0.92


def test_the_luckiest_of_sixteen_equal_schedules_looks_faster_until_the_duel_and_is_hardly_ever_kept() -> None:
    named = [("sequential", SEQUENTIAL), *((f"candidate_{place}", SPREAD) for place in range(16))]
    names = [name for name, _ in named[1:]]
    by_luck: list[float] = []
    in_duel: list[float] = []
    kept = 0
    for seed in range(60):
        session = SessionDouble(lambda schedule: 1000.0, noise=0.05, seed=seed)
        times = interleave(session, named, [], rounds=15, deadline=time.monotonic() + 60, progress=Silent(), anchor="sequential")
        best, _ = finalists(times, names, ["sequential"])
        assert best is not None
        by_luck.append(paired_ratio(times.columns[best], times.columns["sequential"]).ratio)
        fought = duel(session, SPREAD, SEQUENTIAL, rounds=15, seconds=60.0)
        assert isinstance(fought, Duel)
        in_duel.append(paired_ratio(fought.candidate_us, fought.base_us).ratio)
        kept += judge(times, names, ["sequential"], [], fought).chosen != "sequential"
    assert statistics.mean(by_luck) < 0.985
    assert 0.993 < statistics.mean(in_duel) < 1.007
    assert kept <= 2


def at_two_paces(truth_us: float, slow: int) -> list[float]:
    """Of 24 rounds, the first ``slow`` at the slower pace."""
    return [truth_us * (1.1 if turn < slow else 1.0) for turn in range(24)]


@pytest.mark.parametrize("anchor", ["sequential", "sequential_wide"])
def test_the_sequential_schedule_to_beat_is_the_faster_one_in_pairs_whichever_met_the_slower_pace_more_often(anchor: str) -> None:
    better, worse = at_two_paces(1000.0, 13), at_two_paces(1030.0, 11)
    assert statistics.median(better) > statistics.median(worse)
    times = Times({"sequential": better, "sequential_wide": worse, "beam": [1010.0] * 24}, {}, anchor, better)
    assert finalists(times, ["beam"], ["sequential", "sequential_wide"]) == ("beam", "sequential")
    assert judge(times, [], ["sequential", "sequential_wide"], [], None).chosen == "sequential"


def test_so_is_the_best_candidate() -> None:
    better, worse, sequential_us = at_two_paces(960.0, 13), at_two_paces(980.0, 11), at_two_paces(1000.0, 12)
    assert statistics.median(better) > statistics.median(worse)
    times = Times({"sequential": sequential_us, "beam": worse, "anneal": better}, {}, "sequential", sequential_us)
    assert finalists(times, ["beam", "anneal"], ["sequential"]) == ("anneal", "sequential")


def test_so_is_the_baseline_that_cannot_be_kept() -> None:
    compiled, sequential_us = at_two_paces(950.0, 13), at_two_paces(1000.0, 11)
    assert statistics.median(compiled) > statistics.median(sequential_us)
    times = Times({"sequential": sequential_us, "torch_compile": compiled}, {}, "sequential", sequential_us)
    assert "torch_compile is faster still" in judge(times, [], ["sequential"], ["torch_compile"], None).verdict


def test_a_wide_floor_alone_forbids_no_claim_beyond_it() -> None:
    clear = paired_ratio([600.0, 601.0, 599.0] * 10, [1000.0] * 30)
    assert claimable(clear, 30.0, restless=False)
    assert not claimable(clear, 30.0, restless=True)
    assert not claimable(clear, 50.0, restless=False)


def test_a_restless_machine_decides_nothing() -> None:
    _, judgement = run(1000.0, 2000.0, 900.0, noise=0.9)
    assert judgement.unstable
    assert judgement.chosen == "sequential"
    assert "too noisy" in judgement.verdict


@pytest.mark.parametrize(("gain", "chosen", "certain"), [(0.06, "beam", True), (0.01, "sequential", False), (-0.06, "sequential", True)])
def test_a_change_of_pace_that_cancels_within_each_round_hides_no_winner_and_no_loser(gain: float, chosen: str, certain: bool) -> None:
    times, _ = run(1000.0, 1300.0, 950.0)
    paces = [1000.0 + place % 5 for place in range(12)] + [1800.0 + place % 7 for place in range(12)]
    again = [pace * (1.0 + (0.02 if place % 2 else -0.02)) for place, pace in enumerate(paces)]
    fought = Duel(tuple(pace * (1.0 - gain) for pace in paces), tuple(paces), tuple(again))
    judgement = judge(times, ["beam"], ["sequential", "sequential_wide"], [], fought)
    assert judgement.chosen == chosen
    assert judgement.restless
    assert judgement.unstable == (not certain)
    assert ("changed its pace" in judgement.verdict) == certain
    assert f"{chosen} kept" in judgement.verdict
    assert ("too noisy" in judgement.verdict) == (not certain)


def test_a_faster_external_baseline_is_named_though_it_cannot_be_kept() -> None:
    _, judgement = run(1000.0, 1200.0, 900.0, externals=[External("torch_compile", lambda: 600.0)])
    assert judgement.chosen == "beam"
    assert "torch_compile is faster still" in judgement.verdict


def test_a_candidate_that_fails_becomes_a_failure_and_the_rest_goes_on() -> None:
    times, judgement = run(1000.0, 1100.0, Failure(FailureKind.CRASH, "boom"))
    assert times.failures["beam"].kind is FailureKind.CRASH
    assert len(times.columns["sequential"]) == 40
    assert judgement.chosen == "sequential"


@pytest.mark.parametrize("change", [0.0005, -0.0005])
@pytest.mark.parametrize("rounds", [7, 24, 40])
def test_a_baseline_that_cannot_be_kept_is_not_the_slower_or_faster_one_for_when_it_ran(change: float, rounds: int) -> None:
    turns = itertools.count()

    def now_us() -> float:
        # A machine that warms up, or that is left alone.
        return float(1000.0 * (1.0 + change) ** next(turns))

    session = SessionDouble(lambda schedule: now_us(), noise=0.0005)
    outside = [External("eager", now_us), External("torch_compile", now_us)]
    named = [("sequential", SEQUENTIAL), ("sequential_wide", WIDE)]
    times = interleave(session, named, outside, rounds=rounds, deadline=time.monotonic() + 60, progress=Silent(), anchor="sequential")
    floor = noise_floor_pct(times.columns["sequential"], times.again)
    for item in outside:
        found = paired_ratio(times.columns[item.name], times.columns["sequential"])
        assert found.ci_low < 1.0 < found.ci_high
        assert not claimable(found, floor, restless=False)
    assert "faster still" not in judge(times, [], ["sequential"], ["eager", "torch_compile"], None).verdict


def test_a_baseline_that_is_as_fast_is_hardly_ever_called_faster_or_slower_for_the_pace_it_met() -> None:
    """Two hundred machines whose pace rises and falls by a tenth, once in seven to forty rounds."""
    claims = covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        turns, phase, period = itertools.count(), rng.random(), 7.0 * 6.0 ** rng.random()

        def now_us(rng: np.random.Generator = rng, turns: Iterator[int] = turns, phase: float = phase, period: float = period) -> float:
            # A round is four turns: two schedules, one of them again, and the baseline.
            pace = 1.0 + 0.1 * math.sin(2.0 * math.pi * (phase + next(turns) / (4.0 * period)))
            return 1000.0 * pace * math.exp(0.01 * rng.standard_normal())

        session = SessionDouble(lambda schedule, now_us=now_us: now_us())
        named = [("sequential", SEQUENTIAL), ("sequential_wide", WIDE)]
        outside = [External("torch_compile", now_us)]
        times = interleave(session, named, outside, rounds=24, deadline=time.monotonic() + 60, progress=Silent(), anchor="sequential")
        found = paired_ratio(times.columns["sequential"], times.columns["torch_compile"])
        claims += claimable(found, noise_floor_pct(times.columns["sequential"], times.again), restless=False)
        covered += found.ci_low <= 1.0 <= found.ci_high
    assert claims <= 4
    assert covered >= 190


def failing_after(calls: int) -> Callable[[], float | Failure]:
    left = [calls]

    def round_us() -> float | Failure:
        left[0] -= 1
        return 500.0 if left[0] >= 0 else Failure(FailureKind.TIMEOUT, "hung")

    return round_us


@pytest.mark.parametrize("calls", [0, 6])
def test_an_external_that_fails_is_left_out(calls: int) -> None:
    times, judgement = run(1000.0, 1100.0, 900.0, externals=[External("torch_compile", failing_after(calls))])
    assert "torch_compile" not in times.columns
    assert times.failures["torch_compile"].kind is FailureKind.TIMEOUT
    assert "torch_compile" not in judgement.verdict


def test_without_time_seven_rounds_are_still_made() -> None:
    session = SessionDouble(lambda schedule: 100.0)
    times = interleave(session, [("sequential", SEQUENTIAL)], [], rounds=40, deadline=0.0, progress=Silent(), anchor="sequential")
    assert 7 <= len(times.columns["sequential"]) <= 8
    assert len(times.again) == len(times.columns["sequential"])


class Timed(SessionDouble):
    """Takes a second of the test's clock for each schedule and round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(lambda schedule: 100.0)
        self.now_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        self.now_s += rounds * len(schedules)
        return super().paired(schedules, rounds=rounds)


@pytest.mark.parametrize(("deadline_s", "rounds"), [(0.0, 7), (14.0, 7), (21.0, 10), (22.0, 11), (79.0, 39), (1000.0, 40)])
def test_rounds_end_before_the_deadline_and_never_below_the_least(monkeypatch: pytest.MonkeyPatch, deadline_s: float, rounds: int) -> None:
    session = Timed(monkeypatch)
    named = [("sequential", SEQUENTIAL)]  # two seconds a round: the anchor stands twice
    times = interleave(session, named, [], rounds=40, deadline=deadline_s, progress=Silent(), anchor="sequential")
    assert len(times.columns["sequential"]) == rounds
    assert session.now_s <= max(deadline_s, 14.0)


@pytest.mark.parametrize("rounds", [0, 1, 3, 5, 6])
def test_fewer_rounds_than_the_least_are_made_where_no_more_are_wanted(rounds: int) -> None:
    session = SessionDouble(lambda schedule: 100.0)
    outside = [External("eager", lambda: 100.0)]
    times = interleave(session, [("sequential", SEQUENTIAL)], outside, rounds=rounds, deadline=0.0, progress=Silent(), anchor="sequential")
    assert [len(column) for column in (*times.columns.values(), times.again)] == [rounds] * 3


@pytest.mark.parametrize(("deadline_s", "eager_us", "turns"), [(0.0, 300.0, 3), (0.0, 150.0, 7), (100.0, 300.0, 7)])
def test_who_is_no_rival_is_timed_no_further_once_time_is_over(
    deadline_s: float, eager_us: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    session = SessionDouble(lambda schedule: eager_us if max(schedule.width) > 1 else 100.0)
    named, outside = [("sequential", SEQUENTIAL), ("sequential_wide", WIDE)], [External("eager", lambda: eager_us)]
    times = interleave(session, named, outside, rounds=7, deadline=deadline_s, progress=Silent(), anchor="sequential")
    assert {name: len(column) for name, column in times.columns.items()} == {"sequential": 7, "sequential_wide": turns, "eager": turns}
    assert len(times.again) == 7
    assert not times.failures
    # What was taken of it counts.
    assert times.ratio("eager", "sequential").ratio == pytest.approx(eager_us / 100.0)
    assert judge(times, [], ["sequential", "sequential_wide"], ["eager"], None).chosen == "sequential"


def test_of_rounds_one_by_one_a_baseline_runs_before_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quickening(Timed):
        """Rounds of two seconds, and alone of one second."""

        def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
            events.append(f"{rounds} rounds")
            answer = super().paired(schedules, rounds=rounds)
            if rounds == 1:
                self.now_s -= 1.0
            return answer

    def eager() -> float:
        events.append("eager")
        return 100.0

    events: list[str] = []
    named, outside = [("sequential", SEQUENTIAL)], [External("eager", eager)]
    interleave(Quickening(monkeypatch), named, outside, rounds=40, deadline=19.0, progress=Silent(), anchor="sequential")
    assert events == [
        "eager", "eager", "4 rounds", "eager", "eager",
        "eager", "eager", "4 rounds", "eager", "eager",
        "1 rounds", "eager",
        "eager", "1 rounds",
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "rounds"), [(-5.0, 15), (45.0, 15), (61.0, 20), (1000.0, 48)])
def test_a_duel_ends_in_its_time_and_never_below_the_least(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int) -> None:
    session = Timed(monkeypatch)
    fought = duel(session, SPREAD, SEQUENTIAL, rounds=24, seconds=seconds)
    assert isinstance(fought, Duel)
    assert len(fought.candidate_us) == len(fought.base_us) == len(fought.again_us) == rounds


def test_a_session_that_fails_everywhere_ends_the_comparison() -> None:
    def broken(schedule: Schedule) -> Failure:
        return Failure(FailureKind.OOM, "no memory")

    session = SessionDouble(broken)
    times = interleave(
        session, [("sequential", SEQUENTIAL), ("beam", SPREAD)], [], rounds=8, deadline=0.0, progress=Silent(), anchor="sequential"
    )
    assert times.columns.get("sequential", []) == []
    assert set(times.failures) == {"sequential", "beam"}


class Dying(SessionDouble):
    """From its call ``last`` on, the sequential schedule fails."""

    def __init__(self, last: int) -> None:
        super().__init__(lambda schedule: {SEQUENTIAL: 1000.0, WIDE: 900.0, SPREAD: 700.0}[schedule], noise=0.01)
        self.left = last

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        self.left -= 1
        if SEQUENTIAL in schedules and self.left < 0:
            return Failure(FailureKind.CRASH, "boom")
        return super().paired(schedules, rounds=rounds)


@pytest.mark.parametrize("last", [0, 1, 5])
def test_where_the_anchor_dies_another_sequential_schedule_is_the_a_a_test_of_all_rounds(last: int) -> None:
    named = [("sequential", SEQUENTIAL), ("sequential_wide", WIDE), ("beam", SPREAD)]
    times = interleave(
        Dying(last), named, [External("eager", lambda: 2000.0)], rounds=40, deadline=time.monotonic() + 60, progress=Silent(),
        anchor="sequential", stand_ins=["sequential_wide"],
    )  # fmt: skip
    assert set(times.failures) == {"sequential"}
    assert times.anchor == "sequential_wide"
    assert {name: len(column) for name, column in times.columns.items()} == {"sequential_wide": 40, "beam": 40, "eager": 40}
    assert len(times.again) == 40
    assert all(800.0 < time_us < 1000.0 for time_us in times.again)
    assert judge(times, [], ["sequential", "sequential_wide"], ["eager"], None).chosen == "sequential_wide"


class Narrow(SessionDouble):
    """Has room for ``most`` schedules at a time."""

    def __init__(self, most: int) -> None:
        super().__init__(lambda schedule: 1000.0 - 10.0 * schedule.lane.count(1), noise=0.001)
        self.most = most

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        if len(set(schedules)) > self.most:
            return Failure(FailureKind.OOM, "no memory for so many")
        return super().paired(schedules, rounds=rounds)


@pytest.mark.parametrize(("most", "left"), [(1, 1), (2, 2), (4, 3), (6, 6)])
def test_of_schedules_that_fail_only_together_the_first_ones_go_on(most: int, left: int) -> None:
    few = [make_schedule(GRAPH, range(len(GRAPH)), [int(index < count) for index in range(len(GRAPH))]) for count in (4, 3, 2, 1)]
    named = [("sequential", SEQUENTIAL), ("sequential_wide", WIDE), *((f"candidate_{place}", item) for place, item in enumerate(few))]
    times = interleave(Narrow(most), named, [], rounds=8, deadline=time.monotonic() + 60, progress=Silent(), anchor="sequential")
    names = [name for name, _ in named]
    assert list(times.columns) == names[:left]
    assert {len(column) for column in times.columns.values()} == {8}
    assert set(times.failures) == set(names[left:])


@pytest.mark.parametrize(("outside_us", "words"), [(700.0, "faster still"), (960.0, "equally fast within noise"), (1300.0, "")])
def test_a_baseline_that_cannot_be_kept_is_recommended_only_beyond_the_noise_floor(outside_us: float, words: str) -> None:
    spread = [1.0 + 0.001 * (place % 5) for place in range(40)]
    columns = {"sequential": [1000.0 * item for item in spread], "torch_compile": [outside_us * item for item in spread]}
    # Its second measurement took 10 % longer: so much may any two differ by.
    times = Times(columns, {}, "sequential", [1100.0 * item for item in spread])
    judgement = judge(times, [], ["sequential"], ["torch_compile"], None)
    assert judgement.chosen == "sequential"
    assert words in judgement.verdict
    assert ("torch_compile" in judgement.verdict) == bool(words)


def test_a_baseline_that_may_well_be_faster_is_not_called_equally_fast() -> None:
    steady = [1000.0 + place % 2 for place in range(40)]
    # Mostly a tenth faster, now and then half as slow again.
    columns = {"sequential": steady, "torch_compile": [1500.0 if place % 5 < 2 else 900.0 for place in range(40)]}
    verdict = judge(Times(columns, {}, "sequential", steady), [], ["sequential"], ["torch_compile"], None).verdict
    assert "Whether torch_compile is faster is not certain: what was kept takes 1.11 times as long (95 % interval 0." in verdict
    assert "equally fast" not in verdict


def test_a_gain_beyond_the_floor_that_the_interval_does_not_bear_out_is_not_called_within_it() -> None:
    times, _ = run(1000.0, 1300.0, 950.0)
    base = [1000.0] * 20
    candidate = [900.0, 910.0, 920.0, 930.0, 940.0, 1100.0, 1110.0, 1120.0, 945.0, 1105.0] * 2
    judgement = judge(times, ["beam"], ["sequential", "sequential_wide"], [], Duel(tuple(candidate), tuple(base), tuple(base)))
    assert judgement.chosen == "sequential"
    assert "the best candidate, beam, is" in judgement.verdict
    assert "not certain" in judgement.verdict
    assert "noise floor" not in judgement.verdict
