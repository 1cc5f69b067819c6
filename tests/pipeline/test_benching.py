"""What ``bench`` claims of times that are known beforehand. All times are simulated."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from autosched.core.errors import UnstableMeasurement
from autosched.core.schedule import Schedule, sequential
from autosched.export.bundle import write_bundle
from autosched.pipeline import benching, call_times
from autosched.pipeline.benching import ROUNDS, BenchResult, bench, stated
from autosched.pipeline.bundles import check
from autosched.pipeline.call_times import bench_paused
from autosched.pipeline.judge import Times
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, random_placement
from tests.conformance.session_double import SessionDouble

_PHRASE = "no difference beyond the noise floor"


def times(tuned_us: float, sequential_us: float, eager_us: float, again: float) -> Times:
    """``again``: what a second measurement of the tuned schedule takes, over the first one."""
    rng = np.random.default_rng(7)

    def column(truth_us: float) -> list[float]:
        return (truth_us * np.exp(0.01 * rng.standard_normal(ROUNDS))).tolist()

    columns = {"tuned": column(tuned_us), "sequential 1 wide": column(sequential_us), "eager_1": column(eager_us)}
    return Times(columns, {}, "tuned", column(again * tuned_us))


@pytest.mark.parametrize(
    ("sequential_us", "eager_us", "beyond", "eager_beyond"),
    [(1500.0, 3000.0, True, True), (1080.0, 3000.0, False, True), (1000.0, 1050.0, False, False), (700.0, 600.0, True, True)],
    ids=["a gain", "a gain within noise", "no gain at all", "a loss"],
)
def test_a_difference_within_the_noise_floor_is_not_claimed(
    sequential_us: float, eager_us: float, beyond: bool, eager_beyond: bool
) -> None:
    taken = times(1000.0, sequential_us, eager_us, again=1.1)
    found = stated("a.autosched", two_branches_bundle(TwoBranches()), taken, ["sequential 1 wide"], "eager_1")
    assert (found.beyond_noise, found.eager_beyond_noise) == (beyond, eager_beyond)
    _, _, against_sequential, against_eager, *_ = found.summary().splitlines()
    assert (_PHRASE in against_sequential) != beyond
    assert (_PHRASE in against_eager) != eager_beyond
    # The figures themselves are there in either case.
    assert f"{found.speedup_vs_sequential:.3f}x" in against_sequential
    assert f"{found.speedup_vs_eager:.3f}x" in against_eager


def test_the_sequential_schedule_to_compare_with_is_the_hardest_to_beat_in_pairs() -> None:
    def column(truth_us: float, slow: int) -> list[float]:
        return [truth_us * (1.1 if turn < slow else 1.0) for turn in range(ROUNDS)]

    # Medians say that the first rival takes 1,100 us, which it does where it meets the slower of two paces.
    columns = {"tuned": column(1010.0, 19), "sequential 1 wide": column(1000.0, 21), "sequential 2 wide": column(1030.0, 19)}
    rivals = ["sequential 2 wide", "sequential 1 wide"]
    found = stated("a.autosched", two_branches_bundle(TwoBranches()), Times(columns, {}, "tuned", columns["tuned"]), rivals, None)
    assert found.sequential_us == pytest.approx(1100.0)
    assert found.speedup_vs_sequential == pytest.approx(1000 / 1010)


def test_a_sequential_schedule_that_was_kept_is_no_different_from_itself() -> None:
    found = stated("a.autosched", two_branches_bundle(TwoBranches()), times(1000.0, 1500.0, 3000.0, 1.0), ["tuned"], None)
    assert (found.speedup_vs_sequential, found.beyond_noise, found.eager_beyond_noise) == (1.0, False, None)
    assert _PHRASE in found.summary()


@pytest.mark.parametrize(
    ("lanes", "variant", "calls_us", "speedup"),
    [
        (1, 1, 2000.0, 1.0),  # the kept schedule itself, whatever its calls would take
        (2, 1, 4000.0, 1.5),
        (2, 1, 1200.0, 1.2),
        (2, 0, 1500.0, 1.5),
    ],
)
def test_what_a_compiler_gains_is_not_called_the_schedules_gain(
    lanes: int, variant: int, calls_us: float, speedup: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TwoBranches().eval()
    graph = two_branches_bundle(model).program.graph
    placed = sequential(graph, width=2) if lanes == 1 else random_placement(random.Random(5), graph, lanes)
    kept = dataclasses.replace(placed, variant=(variant,) * len(graph))

    def truth(schedule: Schedule) -> float:
        if schedule == kept:
            return 1000.0
        return 1500.0 if any(schedule.variant) else calls_us

    monkeypatch.setattr(benching, "open_here", lambda *_: SessionDouble(truth))
    found = bench(write_bundle(tmp_path / "a.autosched", two_branches_bundle(model, schedule=kept)), model, rounds=7)
    assert isinstance(found, BenchResult)
    assert found.speedup_vs_sequential == pytest.approx(speedup)
    assert found.beyond_noise == (speedup > 1.0)


def test_nothing_is_stated_of_times_that_no_statement_can_be_made_of() -> None:
    restless = times(1000.0, 1500.0, 3000.0, 1.0)
    restless.columns["tuned"][:20] = [4000.0] * 20
    with pytest.raises(UnstableMeasurement, match="stop other work"):
        stated("a.autosched", two_branches_bundle(TwoBranches()), restless, ["sequential 1 wide"], "eager_1")


def changing_pace(sequential_us: float, eager_us: float, again: float) -> Times:
    """The first half of the rounds at a fourth of the pace, whatever runs."""
    taken = times(1000.0, sequential_us, eager_us, again)
    for column in (*taken.columns.values(), taken.again):
        column[:20] = [4.0 * time_us for time_us in column[:20]]
    return taken


@pytest.mark.parametrize(
    ("sequential_us", "eager_us", "rivals", "claimed"),
    [
        (1500.0, 3000.0, ["sequential 1 wide"], (True, True)),
        (1010.0, 3000.0, ["sequential 1 wide"], (False, True)),
        (700.0, 1010.0, ["sequential 1 wide"], (True, False)),
        (1500.0, 3000.0, ["tuned"], (False, True)),  # the sequential schedule was kept
    ],
)
def test_a_change_of_pace_that_cancels_within_each_round_hides_no_difference(
    sequential_us: float, eager_us: float, rivals: list[str], claimed: tuple[bool, bool]
) -> None:
    found = stated("a.autosched", two_branches_bundle(TwoBranches()), changing_pace(sequential_us, eager_us, 1.02), rivals, "eager_1")
    assert found.restless
    assert (found.beyond_noise, found.eager_beyond_noise) == claimed
    said = found.summary()
    assert "changed its pace" in said
    # A median of two paces is no time to hold against that of another day.
    assert "today" not in said
    assert not stated("a.autosched", two_branches_bundle(TwoBranches()), times(1000.0, 1500.0, 3000.0, 1.0), rivals, None).restless


@pytest.mark.parametrize(("sequential_us", "eager_us", "again"), [(1010.0, 1010.0, 1.02), (3000.0, 3000.0, 1.4)])
def test_a_change_of_pace_that_no_ratio_stands_out_of_leaves_nothing_to_state(sequential_us: float, eager_us: float, again: float) -> None:
    taken = changing_pace(sequential_us, eager_us, again)
    with pytest.raises(UnstableMeasurement, match="stop other work"):
        stated("a.autosched", two_branches_bundle(TwoBranches()), taken, ["sequential 1 wide"], "eager_1")


@pytest.mark.parametrize(("rounds", "asked", "seconds"), [(None, ROUNDS, 300.0), (30, 30, 3600.0)])
def test_nobody_who_asked_for_no_rounds_waits_longer_than_five_minutes(
    rounds: int | None, asked: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, float] = {}

    def interleave(*_: object, rounds: int, deadline: float, **__: object) -> Times:
        told.update(rounds=rounds, seconds=deadline - time.monotonic())
        return times(1000.0, 1500.0, 3000.0, again=1.0)

    monkeypatch.setattr(benching, "interleave", interleave)
    monkeypatch.setattr(benching, "open_here", lambda *_: SessionDouble(lambda schedule: 1000.0))
    model = TwoBranches().eval()
    found = bench(write_bundle(tmp_path / "a.autosched", two_branches_bundle(model)), model, rounds=rounds)
    assert isinstance(found, BenchResult)
    assert told == {"rounds": asked, "seconds": pytest.approx(seconds, abs=10.0)}


def test_a_strangers_names_are_safe_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoBranches().eval()
    made = two_branches_bundle(model)
    report = dataclasses.replace(made.evidence.report, model="a\x1b[2J", chosen="b\x1b[2J")
    device = dataclasses.replace(made.key.device, name="c\x1b[2J")
    key = msgspec.structs.replace(made.key, device=device)
    bundle = dataclasses.replace(made, evidence=dataclasses.replace(made.evidence, report=report), key=key)
    columns = {name: [1000.0] * 20 for name in ("tuned", "tuned again", "eager_1")}
    monkeypatch.setattr(call_times, "paused_calls_us", lambda *_: columns)
    monkeypatch.setattr(call_times, "load", lambda *_, **__: model)
    path = write_bundle(tmp_path / "a.autosched", bundle)
    benched = stated(path, bundle, times(1000.0, 1500.0, 3000.0, 1.0), ["sequential 1 wide"], None)
    for said in (benched, bench_paused(path, model, 20.0), check(path)):
        lines = said.summary().splitlines()
        assert all(line.isprintable() for line in lines)
        assert "a?[2J" in lines[0]
        assert "b?[2J" in said.summary()
