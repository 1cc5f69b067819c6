"""Packed weights follow the width their operator runs at; everything else is shared."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from autosched import zoo
from autosched.capture.export import Captured, capture
from autosched.core.program import Call
from autosched.core.schedule import make_schedule, sequential
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.widths import WidePrograms, bind_for


@pytest.fixture(scope="module")
def captured() -> Captured:
    entry = zoo.load("autosched:toy")
    found = capture(entry.model, entry.args, entry.kwargs, rewrite=True)
    programs = WidePrograms(found.program, found.constants)
    if not any(programs.packed_reads(operator.index, programs.at(1).constants) for operator in found.program.graph.operators):
        pytest.skip("this PyTorch packs no weights")
    return found


def test_plain_constants_are_shared_and_packed_ones_where_their_layout_is_the_same(captured: Captured) -> None:
    programs = WidePrograms(captured.program, captured.constants)
    narrow, wide = programs.at(1), programs.at(2)
    packed = {value for operator in captured.program.graph.operators for value in programs.packed_reads(operator.index, narrow.constants)}
    layout_of = torch.ops.mkldnn._get_mkldnn_serialized_md
    for value, (ours, theirs) in enumerate(zip(narrow.constants, wide.constants, strict=True)):
        if value not in packed:
            assert ours is theirs
        elif torch.ops.mkldnn._nbytes(ours) >= 4096:
            assert (ours is theirs) == torch.equal(layout_of(ours), layout_of(theirs))


def test_a_plan_gets_the_packing_of_each_operators_width(captured: Captured) -> None:
    graph = captured.program.graph
    programs = WidePrograms(captured.program, captured.constants)
    widths = [1 + index % 2 for index in range(len(graph))]
    plan = make_plan(graph, make_schedule(graph, range(len(graph)), [0] * len(graph), width=widths))
    bound = programs.for_plan(plan)
    for operator in graph.operators:
        for value in programs.packed_reads(operator.index, bound.constants):
            assert bound.constants[value] is programs.at(widths[operator.index]).constants[value]


def test_a_plan_alone_packs_each_weight_once_and_as_for_all_widths(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured.program.graph
    programs = WidePrograms(captured.program, captured.constants)
    widths = [1 + index % 2 for index in range(len(graph))]
    plan = make_plan(graph, make_schedule(graph, range(len(graph)), [0] * len(graph), width=widths))
    expected = programs.for_plan(plan)
    packed_at: dict[int, list[int]] = {}

    def noting(call: Call, device: torch.device) -> Kernel:
        kernel = compile_call(call, device)

        def run(slots: Slots) -> None:
            for value in call.outputs:
                packed_at.setdefault(value, []).append(torch.get_num_threads())
            kernel(slots)

        return run if call in captured.program.prologue else kernel

    monkeypatch.setattr("autosched.runtime.kernels.compile_call", noting)
    before = torch.get_num_threads()
    bound = bind_for(plan, captured.program, captured.constants)
    assert torch.get_num_threads() == before
    read = [(operator.index, value) for operator in graph.operators for value in programs.packed_reads(operator.index, bound.constants)]
    assert {widths[operator] for operator, _ in read} == {1, 2}
    for operator, value in read:
        assert packed_at[value] == [widths[operator]]
    for ours, theirs in zip(bound.constants, expected.constants, strict=True):
        assert (ours is None) == (theirs is None)
    inputs = random_inputs(captured.program, 1)
    assert compare(LaneExecutor(bound, plan).run(inputs), LaneExecutor(expected, plan).run(inputs)).within_tolerance


@pytest.mark.parametrize("width", [1, 2, 3])
def test_an_even_plan_gets_that_widths_program(captured: Captured, width: int) -> None:
    graph = captured.program.graph
    programs = WidePrograms(captured.program, captured.constants)
    assert programs.for_plan(make_plan(graph, sequential(graph, width=width))) is programs.at(width)


def test_every_width_computes_the_model(captured: Captured) -> None:
    graph = captured.program.graph
    programs = WidePrograms(captured.program, captured.constants)
    inputs = random_inputs(captured.program, 1)
    reference = programs.at(1).run(inputs)
    for widths in ([1] * len(graph), [2] * len(graph), [1 + index % 3 for index in range(len(graph))]):
        plan = make_plan(graph, make_schedule(graph, range(len(graph)), [index % 2 for index in range(len(graph))], width=widths))
        got = LaneExecutor(programs.for_plan(plan), plan).run(inputs)
        assert compare(got, reference).within_tolerance


def test_binding_leaves_the_thread_count_alone_and_adapts_once(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BoundProgram] = []
    inherited: set[int] = set()

    def bound_here(*given: Any) -> BoundProgram:
        thread = threading.Thread(target=lambda: inherited.add(torch.get_num_threads()))
        thread.start()
        thread.join()
        return bind(*given)

    def adapt(bound: BoundProgram) -> BoundProgram:
        seen.append(bound)
        return bound

    monkeypatch.setattr("autosched.runtime.widths.bind", bound_here)

    before = torch.get_num_threads()
    programs = WidePrograms(captured.program, captured.constants, adapt)
    for width in (1, 2, 1, 2):
        programs.at(width)
    assert torch.get_num_threads() == before
    # A thread that first uses PyTorch meanwhile has the user's count as well.
    assert inherited == {before}
    assert len(seen) == 2
