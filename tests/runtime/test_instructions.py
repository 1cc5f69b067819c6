"""What kernels say of themselves: every call of an operator, in order; nothing once somebody has put another kernel in its place."""

from __future__ import annotations

import functools

import torch

from autosched.core.program import Call, Many, Ref
from autosched.runtime.calls import Slots, compile_call
from autosched.runtime.instructions import CallOperator, Release, carrying, instructions_of, scratch
from autosched.runtime.kernels import bind
from tests.conformance.graphs import Recorder
from tests.conformance.programs import branches_program

CPU = torch.device("cpu")


def test_every_operator_of_calls_carries_its_calls_in_order() -> None:
    bound = bind(*branches_program())
    for kernel, operator in zip(bound.kernels, bound.program.graph.operators, strict=True):
        assert instructions_of(kernel) == tuple(map(CallOperator, operator.calls))


def test_a_short_call_and_a_general_one_carry_theirs() -> None:
    for call in (
        Call("aten::relu.default", (Ref(0),), (), (1,)),
        Call("aten::cat.default", (Many((Ref(0), Ref(0))), 1), (), (1,)),
    ):
        assert instructions_of(compile_call(call, CPU)) == (CallOperator(call),)


def test_an_operator_of_several_calls_lets_go_of_what_nobody_else_reads() -> None:
    recorder = Recorder()
    value = recorder.input(torch.ones(2, 2))
    result = recorder.region(("aten::neg.default", [value]), ("aten::relu.default", [None]))
    program = recorder.build([result])
    (kernel,) = bind(program, recorder.constants()).kernels
    (operator,) = program.graph.operators
    assert instructions_of(kernel) == (*map(CallOperator, operator.calls), Release((operator.calls[0].outputs[0],)))


def test_a_wrapped_kernel_carries_none() -> None:
    kernel = compile_call(Call("aten::relu.default", (Ref(0),), (), (1,)), CPU)

    @functools.wraps(kernel)
    def polite(slots: Slots) -> None:
        kernel(slots)

    assert instructions_of(polite) is None
    assert instructions_of(carrying(polite, [CallOperator(Call("aten::relu.default", (Ref(0),), (), (1,)))])) is not None


def test_scratch_slots_are_nobody_elses() -> None:
    slots = [scratch(number) for number in range(3)]
    assert len(set(slots)) == 3
    # Values begin at 0, and -1 is a result that nobody uses.
    assert max(slots) < -1
