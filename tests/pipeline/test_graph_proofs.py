"""The pipeline's proofs on captured graphs, with the double of streams, capture and allocator behind a real worker process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosched.core.graph import OpGraph
from autosched.core.program import InputSpec, Program
from autosched.core.progress import Silent
from autosched.core.records import DeviceKey, Failure, FailureKind, SoftwareKey
from autosched.core.schedule import make_schedule
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Journal, Scope
from autosched.device.cuda.session import CudaSession
from autosched.device.cuda.settings import current_settings
from autosched.pipeline import graph_proofs
from autosched.pipeline.graph_proofs import audit_capture, audit_note, launch_facts, stress_capture
from autosched.pipeline.measuring import Ledger, cost_table, measure_pairs, measure_solo
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.verify.race_stress import StressReport
from tests.conformance.fake_graphs import diamond
from tests.conformance.session_double import SessionDouble

GRAPH = diamond(3, 2)
SPREAD = make_schedule(GRAPH, range(len(GRAPH)), [index % 3 for index in range(len(GRAPH))])
KEY = DeviceKey("cuda", "a double of a GPU", (("sm_count", "132"),))


def program_of(graph: OpGraph) -> Program:
    return Program(graph, (), (), tuple(InputSpec(value, 0, 0, 0.0, 1.0) for value in graph.inputs), "", "", (), (), "aten")


@pytest.fixture(scope="module")
def session() -> Iterator[CudaSession]:
    opened = CudaSession(program_of(GRAPH), {}, timeout_s=60.0, settings=current_settings(0), module="tests.conformance.fake_cuda_worker")
    try:
        yield opened
    finally:
        opened.close()


def test_a_sound_schedule_passes_audit_and_delays(session: CudaSession) -> None:
    assert audit_capture(session, GRAPH, SPREAD) is None
    assert stress_capture(session, GRAPH, SPREAD, 0) is None


def test_a_captured_graph_that_lost_an_edge_is_refused(session: CudaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = session.captured(SPREAD)
    assert isinstance(whole, CapturedGraph)
    cut = dataclasses.replace(whole, edges=whole.edges[:-1])
    monkeypatch.setattr(session, "captured", lambda schedule: cut)
    found = audit_capture(session, GRAPH, SPREAD)
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.MISMATCH
    assert "unsound" in found.detail


def test_a_device_that_cannot_read_its_graphs_back_is_passed_over_but_one_that_cannot_capture_is_not(
    session: CudaSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "captured", lambda schedule: Failure(FailureKind.UNAVAILABLE, "no bindings"))
    assert audit_capture(session, GRAPH, SPREAD) is None
    monkeypatch.setattr(session, "captured", lambda schedule: Failure(FailureKind.CAPTURE, "an operator synchronises"))
    found = audit_capture(session, GRAPH, SPREAD)
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.CAPTURE


def test_a_race_under_delays_is_refused(session: CudaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_proofs, "stress", lambda *_, **__: StressReport(1, 2, ("2 of 2 replays differ",)))
    found = stress_capture(session, GRAPH, SPREAD, 0)
    assert isinstance(found, Failure)
    assert "race" in found.detail


def test_a_report_says_that_graphs_could_not_be_audited(session: CudaSession, monkeypatch: pytest.MonkeyPatch) -> None:
    assert audit_note(session, GRAPH) == ""
    captured = session.captured(SPREAD)
    assert isinstance(captured, CapturedGraph)
    with monkeypatch.context() as patch:
        patch.setattr(session, "captured", lambda schedule: dataclasses.replace(captured, early_edges=3))
        assert audit_note(session, GRAPH).startswith("3 edges of the captured graph let a kernel start")
    monkeypatch.setattr(session, "captured", lambda schedule: Failure(FailureKind.UNAVAILABLE, "no bindings here"))
    note = audit_note(session, GRAPH)
    assert "not audited: no bindings here" in note


def test_a_device_without_graphs_needs_no_such_proof() -> None:
    assert audit_note(SessionDouble(lambda schedule: 1.0), GRAPH) == ""
    plain = SessionDouble(lambda schedule: 1.0)
    assert audit_capture(plain, GRAPH, SPREAD) is None
    assert stress_capture(plain, GRAPH, SPREAD, 0) is None
    assert launch_facts(plain, GRAPH) == {}


def test_measuring_goes_through_the_journal_and_asks_nothing_twice(
    session: CudaSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, ledger = Scope(KEY, SoftwareKey(())), Ledger()
    with Journal.open(tmp_path / "j.jsonl", scope) as journal:
        solo = measure_solo(session, GRAPH, device_facts(KEY), journal, 4, ledger)
        pairs = measure_pairs(session, GRAPH, device_facts(KEY), solo, journal, 30.0, ledger, Silent())
        assert pairs
        table = cost_table(session, GRAPH, KEY, solo, pairs, launch_facts(session, GRAPH))
    assert table.kernel.shape == (len(GRAPH), 1)
    assert table.measured_pairs > 0
    spent = ledger.measurements

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(session, "solo", refuse)
    monkeypatch.setattr(session, "pairs", refuse)
    with Journal.open(tmp_path / "j.jsonl", scope) as journal:
        assert measure_solo(session, GRAPH, device_facts(KEY), journal, 4, ledger) == solo
        assert measure_pairs(session, GRAPH, device_facts(KEY), solo, journal, 30.0, ledger, Silent()) == pairs
    assert ledger.measurements == spent
