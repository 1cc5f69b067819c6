"""Operators timed in several variants, where one variant ends the measuring process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autosched.core.records import Contamination, Failure, FailureKind, Samples, SoloRecord
from autosched.device.cpu_session import CpuSession
from autosched.device.worker import WorkerDied
from autosched.device.worker_messages import Answer, Request, SoloAnswer, SoloRequest
from tests.conformance.programs import chain_program

RECORD = SoloRecord("s", 1, Samples(2.0, 2.0, 2.0, 2.0, 2.0, 3), Contamination())
DEATH = Failure(FailureKind.TIMEOUT, "no progress")
LENGTH, BAD = 6, 2


@pytest.mark.parametrize(
    ("column", "again", "kept"),
    [
        # All are alike: what ends the process with one of them ends it with the next.
        (1, {6, 7, 8, 9, 10, 11}, [True] * 6),
        # As they come, each is tried: one that was merely slow must not take the times of the others.
        (0, {2, 8}, [True, True, False, True, True, True]),
    ],
)
def test_what_was_timed_before_the_process_ended_stands(
    monkeypatch: pytest.MonkeyPatch, column: int, again: set[int], kept: list[bool]
) -> None:
    skipped: list[tuple[int, ...]] = []

    def ask(self: CpuSession, request: Request) -> Iterator[Answer]:
        assert isinstance(request, SoloRequest)
        skipped.append(request.skip)
        for place in range(2):
            for operator in range(LENGTH):
                if (item := place * LENGTH + operator) in request.skip:
                    continue
                if place >= column and operator == BAD:
                    raise WorkerDied(DEATH, item)
                yield SoloAnswer(operator, place, RECORD)

    monkeypatch.setattr(CpuSession, "_ask", ask)
    program, constants = chain_program(length=LENGTH)
    session = CpuSession(program, constants, timeout_s=5.0, max_lanes=1, widths=(1,))
    found = session.solo_variants([(1, 0), (1, 3)], repeats=3)
    assert [isinstance(row[0], SoloRecord) for row in found] == kept
    assert found[BAD][1] == DEATH
    assert [set(skip) for skip in skipped] == [set(), again]
