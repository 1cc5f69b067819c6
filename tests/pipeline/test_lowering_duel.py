"""The winners of two lowerings in turn: what each turn's place does to its time is in no ratio and in no noise floor. Simulated times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autosched.core.progress import Silent
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, sequential
from autosched.pipeline.lowering_duel import duels
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.options import Options, Outcome
from autosched.pipeline.preparing import Prepared
from tests.conformance.graphs import TwoBranches, two_branches_program

SCHEDULE = sequential(two_branches_program(TwoBranches())[0].graph)
COLD = 1.05


class Machine:
    """Times of the schedules of lowerings; the first run in a process after another one's takes ``COLD`` times as long."""

    def __init__(self, times_us: dict[str, float | Failure]) -> None:
        self.times_us = times_us
        self.turns: list[str] = []
        self.fails_after: dict[str, int] = {}
        """Of its turns, how many a lowering makes before it fails."""
        self.recovers = False

    def session(self, lowering: str) -> Any:
        return SimpleNamespace(paired=lambda schedules, *, rounds: self.paired(lowering, schedules, rounds))

    def paired(self, lowering: str, schedules: Sequence[Schedule], rounds: int) -> list[list[float]] | Failure:
        found = self.times_us[lowering]
        if isinstance(found, Failure):
            return found
        assert len(schedules) == 1
        if self.turns.count(lowering) >= self.fails_after.get(lowering, 1_000):
            if self.recovers:
                del self.fails_after[lowering]
            return Failure(FailureKind.CRASH, "gone")
        cold = not self.turns or self.turns[-1] != lowering
        self.turns.append(lowering)
        return [[found * COLD if cold and turn == 0 else found for turn in range(rounds)]]


def fight(machine: Machine, rounds: int = 20) -> tuple[str, dict[str, str], Ledger]:
    lowerings = list(machine.times_us)
    outcomes = [cast(Outcome, SimpleNamespace(report=SimpleNamespace(lowering=name), schedule=SCHEDULE)) for name in lowerings]
    prepared = [cast(Prepared, SimpleNamespace(lowering=name, session=machine.session(name))) for name in lowerings]
    options = cast(Options, SimpleNamespace(budget=SimpleNamespace(total_s=60.0, final_rounds=rounds)))
    ledger = Ledger()
    kept, why = duels(outcomes, prepared, options, ledger, Silent())
    return kept.report.lowering, why, ledger


def test_every_turn_follows_one_of_the_other_process() -> None:
    machine = Machine({"fused": 100.0, "inductor": 98.0})
    kept, why, ledger = fight(machine)
    assert all(before != after for before, after in zip(machine.turns, machine.turns[1:], strict=False))
    # A floor of the five percent that a cold process costs would hide two.
    assert kept == "inductor"
    assert "takes 0.980 times" in why["fused"]
    assert "noise 0.0 %" in why["fused"]
    assert ledger.measurements == 3 * 40 == len(machine.turns) - 2


@pytest.mark.parametrize(("first_us", "second_us", "kept"), [(100.0, 100.0, "fused"), (100.0, 130.0, "fused"), (130.0, 100.0, "inductor")])
def test_the_first_is_kept_unless_the_second_is_faster(first_us: float, second_us: float, kept: str) -> None:
    found, why, _ = fight(Machine({"fused": first_us, "inductor": second_us}))
    assert found == kept
    lost = "inductor" if kept == "fused" else "fused"
    assert f"takes {second_us / first_us:.3f} times" in why[lost]


def test_a_rival_that_fails_leaves_the_first() -> None:
    found, why, ledger = fight(Machine({"fused": 100.0, "inductor": Failure(FailureKind.CRASH, "boom")}))
    assert (found, ledger.measurements) == ("fused", 0)
    assert "boom" in why["inductor"]


@pytest.mark.parametrize("after", [0, 3, 21])
def test_a_first_one_that_fails_by_now_leaves_the_rival(after: int) -> None:
    machine = Machine({"fused": 100.0, "inductor": 130.0})
    machine.fails_after["fused"] = after
    found, why, _ = fight(machine)
    assert found == "inductor"
    assert set(why) == {"fused"}
    assert "gone" in why["fused"]


def test_where_nothing_runs_any_more_the_first_is_kept() -> None:
    machine = Machine({"fused": 100.0, "inductor": 90.0})
    machine.fails_after = {"fused": 5, "inductor": 4}
    found, why, _ = fight(machine)
    assert found == "fused"
    assert "gone" in why["inductor"]


def test_a_failure_that_does_not_come_again_is_nobodys() -> None:
    machine = Machine({"fused": 100.0, "inductor": 90.0})
    machine.fails_after["fused"], machine.recovers = 3, True
    found, why, _ = fight(machine)
    assert found == "fused"
    assert "could not be compared" in why["inductor"]
