"""Small programs with a known shape, for tests that must not depend on capture."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from autosched.core.graph import OpGraph
from autosched.core.program import Many, Program, Ref
from autosched.runtime.kernels import BoundProgram, bind
from autosched.runtime.trees import flatten_inputs
from tests.conformance.graphs import Recorder, random_order


def branches_program(*, branches: int = 3, depth: int = 2, size: int = 32) -> tuple[Program, dict[int, torch.Tensor]]:
    """An input, ``branches`` chains of ``depth`` (mm, relu) pairs, and a concatenation: operators 0 .. 2 * branches * depth."""
    recorder = Recorder()
    source = _input(recorder, size)
    ends: list[Ref] = []
    for _ in range(branches):
        value = source
        for _ in range(depth):
            weight = torch.randn(size, size, generator=torch.Generator().manual_seed(100 + len(recorder.values))) * 0.1
            parameter = recorder.constant(f"p{len(recorder.values)}", weight)
            value = recorder.run("aten::relu.default", recorder.run("aten::mm.default", value, parameter))
        ends.append(value)
    return _built(recorder, recorder.run("aten::cat.default", Many(tuple(ends)), 1))


def chain_program(*, length: int = 6, size: int = 16) -> tuple[Program, dict[int, torch.Tensor]]:
    """A chain of sigmoid operators, all of one signature: nothing may run at the same time."""
    recorder = Recorder()
    value = _input(recorder, size)
    for _ in range(length):
        value = recorder.run("aten::sigmoid.default", value)
    return _built(recorder, value)


def not_finite_program(size: int = 8) -> tuple[Program, dict[int, torch.Tensor]]:
    """Divides by zero: its own reference is not finite either."""
    recorder = Recorder()
    value = _input(recorder, size)
    return _built(recorder, recorder.run("aten::div.Tensor", value, recorder.run("aten::mul.Scalar", value, 0.0)))


def _input(recorder: Recorder, size: int) -> Ref:
    return recorder.input(torch.randn(size, size, generator=torch.Generator().manual_seed(len(recorder.values))))


def _built(recorder: Recorder, output: Ref) -> tuple[Program, dict[int, torch.Tensor]]:
    """The program, and the tensor of each of its constants by value index."""
    return recorder.build([output]), recorder.constants()


def assert_computes(
    program: Program, constants: Mapping[int, torch.Tensor], model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> None:
    """The operators of ``program`` in order answer what ``model`` does, in the same layout, up to the order of sums."""
    outputs = bind(program, constants).run(flatten_inputs(program, inputs))
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*inputs))
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.clone(), reference, rtol=1e-4, atol=1e-4)
        assert output.stride() == reference.stride()


def assert_same_in_any_order(
    bound: BoundProgram, graph: OpGraph, inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], rng: random.Random, times: int
) -> None:
    """Run the operators of ``graph`` in that many random legal orders; the outputs are ``wanted``, bit for bit."""
    for _ in range(times):
        slots = bound.new_slots(inputs)
        with torch.inference_mode():
            for index in random_order(rng, graph):
                bound.kernels[index](slots)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(bound.outputs(slots), wanted, strict=True))
