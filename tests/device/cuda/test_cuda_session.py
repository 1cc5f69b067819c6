"""The CUDA session with its real process, conversation and measurements, on the double: everything but the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autosched.core.errors import DeviceError
from autosched.core.graph import OpGraph
from autosched.core.program import InputSpec, Program
from autosched.core.records import Failure, FailureKind, GroupRecord, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.schedule import canonical_key, make_schedule, sequential
from autosched.device.base import Comparison, Group, Pair, Session
from autosched.device.cuda.messages import ProfileResult, ProfilesBody
from autosched.device.cuda.profile import OperatorProfile
from autosched.device.cuda.session import CudaSession
from autosched.device.cuda.settings import current_settings
from autosched.device.cuda.stress import DelaySet, StressOutcome
from autosched.device.worker import Worker
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.plan import FreeRule, make_plan
from autosched.verify.race_stress import StressReport, stress
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import mix
from tests.conformance.fake_graphs import GraphBuilder, diamond, random_graph, random_schedule
from tests.conformance.fake_program import FakeProgram


def program_of(graph: OpGraph, faults: dict[int, str] | None = None) -> Program:
    if faults:
        operators = tuple(replace(item, source=faults.get(item.index, "")) for item in graph.operators)
        graph = OpGraph(operators, graph.values, graph.inputs, graph.outputs)
    return Program(graph, (), (), tuple(InputSpec(value, 0, 0, 0.0, 1.0) for value in graph.inputs), "", "", (), (), "aten")


def open_session(graph: OpGraph, faults: dict[int, str] | None = None) -> CudaSession:
    return CudaSession(
        program_of(graph, faults),
        {},
        timeout_s=60.0,
        settings=current_settings(0),
        module="tests.conformance.fake_cuda_worker",
    )


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return diamond(3, 2)


@pytest.fixture(scope="module")
def session(graph: OpGraph) -> Iterator[CudaSession]:
    with open_session(graph) as opened:  # type: ignore[attr-defined]
        yield opened  # type: ignore[misc]


def test_limits_are_those_of_streams(session: Session, graph: OpGraph) -> None:
    limits = session.limits
    assert limits.widths == (1,)
    assert limits.priorities == (0, 1, 2, 3)
    assert not limits.lanes_matter
    assert limits.max_lanes == graph.width == 3
    assert limits.launch_gap_us == 0.0
    assert limits.cross_lane_us >= 0.0


def test_solo_times_every_operator_and_refuses_other_widths(session: Session, graph: OpGraph) -> None:
    rows = session.solo([1, 2], repeats=4)
    assert len(rows) == len(graph)
    for operator, (record, refused) in zip(graph.operators, rows, strict=True):
        assert isinstance(record, SoloRecord)
        assert record.signature == operator.signature
        assert record.samples.count == 4
        assert record.samples.median_us == 10.0  # what a kernel takes on the double
        assert isinstance(refused, Failure)
        assert refused.kind is FailureKind.ILLEGAL


def test_pairs_run_side_by_side(session: Session) -> None:
    good, dependent, wide, absent = session.pairs([Pair(1, 3), Pair(1, 2), Pair(1, 3, 2, 1), Pair(0, 99)], repeats=3)
    assert isinstance(good, PairRecord)
    assert good.makespan_ratio == pytest.approx(0.5)
    assert (good.slowdown_first, good.slowdown_last) == (1.0, 1.0)
    assert good.solo_first_us * good.repeats_first == pytest.approx(good.together_us)
    for failure in (dependent, wide, absent):
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.ILLEGAL


def test_groups_run_side_by_side(session: Session) -> None:
    good, dependent, wide, pair, absent = session.groups(
        [Group((1, 3, 5)), Group((1, 2, 5)), Group((1, 3, 5), (2, 1, 1)), Group((1, 3)), Group((1, 3, 99))], repeats=3
    )
    assert isinstance(good, GroupRecord)
    assert good.makespan_ratio == pytest.approx(1 / 3)
    assert good.slowdowns == pytest.approx((1.0, 1.0, 1.0))
    assert good.count == 3
    for failure in (dependent, wide, pair, absent):
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.ILLEGAL


def test_schedules_are_timed_and_traced(session: Session, graph: OpGraph) -> None:
    alone, spread = sequential(graph), make_schedule(graph, range(len(graph)), [0, 0, 0, 1, 1, 2, 2, 0])
    slow, fast = session.schedules([alone, spread], rounds=3, trace=True)
    assert isinstance(slow, ScheduleRecord)
    assert isinstance(fast, ScheduleRecord)
    assert slow.samples.median_us == pytest.approx(80.0)
    assert fast.samples.median_us == pytest.approx(40.0)
    assert fast.key == canonical_key(graph, spread, lanes_matter=False)
    assert min(fast.operator_start_us) == 0.0
    assert max(fast.operator_end_us) == pytest.approx(40.0)
    for edge in graph.edges:
        assert fast.operator_end_us[edge.before] <= fast.operator_start_us[edge.after]
    times = session.paired([alone, spread, alone], rounds=5)
    assert not isinstance(times, Failure)
    assert [len(row) for row in times] == [5, 5, 5]


def test_an_illegal_schedule_never_reaches_the_process(session: CudaSession, graph: OpGraph) -> None:
    bad = replace(sequential(graph), order=tuple(reversed(range(len(graph)))))
    failure = session.schedules([bad, sequential(graph)], rounds=1)
    assert isinstance(failure[0], Failure)
    assert failure[0].kind is FailureKind.ILLEGAL
    assert isinstance(failure[1], ScheduleRecord)
    assert isinstance(session.captured(bad), Failure)
    assert isinstance(session.stressed(bad, [DelaySet(())], replays=1)[0], Failure)


def test_compare_is_bitwise_and_within_tolerance(session: Session, graph: OpGraph) -> None:
    given = [torch.full((4,), 3.0), torch.full((4,), 5.0)]
    cuda = FakeCuda()
    program = FakeProgram(cuda, graph)
    wanted = []
    for tensor in given:
        (number,) = program.answer([cuda.tensor(mix(int(tensor.sum().item())))])
        wanted.append([torch.tensor([float(number % 1_000_003)], dtype=torch.float64)])
    schedule = random_schedule(random.Random(1), graph, 3)
    right = session.compare(schedule, [[item] for item in given], wanted)
    assert right == Comparison(bitwise=True, max_abs_error=0.0, within_tolerance=True)
    wrong = session.compare(schedule, [[given[0]]], [[wanted[0][0] + 5000.0]])
    assert isinstance(wrong, Comparison)
    assert wrong.bitwise
    assert not wrong.within_tolerance
    assert wrong.max_abs_error == 5000.0


def test_an_operator_whose_bits_change_is_named(graph: OpGraph) -> None:
    given, cuda = torch.full((4,), 3.0), FakeCuda()
    (number,) = FakeProgram(cuda, graph).answer([cuda.tensor(mix(12))])
    wanted = [torch.tensor([float(number % 1_000_003)], dtype=torch.float64)]
    with open_session(graph, {3: "gives another number each time"}) as opened:  # type: ignore[attr-defined]
        found = opened.compare(sequential(graph), [[given]], [wanted])
        assert isinstance(found, Failure)
        assert found.kind is FailureKind.MISMATCH
        assert f"operator {graph.operators[3].name} " in found.detail
        assert "cudnn.deterministic" in found.detail
        # It is this process that goes on.
        assert isinstance(opened.solo([1], repeats=2)[0][0], SoloRecord)


@pytest.mark.slow
def test_captured_graphs_pass_the_audit_and_wrong_ones_do_not() -> None:
    pass_count = fail_count = 0
    for seed in range(2):
        rng = random.Random(seed)
        wide = random_graph(rng, 20)
        schedule = random_schedule(rng, wide, 3)
        with open_session(wide) as opened:
            assert isinstance(opened, CudaSession)
            right, wrong = opened.captured(schedule), opened.captured(schedule, FreeRule.LAST_LAUNCH)
        assert isinstance(right, CapturedGraph)
        assert isinstance(wrong, CapturedGraph)
        pass_count += audit_graph(wide, make_plan(wide, schedule), right).sound
        fail_count += not audit_graph(wide, make_plan(wide, schedule), wrong).sound
    assert pass_count == 2
    assert fail_count > 0


def test_stress_through_the_process(session: CudaSession, graph: OpGraph) -> None:
    schedule = random_schedule(random.Random(2), graph, 3)
    report = stress(session, graph, schedule, rng=random.Random(0), replays=10)
    assert isinstance(report, StressReport)
    assert report.sound
    assert report.captures >= 4
    outcomes = session.stressed(schedule, [DelaySet(((1, 50.0),))], replays=2)
    assert outcomes == [StressOutcome(2, 0)]


def test_profiles_cover_every_operator_or_say_why_not(session: CudaSession, graph: OpGraph) -> None:
    # No bindings and no profiler on the double: the second source finds no kernels, and says so by an empty list.
    found = session.profiles(cold=False)
    assert len(found) == len(graph)
    assert all(isinstance(item, (OperatorProfile, Failure)) for item in found)
    assert [item.signature for item in found if isinstance(item, OperatorProfile)] == [operator.signature for operator in graph.operators]


def test_an_operator_is_profiled_in_the_variant_that_is_asked_for(session: CudaSession, graph: OpGraph) -> None:
    # No operator of this graph has another variant than its calls.
    first, *rest = session.profiles(cold=False, variants=[1, *[0] * (len(graph) - 1)])
    assert isinstance(first, Failure)
    assert "has no variant 1" in first.detail
    assert all(isinstance(item, OperatorProfile) for item in rest)


def test_what_has_a_profile_is_not_profiled_again(graph: OpGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ProfilesBody] = []
    extra_answers = CudaSession._extra_answers
    with open_session(graph) as session:

        def noting(self: CudaSession, body: ProfilesBody, kind: type[ProfileResult]) -> Iterator[ProfileResult]:
            asked.append(body)
            return extra_answers(self, body, kind)

        monkeypatch.setattr(CudaSession, "_extra_answers", noting)
        found = session.profiles(cold=False)
        assert session.profiles(cold=False) == found
        in_another = session.profiles(cold=False, variants=[1, *[0] * (len(graph) - 1)])
        session.profiles(cold=True)
    distinct = len({operator.signature for operator in graph.operators})
    assert isinstance(in_another[0], Failure)
    assert [(len(body.operators), body.cold) for body in asked] == [(distinct, False), (1, False), (distinct, True)]


def test_memory_by_rule(session: CudaSession, graph: OpGraph) -> None:
    result = session.memory(random_schedule(random.Random(4), graph, 3))
    assert not isinstance(result, Failure)
    assert 0 < result.eager_bytes <= result.vector_clock_bytes <= result.hold_all_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), [("kills the process", "SIGKILL"), ("loses the device", "illegal memory access")])
def test_a_lost_process_is_one_failure_and_the_rest_is_measured(fault: str, words: str) -> None:
    builder = GraphBuilder()
    ends = [builder.add([builder.inputs[0]], elements=100 * size) for size in (1, 2, 3)]
    builder.add(ends)
    graph = builder.build()
    with open_session(graph, {1: fault}) as session:
        rows = session.solo([1], repeats=2)
        assert isinstance(rows[1][0], Failure)
        assert rows[1][0].kind is FailureKind.CRASH
        assert words in rows[1][0].detail
        assert all(isinstance(rows[index][0], SoloRecord) for index in (0, 2, 3))
        answers = session.pairs([Pair(0, 2), Pair(0, 1), Pair(2, 0)], repeats=2)
        assert [type(answer) for answer in answers] == [PairRecord, Failure, PairRecord]


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["paired", "compare"])
def test_a_schedule_that_loses_the_device_twice_starts_no_third_process(graph: OpGraph, ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    start = Worker.start

    def counted(worker: Worker) -> None:
        started.append(worker)
        start(worker)

    monkeypatch.setattr(Worker, "start", counted)
    with open_session(graph, {2: "loses the device"}) as session:
        schedule, given = sequential(graph), [[torch.full((4,), 3.0)]]
        for _ in range(2):
            found = session.paired([schedule], rounds=1) if ask == "paired" else session.compare(schedule, given, [[torch.zeros(1)]])
            assert isinstance(found, Failure)
            assert found.kind is FailureKind.CRASH
            assert "illegal memory access" in found.detail
    assert len(started) == 2


def test_no_memory_in_a_capture_is_one_failure(graph: OpGraph) -> None:
    faulty, fine = sequential(graph), 0
    with open_session(graph, {2: "runs out of memory"}) as session:
        answer = session.schedules([faulty], rounds=2)[0]
        assert isinstance(answer, Failure)
        assert answer.kind is FailureKind.OOM
        pid = session.worker_pid
        times = session.paired([faulty], rounds=1)
        assert isinstance(times, Failure)
        assert times.kind is FailureKind.OOM
        fine = session.worker_pid == pid
    assert fine  # the process could go on


@pytest.mark.parametrize("fault", ["breaks the capture", "ruins the process"])
def test_a_broken_capture_is_one_failure_and_a_process_that_cannot_capture_on_is_replaced(graph: OpGraph, fault: str) -> None:
    with open_session(graph, {2: fault}) as session:
        first = session.paired([sequential(graph)], rounds=1)
        assert isinstance(first, Failure)
        assert first.kind is FailureKind.CAPTURE
        pid = session.worker_pid
        assert (pid is None) == (fault == "ruins the process")
        assert isinstance(session.solo([1], repeats=2)[0][0], SoloRecord)
        if fault == "breaks the capture":
            answer = session.captured(sequential(graph))  # type: ignore[attr-defined]
            assert isinstance(answer, Failure)
            assert answer.kind is FailureKind.CAPTURE
            assert "op2" in answer.detail


def test_a_closed_session_says_so(graph: OpGraph) -> None:
    session = open_session(graph)
    session.close()
    session.close()
    with pytest.raises(DeviceError, match="closed"):
        session.captured(sequential(graph))
