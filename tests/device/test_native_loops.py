"""Loops without the interpreter: each begins after the one before it, on values of its own, and is timed from its start to its end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from autosched.core.program import Call, Ref
from autosched.core.records import Engine
from autosched.device import native_loops as loops_module
from autosched.device.base import Group, Pair
from autosched.device.cpu_groups import measure_groups
from autosched.device.cpu_loops import Loop, run_in_turn, time_alone
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.cpu_pairs import measure_pairs
from autosched.device.cpu_solo import measure_solo
from autosched.device.native_loops import native_loops
from autosched.runtime.calls import compile_call
from autosched.runtime.kernels import BoundProgram, random_inputs
from autosched.runtime.lane_pool import LanePool, Signals
from autosched.runtime.native.build import Library
from autosched.runtime.native.code import NativeCode
from autosched.runtime.native.lanes import NativeProgram
from autosched.runtime.widths import WidePrograms
from tests.conformance.programs import branches_program

pytestmark = pytest.mark.usefixtures("native")


def _loop(size: int, repeats: int) -> Loop:
    kernel = compile_call(Call("aten::add_.Tensor", (Ref(0), 1.0), (), (0,)), torch.device("cpu"))
    loop = Loop(kernel, [torch.zeros(size)], 1)
    loop.repeats = repeats
    return loop


@pytest.fixture
def measurer() -> CpuMeasurer:
    return cast(CpuMeasurer, SimpleNamespace(pool=LanePool(), engine=Engine.NATIVE))


@pytest.mark.parametrize("count", [2, 3])
def test_loops_begin_in_turn_and_run_all_their_repeats(measurer: CpuMeasurer, count: int) -> None:
    loops = [_loop(200_000, 5 + place) for place in range(count)]
    run_in_turn(measurer, loops)
    for place, loop in enumerate(loops):
        assert loop.end_us > loop.start_us
        assert loop.slots[0][0] == 5.0 + place
    assert all(before.start_us <= after.start_us for before, after in itertools.pairwise(loops))


def test_a_loop_hands_over_only_the_values_that_its_operator_names(measurer: CpuMeasurer, monkeypatch: pytest.MonkeyPatch) -> None:
    # A large program has tens of thousands, and a loop is made anew for each of its runs.
    handed_over: list[int] = []

    class Counted(NativeProgram):
        def __init__(self, library: Library, native: NativeCode) -> None:
            handed_over.append(len(native.constants))
            super().__init__(library, native)

    monkeypatch.setattr(loops_module, "NativeProgram", Counted)
    kernel = compile_call(Call("aten::add_.Tensor", (Ref(700), Ref(3)), (), (800,)), torch.device("cpu"))
    loops = [Loop(kernel, [torch.full((4,), float(slot)) for slot in range(1000)], 1) for _ in range(2)]
    for place, loop in enumerate(loops):
        loop.repeats = 5 + place
    run_in_turn(measurer, loops)
    assert handed_over == [6]
    assert [loop.slots[700].tolist() for loop in loops] == [[715.0] * 4, [718.0] * 4]
    assert loops[0].slots[800].tolist() == [800.0] * 4


@pytest.mark.parametrize("lane", [0, 1])
def test_a_loop_is_timed_alone_on_either_thread(measurer: CpuMeasurer, lane: int) -> None:
    loop = _loop(200_000, 7)
    assert time_alone(measurer, loop, lane, 2) == loop.length_us() > 1.0
    assert loop.slots[0][0] == 7.0


def test_a_kernel_that_says_nothing_is_timed_from_python() -> None:
    silent = Loop(lambda slots: None, [torch.zeros(1)], 1)
    assert native_loops((_loop(4, 1), silent), (0, 1), 2, Engine.NATIVE) is None
    assert native_loops((_loop(4, 1),), (0,), 2, Engine.PYTHON) is None
    assert native_loops((_loop(4, 1),), (0,), 2, Engine.NATIVE) is not None


def test_a_program_is_measured_without_the_interpreter_from_end_to_end() -> None:
    program, constants = branches_program()
    measurer = CpuMeasurer(WidePrograms(program, constants), random_inputs(program, 0), lambda item: None)
    assert measurer.engine is Engine.NATIVE
    costs = measurer.costs(repeats=3)
    assert costs.fixed_us > 0.0
    assert {record and record.engine for _, _, record, _ in measure_solo(measurer, [(1, 0), (2, 0)], 2, (), 0)} == {Engine.NATIVE}
    pairs = [Pair(0, 4, 1, 1), Pair(0, 4, 2, 1)]
    for _, pair, failure in measure_pairs(measurer, pairs, 2, 0):
        assert failure is None
        assert pair is not None
        assert pair.together_us > 0.0
        assert pair.engine is Engine.NATIVE
    ((_, group, failure),) = measure_groups(measurer, [Group((0, 4, 8))], 2, 0)
    assert failure is None
    assert group is not None
    assert group.together_us > 0.0
    assert len(group.finish_us) == 3


def test_the_others_are_timed_on_native_lanes_beside_an_operator_that_is_broken() -> None:
    program, constants = branches_program()
    measurer = CpuMeasurer(WidePrograms(program, constants), random_inputs(program, 0), lambda item: None)
    broken = (4, len(program.graph) + 4)  # at either width
    found = {operator: record for operator, _, record, _ in measure_solo(measurer, [(1, 0), (2, 0)], 2, broken, 0)}
    assert 4 not in found
    assert {record and record.engine for record in found.values()} == {Engine.NATIVE}


def test_records_say_what_ran_them_and_a_pair_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    program, constants = branches_program()

    def first_only_from_python(bound: BoundProgram) -> BoundProgram:
        return dataclasses.replace(bound, kernels=(functools.partial(bound.kernels[0]), *bound.kernels[1:]))

    measurer = CpuMeasurer(WidePrograms(program, constants, first_only_from_python), random_inputs(program, 0), lambda item: None)
    assert measurer.engine is Engine.PYTHON
    assert {record.engine for _, _, record, _ in measure_solo(measurer, [(1, 0)], 2, (), 0) if record} == {Engine.PYTHON}
    # As where it is a compiled variant that only Python can call, and the program runs without it.
    measurer.__dict__["engine"] = Engine.NATIVE
    ((_, native, _),) = measure_pairs(measurer, [Pair(4, 8)], 1, 0)
    assert native is not None
    assert native.engine is Engine.NATIVE

    def never(*_: object) -> None:
        raise AssertionError("its company alone would be timed on native lanes, and beside it on lanes of Python")

    monkeypatch.setattr(loops_module.NativeLoops, "run", never)
    ((_, mixed, failure),) = measure_pairs(measurer, [Pair(0, 4)], 1, 0)
    assert failure is None
    assert mixed is not None
    assert mixed.engine is Engine.PYTHON
    ((_, group, failure),) = measure_groups(measurer, [Group((0, 4, 8))], 1, 0)
    assert (group is not None, failure) == (True, None)


@pytest.mark.parametrize("comes", [True, False])
def test_loops_of_one_thread_have_a_team_where_one_comes(measurer: CpuMeasurer, comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops_module, "usable_cores", lambda: 2)
    monkeypatch.setattr(loops_module, "team_comes", lambda library, threads: comes)
    handed_out: list[int] = []

    def count(task: Callable[[int], None], lanes: int, signals: Signals, first_flag: int) -> None:
        handed_out.append(lanes)
        LanePool.run(measurer.pool, task, lanes, signals, first_flag)

    monkeypatch.setattr(measurer.pool, "run", count)
    loops = [_loop(20_000, 3), _loop(20_000, 4)]
    run_in_turn(measurer, loops)
    assert [float(loop.slots[0][0]) for loop in loops] == [3.0, 4.0]
    loops[0].width = 2
    run_in_turn(measurer, loops)
    assert [float(loop.slots[0][0]) for loop in loops] == [6.0, 8.0]
    assert handed_out == ([2] if comes else [2, 2])
