"""What every device must do. A test class inherits ``DeviceSuite`` and gives a ``device`` fixture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from autosched.core.errors import DeviceError
from autosched.core.graph import OpGraph
from autosched.core.program import Program
from autosched.core.records import Failure, FailureKind, GroupRecord, PairRecord, Samples, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule, canonical_key, make_schedule, sequential
from autosched.device.base import Comparison, Device, Group, Pair, Session
from autosched.runtime.kernels import bind, random_inputs
from tests.conformance.programs import branches_program

BRANCHES, DEPTH = 3, 2


def spread(graph: OpGraph, lanes: int) -> Schedule:
    """The branches of ``branches_program`` dealt to lanes in turn."""
    return make_schedule(graph, range(len(graph)), [index // (2 * DEPTH) % lanes for index in range(len(graph))])


def check_samples(samples: Samples) -> None:
    figures = (samples.min_us, samples.ci_low_us, samples.median_us, samples.ci_high_us, samples.p95_us)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert samples.min_us <= samples.ci_low_us <= samples.median_us <= samples.ci_high_us
    assert samples.count >= 1


class DeviceSuite:
    """The contract of ``autosched.device.base``, as tests.

    ``traces_everything``: whether every schedule that can be timed can be traced. ``measures_groups``: whether it measures any.
    """

    traces_everything: ClassVar[bool] = True
    measures_groups: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def device(cls) -> Device:
        raise NotImplementedError("give the device under test")

    @pytest.fixture(scope="class")
    @classmethod
    def program(cls) -> tuple[Program, dict[int, torch.Tensor]]:
        return branches_program(branches=BRANCHES, depth=DEPTH)

    @pytest.fixture(scope="class")
    @classmethod
    def session(cls, device: Device, program: tuple[Program, dict[int, torch.Tensor]]) -> Iterator[Session]:
        session = device.open(*program, timeout_s=60)
        yield session
        session.close()

    @pytest.fixture
    def graph(self, program: tuple[Program, dict[int, torch.Tensor]]) -> OpGraph:
        return program[0].graph

    def test_keys_are_stable_and_sorted(self, device: Device) -> None:
        assert device.key == device.key
        assert device.key.name
        assert list(device.key.details) == sorted(device.key.details)
        assert list(device.software.versions) == sorted(device.software.versions)
        assert "torch" in dict(device.software.versions)

    def test_limits(self, session: Session) -> None:
        limits = session.limits
        assert limits.max_lanes >= 1
        assert limits.widths[0] == 1
        assert list(limits.widths) == sorted(set(limits.widths))
        assert all(math.isfinite(cost) and cost >= 0 for cost in (limits.launch_gap_us, limits.cross_lane_us, limits.fixed_us))

    def test_solo_has_every_operator_and_width(self, session: Session, graph: OpGraph) -> None:
        widths = session.limits.widths[:2]
        found = session.solo(widths, repeats=3)
        assert [len(row) for row in found] == [len(widths)] * len(graph)
        shared: dict[tuple[str, int], SoloRecord] = {}
        for operator, row in zip(graph.operators, found, strict=True):
            for width, record in zip(widths, row, strict=True):
                assert isinstance(record, SoloRecord)
                assert (record.signature, record.width) == (operator.signature, width)
                check_samples(record.samples)
                assert shared.setdefault((record.signature, width), record) == record

    def test_pairs_answer_in_the_order_asked(self, session: Session, graph: OpGraph) -> None:
        relu_beside_mm = Pair(1, 2 * DEPTH)
        asked = [Pair(0, 2 * DEPTH), Pair(0, 1), relu_beside_mm, Pair(2 * DEPTH, 1), Pair(0, 10_000)]
        found = session.pairs(asked, repeats=3)
        assert len(found) == len(asked)
        for pair, record in zip(asked, found, strict=True):
            if pair in (asked[1], asked[4]):
                assert isinstance(record, Failure)
                assert record.kind is FailureKind.ILLEGAL
                continue
            assert isinstance(record, PairRecord)
            assert (record.first, record.last) == (graph.operators[pair.first].signature, graph.operators[pair.last].signature)
            figures = (record.slowdown_first, record.slowdown_last, record.makespan_ratio, record.solo_first_us, record.solo_last_us)
            assert all(math.isfinite(figure) and figure > 0 for figure in figures)
            assert record.repeats_first >= 1
            assert record.repeats_last >= 1
            whole = record.repeats_first * record.solo_first_us + record.repeats_last * record.solo_last_us
            assert record.makespan_ratio == pytest.approx(record.together_us / whole)
            assert record.contamination.foreign_load == -1 or 0 <= record.contamination.foreign_load <= 1

    def test_groups_answer_in_the_order_asked(self, session: Session, graph: OpGraph) -> None:
        three, with_a_dependence, a_pair, absent = (0, 2 * DEPTH, 4 * DEPTH), (0, 1, 2 * DEPTH), (0, 2 * DEPTH), (0, 2 * DEPTH, 10_000)
        found = session.groups([Group(members) for members in (three, with_a_dependence, a_pair, absent, three[::-1])], repeats=3)
        assert len(found) == 5
        for refused in found[1:4]:
            assert isinstance(refused, Failure)
            assert refused.kind is FailureKind.ILLEGAL
        if not self.measures_groups:
            assert [getattr(record, "kind", None) for record in (found[0], found[4])] == [FailureKind.UNAVAILABLE] * 2
            return
        for members, record in ((three, found[0]), (three[::-1], found[4])):
            assert isinstance(record, GroupRecord)
            assert record.signatures == tuple(graph.operators[index].signature for index in members)
            assert record.widths == (1, 1, 1)
            assert len(record.solo_us) == len(record.repeats) == len(record.finish_us) == len(record.slowdowns) == 3
            assert all(math.isfinite(time_us) and time_us > 0 for time_us in (*record.solo_us, *record.finish_us, record.together_us))
            assert min(record.repeats) >= 1
            assert record.together_us >= max(record.finish_us) * 0.999
            assert record.makespan_ratio > 0

    def test_schedules_answer_in_the_order_asked(self, session: Session, graph: OpGraph) -> None:
        lanes = min(2, session.limits.max_lanes)
        foreign = dataclasses.replace(sequential(graph), graph_hash="another")
        asked = [sequential(graph), foreign, spread(graph, lanes)]
        found = session.schedules(asked, rounds=3, trace=True, min_block_us=200.0)
        assert isinstance(found[1], Failure)
        assert found[1].kind is FailureKind.ILLEGAL
        for place in (0, 2):
            record = found[place]
            assert isinstance(record, ScheduleRecord)
            assert record.key == canonical_key(graph, asked[place], lanes_matter=session.limits.lanes_matter)
            check_samples(record.samples)
            assert record.samples.count == 3
            assert record.peak_memory_bytes > 0
            assert len(record.operator_start_us) == len(record.operator_end_us)
            assert len(record.operator_end_us) == len(graph) or not self.traces_everything
            assert all(0 <= start <= end for start, end in zip(record.operator_start_us, record.operator_end_us, strict=True))

    def test_without_trace_there_is_none(self, session: Session, graph: OpGraph) -> None:
        record = session.schedules([sequential(graph)], rounds=2)[0]
        assert isinstance(record, ScheduleRecord)
        assert record.operator_start_us == record.operator_end_us == ()

    def test_nothing_asked_nothing_answered(self, session: Session) -> None:
        assert session.schedules([], rounds=3) == []
        assert session.pairs([], repeats=3) == []
        assert session.groups([], repeats=3) == []

    def test_paired_has_a_column_for_each_round(self, session: Session, graph: OpGraph) -> None:
        found = session.paired([sequential(graph), sequential(graph)], rounds=5)
        assert not isinstance(found, Failure)
        assert [len(row) for row in found] == [5, 5]
        assert all(math.isfinite(time_us) and time_us > 0 for row in found for time_us in row)

    def test_compare_accepts_the_models_own_outputs(
        self, session: Session, graph: OpGraph, program: tuple[Program, dict[int, torch.Tensor]]
    ) -> None:
        inputs, references = _three_sets(program)
        found = session.compare(spread(graph, min(2, session.limits.max_lanes)), inputs, references)
        assert isinstance(found, Comparison)
        assert found.bitwise
        assert found.within_tolerance

    def test_compare_sees_a_wrong_value_in_any_set(
        self, session: Session, graph: OpGraph, program: tuple[Program, dict[int, torch.Tensor]]
    ) -> None:
        inputs, references = _three_sets(program)
        references[2][0][3, 3] += 10.0
        found = session.compare(sequential(graph), inputs, references)
        assert isinstance(found, Comparison)
        assert not found.within_tolerance
        assert found.bitwise
        assert found.max_abs_error == pytest.approx(10.0, rel=1e-3)

    @pytest.mark.parametrize("odd", [math.nan, math.inf])
    def test_compare_fails_closed_on_what_is_not_finite(
        self, session: Session, graph: OpGraph, program: tuple[Program, dict[int, torch.Tensor]], odd: float
    ) -> None:
        inputs, references = _three_sets(program)
        references[0][0][0, 0] = odd
        found = session.compare(sequential(graph), inputs, references)
        assert isinstance(found, Failure)
        assert found.kind is FailureKind.NONFINITE

    def test_compare_fails_closed_on_another_shape(
        self, session: Session, graph: OpGraph, program: tuple[Program, dict[int, torch.Tensor]]
    ) -> None:
        inputs, references = _three_sets(program)
        found = session.compare(sequential(graph), inputs, [[tensor[:1] for tensor in row] for row in references])
        assert isinstance(found, Failure)
        assert found.kind is FailureKind.MISMATCH

    def test_close_twice_then_refuse(self, device: Device, program: tuple[Program, dict[int, torch.Tensor]]) -> None:
        session = device.open(*program, timeout_s=60)
        session.close()
        session.close()
        with pytest.raises(DeviceError):
            session.pairs([Pair(0, 4)], repeats=1)


def _three_sets(program: tuple[Program, dict[int, torch.Tensor]]) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    bound = bind(*program)
    inputs = [random_inputs(program[0], seed) for seed in range(3)]
    return inputs, [[tensor.clone() for tensor in bound.run(row)] for row in inputs]
