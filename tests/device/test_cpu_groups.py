"""Groups on CPU lanes: more lanes than cores, and one wide member on the caller's thread."""

from __future__ import annotations

from autosched.core.records import Failure, FailureKind, GroupRecord
from autosched.device.base import Group
from autosched.device.cpu import CpuDevice
from autosched.device.cpu_loops import lanes_of
from tests.conformance.programs import branches_program


def test_more_lanes_than_cores_are_measured_too() -> None:
    program, constants = branches_program(branches=6, depth=1)
    with CpuDevice(seed=1).open(program, constants, timeout_s=60) as session:
        (record,) = session.groups([Group((0, 2, 4, 6, 8, 10))], repeats=3)
    assert isinstance(record, GroupRecord)
    assert len(record.finish_us) == 6
    assert record.count == 3


def test_one_member_may_be_wide_but_not_two() -> None:
    program, constants = branches_program(branches=3, depth=1)
    with CpuDevice(seed=1).open(program, constants, timeout_s=60) as session:
        wide, both, uneven = session.groups([Group((0, 2, 4), (1, 2, 1)), Group((0, 2, 4), (2, 2, 1)), Group((0, 2, 4), (1, 1))], repeats=2)
    assert isinstance(wide, GroupRecord)
    assert wide.widths == (1, 2, 1)
    for refused in (both, uneven):
        assert isinstance(refused, Failure)
        assert refused.kind is FailureKind.ILLEGAL


def test_the_wide_member_has_the_callers_thread() -> None:
    assert lanes_of((1, 1, 1)) == [0, 1, 2]
    assert lanes_of((1, 2, 1)) == [1, 0, 2]
