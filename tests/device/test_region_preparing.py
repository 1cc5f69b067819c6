"""Regions compiled before anything is measured: what the measuring process is asked, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from autosched.core.errors import UsageError
from autosched.core.records import Failure, FailureKind
from autosched.device.cpu_session import CpuSession
from autosched.device.variants import prepare_regions
from autosched.device.worker import WorkerDied
from autosched.device.worker_messages import (
    LENGTH,
    Answer,
    Broken,
    PrepareRegionsRequest,
    RegionAnswer,
    RegionsPrepared,
    RegionsRequest,
    Request,
    pack,
    read_answer,
    read_request,
)
from tests.conformance.programs import chain_program


class FakeLibrary:
    """Notes what it is asked to prepare; says that it compiled three regions in two processes."""

    def __init__(self) -> None:
        self.compiled = 5
        self.processes = 1
        self.asked: list[tuple[tuple[int, int, int], ...]] = []
        self.limits: list[float | None] = []

    def prepare(self, wanted: Sequence[tuple[int, int, int]], beat: Callable[[], None], *, limit_s: float | None) -> None:
        beat()
        self.asked.append(tuple(wanted))
        self.limits.append(limit_s)
        self.compiled += 3
        self.processes = 2


def test_every_operator_is_prepared_in_every_column() -> None:
    library = FakeLibrary()
    beats: list[int] = []
    request = PrepareRegionsRequest(((1, 1), (2, 1)), 7.5)
    answers = list(prepare_regions(library, 2, request, beats.append))  # type: ignore[arg-type]
    assert answers == [RegionsPrepared(3, 2)]
    assert library.asked == [((0, 1, 1), (1, 1, 1), (0, 2, 1), (1, 2, 1))]
    assert library.limits == [7.5]
    assert beats == [-1]  # while other processes compile, this one shows progress
    assert list(prepare_regions(None, 2, request, beats.append)) == []


def test_the_question_and_the_answer_survive_the_pipe() -> None:
    request, answer = PrepareRegionsRequest(((1, 1),), 2.0), RegionsPrepared(4, 2)
    assert read_request(pack(request)[LENGTH.size :]) == request
    assert read_answer(pack(answer)[LENGTH.size :]) == answer


@pytest.mark.parametrize("ending", ["answer", "broken", "death"])
def test_a_session_says_what_was_prepared_and_survives_what_was_not(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    failure = Failure(FailureKind.CRASH, "it fell over")

    def ask(self: CpuSession, request: Request) -> Iterator[Answer]:
        assert request == PrepareRegionsRequest(((1, 1),), 9.0)
        if ending == "death":
            raise WorkerDied(failure, -1)
        yield RegionsPrepared(6, 2) if ending == "answer" else Broken(failure)

    monkeypatch.setattr(CpuSession, "_ask", ask)
    program, constants = chain_program()
    session = CpuSession(program, constants, timeout_s=5.0, max_lanes=1, widths=(1,))
    # Whatever was not prepared is compiled, and named, when it is asked for.
    assert session.prepare_variants([(1, 1)], 9.0) == ((6, 2) if ending == "answer" else (0, 1))


@pytest.mark.parametrize(("kind", "hung"), [(FailureKind.TIMEOUT, True), (FailureKind.CRASH, False)])
def test_a_compiler_that_hangs_at_one_region_after_another_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: FailureKind, hung: bool
) -> None:
    asked: list[RegionsRequest] = []

    def ask(self: CpuSession, request: Request) -> Iterator[Answer]:
        assert isinstance(request, RegionsRequest)
        asked.append(request)
        for operator in range(6):
            if operator not in request.skip:
                if request.limit_s != 0.0:
                    raise WorkerDied(Failure(kind, "it is gone"), operator)
                yield RegionAnswer(operator, "no time")

    monkeypatch.setattr(CpuSession, "_ask", ask)
    program, constants = chain_program()
    session = CpuSession(program, constants, timeout_s=5.0, max_lanes=1, widths=(1,))
    reasons = session.compile_variant(1, 1)
    assert reasons == {**dict.fromkeys(range(6), "it is gone"), **(dict.fromkeys(range(2, 6), "no time") if hung else {})}
    assert [request.limit_s for request in asked] == ([None, None, 0.0] if hung else [None] * 7)


def test_processes_that_are_lost_do_not_lengthen_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def ask(self: CpuSession, request: Request) -> Iterator[Answer]:
        assert isinstance(request, RegionsRequest)
        limits.append(request.limit_s)
        time.sleep(0.05)
        if len(limits) < 3:
            raise WorkerDied(Failure(FailureKind.CRASH, "it is gone"), len(limits) - 1)
        yield RegionAnswer(2, "")

    monkeypatch.setattr(CpuSession, "_ask", ask)
    program, constants = chain_program()
    session = CpuSession(program, constants, timeout_s=5.0, max_lanes=1, widths=(1,))
    assert session.compile_variant(1, 1, 60.0) == {0: "it is gone", 1: "it is gone", 2: ""}
    first, second, third = limits
    assert first is not None
    assert second is not None
    assert third is not None
    assert 60.0 >= first >= second + 0.05 >= third + 0.1
    assert third > 50.0


def test_a_variable_that_holds_no_number_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    program, constants = chain_program()
    session = CpuSession(program, constants, timeout_s=5.0, max_lanes=1, widths=(1,))
    monkeypatch.setenv("AUTOSCHED_COMPILE_WORKERS", "many")
    with pytest.raises(UsageError, match="AUTOSCHED_COMPILE_WORKERS is 'many'"):
        session.prepare_variants([(1, 1)])
    monkeypatch.setenv("AUTOSCHED_COMPILE_WORKERS", "2")
    monkeypatch.setenv("AUTOSCHED_REGION_LIMIT_S", "0")
    with pytest.raises(UsageError, match="AUTOSCHED_REGION_LIMIT_S is '0'"):
        session.prepare_variants([(1, 1)])
