"""Variants that round otherwise are given up, the coarsest first, until the operators in order answer as the model does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule
from autosched.core.variants import Variant
from autosched.pipeline.agreeing import agreeing_variants
from autosched.pipeline.measuring import Ledger
from tests.conformance.graphs import TwoBranches, two_branches_program

WIDTHS = (1, 2)
FOUR, TWO = int(Variant.WINOGRAD_4), int(Variant.WINOGRAD_2)


class Job:
    """Every operator is fastest as the first of ``order`` that is not refused; schedules with one of ``wrong`` answer otherwise."""

    def __init__(self, *wrong: int, kind: FailureKind = FailureKind.MISMATCH) -> None:
        self.graph = two_branches_program(TwoBranches(seed=0).eval(), 1)[0].graph
        self.wrong = wrong
        self.kind = kind
        self.proved: list[Schedule] = []
        self.ledger = Ledger()

    def measured(self, refused: Any) -> Any:
        out = {variant for operator, _, variant in refused if operator == -1}
        best = next(variant for variant in (FOUR, TWO, 0) if variant not in out)
        return SimpleNamespace(best=np.full((len(self.graph), len(WIDTHS)), best, dtype=np.int32))

    def refutation(self, schedule: Schedule) -> Failure | None:
        self.proved.append(schedule)
        return Failure(self.kind, "differs by 1") if set(schedule.variant) & set(self.wrong) else None

    def found(self) -> set[int]:
        made = agreeing_variants(self.measured, self.refutation, self.graph, WIDTHS, frozenset(), self.ledger)
        assert made is not None
        return {int(item) for item in made.best.flat}


@pytest.mark.parametrize(("wrong", "kept"), [((), FOUR), ((FOUR,), TWO), ((FOUR, TWO), 0)])
def test_what_does_not_agree_is_left_out(wrong: tuple[int, ...], kept: int) -> None:
    job = Job(*wrong)
    assert job.found() == {kept}
    assert len(job.ledger.notes) == len(wrong)
    assert all("left out: a schedule with it differs by 1" in note for note in job.ledger.notes)
    # Every width is proved where nothing is wrong; without such a variant there is nothing to prove.
    assert len(job.proved) == len(wrong) + (0 if kept == 0 else len(WIDTHS))


def test_another_failure_is_no_reason() -> None:
    job = Job(FOUR, kind=FailureKind.CRASH)
    assert job.found() == {FOUR}
    assert job.ledger.notes == []


def test_operators_of_one_variant_are_not_proved() -> None:
    job = Job()
    assert agreeing_variants(lambda refused: None, job.refutation, job.graph, WIDTHS, frozenset(), job.ledger) is None
    assert job.proved == []
