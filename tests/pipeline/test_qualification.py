"""The rounds of sequential orders: what a failing order costs its lowering, on sessions whose times the test decides."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosched.core.errors import DeviceError
from autosched.core.progress import Silent
from autosched.core.records import Contamination, DeviceKey, Failure, FailureKind, SoftwareKey, SoloRecord
from autosched.core.schedule import Schedule, sequential
from autosched.core.variants import WHOLE, Lowering, Variant, variant_signature
from autosched.datasets.journal import Journal, Scope
from autosched.device.timing import summarize
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.qualification import Entrant, Qualified, enter, qualify
from autosched.runtime.regions.pieces import offered_variants
from tests.conformance.programs import branches_program
from tests.conformance.session_double import SessionDouble, Truth

GRAPH = branches_program(branches=2, depth=1)[0].graph
CRASH = Failure(FailureKind.CRASH, "the kernel crashed")


def entrant(truth: Truth) -> Entrant:
    """One with an order on a lane and a wide one, which take alone 1000 and 500 us."""
    prepared: Any = SimpleNamespace(session=SessionDouble(truth, noise=0.001), lowering="rewritten")
    return Entrant(prepared, tuple(sequential(GRAPH, width=width) for width in (1, 2)), (1000.0, 500.0), None)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second after the one before."""
    looks = itertools.count(1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(looks))


def rounds(*entrants: Entrant, seconds: float = 4.0) -> tuple[list[Qualified], list[tuple[Entrant, Failure]], Ledger]:
    ledger = Ledger()
    timed, failed = qualify(entrants, seconds=seconds, seed=0, ledger=ledger, progress=Silent())
    return timed, failed, ledger


def wide(schedule: Schedule) -> bool:
    return max(schedule.width) > 1


@pytest.mark.parametrize(("broken_wide", "takes_us", "alone_us"), [(True, 900.0, 1000.0), (False, 450.0, 500.0)])
def test_an_order_that_fails_is_out_and_the_lowering_has_the_time_of_the_other(broken_wide: bool, takes_us: float, alone_us: float) -> None:
    one = entrant(lambda schedule: CRASH if wide(schedule) is broken_wide else (450.0 if wide(schedule) else 900.0))
    other = entrant(lambda schedule: 600.0)
    timed, failed, ledger = rounds(one, other)
    assert failed == []
    found = next(item for item in timed if item.entrant is one)
    assert found.sequential.median_us == pytest.approx(takes_us, rel=0.01)
    assert found.alone_us == alone_us
    assert ledger.failures == 1
    assert timed[0].entrant is (one if takes_us < 600.0 else other)


def test_a_lowering_is_out_with_its_last_order_and_the_others_stay() -> None:
    one, other = entrant(lambda schedule: CRASH), entrant(lambda schedule: 600.0)
    timed, failed, ledger = rounds(one, other)
    assert failed == [(one, CRASH)]
    assert [item.entrant for item in timed] == [other]
    assert ledger.failures == 2


def test_an_order_that_fails_in_a_later_round_is_out_and_has_no_part_in_the_time() -> None:
    asked = 0

    def truth(schedule: Schedule) -> float | Failure:
        nonlocal asked
        asked += wide(schedule)
        return (CRASH if asked > 6 else 450.0) if wide(schedule) else 900.0

    one = entrant(truth)
    timed, failed, ledger = rounds(one)
    assert failed == []
    [found] = timed
    assert found.sequential.median_us == pytest.approx(900.0, rel=0.01)
    assert ledger.failures == 1
    # All rounds count that the order on a lane was in.
    assert found.sequential.count >= 7


def test_a_process_that_is_lost_is_a_failure_of_its_lowering_alone() -> None:
    one, other = entrant(lambda schedule: 300.0), entrant(lambda schedule: 600.0)

    def lost(schedules: object, *, rounds: int) -> None:
        raise DeviceError("the worker is gone")

    one.prepared.session.paired = lost  # type: ignore[method-assign, assignment]
    timed, failed, _ = rounds(one, other)
    assert [(item, failure.detail) for item, failure in failed] == [(one, "the worker is gone")]
    assert [item.entrant for item in timed] == [other]


def test_orders_that_are_far_behind_are_not_timed_in_every_round() -> None:
    """Of one order for each width, on many cores, those that could not be the best took nearly all of the time."""
    takes_us = {1: 8000.0, 2: 4000.0, 4: 2000.0, 8: 1000.0, 16: 900.0, 32: 2500.0, 64: 9000.0}
    asked: list[int] = []

    def truth(schedule: Schedule) -> float:
        asked.append(schedule.width[0])
        return takes_us[schedule.width[0]]

    prepared: Any = SimpleNamespace(session=SessionDouble(truth, noise=0.001), lowering="rewritten")
    orders = tuple(sequential(GRAPH, width=width) for width in takes_us)
    [found], failed, ledger = rounds(Entrant(prepared, orders, (1000.0,) * len(orders), None))
    assert failed == []
    assert ledger.failures == 0
    assert found.sequential.median_us == pytest.approx(900.0, rel=0.01)
    assert found.sequential.count == 7
    # One that does not count, two that tell, and the rest; the double looks twice at each.
    assert {width: asked.count(width) // 2 for width in takes_us} == {1: 3, 2: 3, 4: 8, 8: 8, 16: 8, 32: 8, 64: 3}


@pytest.mark.parametrize(("seconds", "made"), [(100.0, 40), (12.0, 11), (4.0, 7), (1.0, 3), (0.0, 3)])
def test_rounds_that_take_far_longer_than_they_should_are_few(seconds: float, made: int) -> None:
    timed, failed, _ = rounds(entrant(lambda schedule: 300.0), entrant(lambda schedule: 600.0), seconds=seconds)
    assert failed == []
    assert [item.sequential.count for item in timed] == [made, made]


class _Products(SessionDouble):
    """A GPU on which cuBLASLt takes a tenth of the time of cuBLAS, and everything else is level."""

    def __init__(self, lowering: Lowering) -> None:
        super().__init__(lambda schedule: 1.0)
        self.limits = dataclasses.replace(self.limits, widths=(1,))
        self.program = dataclasses.replace(branches_program(branches=2, depth=1)[0], lowering=lowering.value)

    def offered(self) -> tuple[tuple[int, ...], ...]:
        return offered_variants(self.program, "cuda")

    def prepare_variants(self, columns: object, limit_s: float | None = None) -> tuple[int, int]:
        return 0, 1

    def compile_variant(self, width: int, variant: int, limit_s: float | None = None) -> dict[int, str]:
        return {}

    def solo_variants(self, columns: Sequence[tuple[int, int]], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        missing = Failure(FailureKind.UNAVAILABLE, "no such variant")

        def answer(operator: int, width: int, variant: int) -> SoloRecord | Failure:
            if variant not in self.offered()[operator]:
                return missing
            name = variant_signature(self.program.graph.operators[operator].signature, variant)
            return SoloRecord(name, width, summarize([30.0 if variant == Variant.CALLS else 3.0] * repeats), Contamination())

        return [[answer(operator, *column) for column in columns] for operator in range(len(self.program.graph))]


@pytest.mark.parametrize("lowering", WHOLE)
def test_code_for_the_whole_model_enters_with_its_products_through_the_faster_library(lowering: Lowering, tmp_path: Path) -> None:
    key = DeviceKey("cuda", "made up", ())
    session = _Products(lowering)
    program = session.program
    captured = SimpleNamespace(program=program)
    prepared: Any = SimpleNamespace(session=session, captured=captured, device=SimpleNamespace(key=key), refused=frozenset())
    with Journal.open(tmp_path / "journal", Scope(key, SoftwareKey(()))) as journal:
        found = enter(prepared, journal, 5, Ledger())
    products = [operator.calls[0].target == "aten::mm.default" for operator in program.graph.operators]
    assert [order.variant for order in found.orders] == [tuple(int(Variant.CUBLASLT) if item else 0 for item in products)]
    assert found.alone_us == (sum(3.0 if item else 30.0 for item in products),)
