"""Programs built by hand, call by call, for tests that must not depend on capture."""

from __future__ import annotations

from typing import Any

import torch

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature
from autosched.core.program import Argument, Binding, Call, ConstantSource, InputSpec, Many, Program, Ref
from autosched.runtime.calls import resolve
from autosched.runtime.kernels import dtype_name


class ProgramBuilder:
    """Adds one operator at a time and computes it at once, so that every spec is what PyTorch really makes."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.tensors: list[torch.Tensor] = []
        self.operators: list[Operator] = []
        self.inputs: list[int] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.bindings: list[Binding] = []

    def input(self, *shape: int) -> int:
        generator = torch.Generator().manual_seed(len(self.values))
        self.inputs.append(self._value(torch.randn(shape, generator=generator), ValueRole.INPUT))
        return self.inputs[-1]

    def constant(self, *shape: int) -> int:
        generator = torch.Generator().manual_seed(100 + len(self.values))
        index = self._value(torch.randn(shape, generator=generator) * 0.1, ValueRole.CONSTANT)
        self.constants[index] = self.tensors[index]
        self.bindings.append(Binding(index, ConstantSource.PARAMETER, f"p{index}"))
        return index

    def operator(self, target: str, *args: int | float | list[int] | Argument | Many) -> int:
        """``int`` arguments wrapped in ``Ref`` are tensors; returns the value made."""
        call_args = tuple(Many(tuple(item)) if isinstance(item, list) else item for item in args)
        with torch.inference_mode():
            result = resolve(target)(*[self._real(item) for item in call_args])
        made = self._value(result.clone(), ValueRole.INTERMEDIATE)
        call = Call(target, call_args, (), (made,))
        reads = call.reads()
        index = len(self.operators)
        self.operators.append(
            Operator(
                index=index,
                name=f"op{index}",
                calls=(call,),
                reads=reads,
                writes=(made,),
                mutates=(),
                flops=0,
                bytes_read=sum(self.values[value].spec.bytes for value in reads),
                bytes_written=self.values[made].spec.bytes,
                signature=kernel_signature((call,), self.values),
                source="",
            )
        )
        return made

    def build(self, *outputs: int) -> tuple[Program, dict[int, torch.Tensor]]:
        graph = OpGraph(tuple(self.operators), tuple(self.values), tuple(self.inputs), outputs)
        graph.validate()
        program = Program(
            graph=graph,
            prologue=(),
            bindings=tuple(self.bindings),
            inputs=tuple(InputSpec(value, 0, 0, 0.0, 1.0) for value in self.inputs),
            input_tree="",
            output_tree="",
            input_leaves=tuple(Ref(value) for value in self.inputs),
            output_leaves=tuple(Ref(value) for value in outputs),
            lowering="aten",
        )
        return program, dict(self.constants)

    def _value(self, tensor: torch.Tensor, role: ValueRole) -> int:
        index = len(self.values)
        spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), tuple(tensor.stride()))
        self.values.append(Value(index, spec, role, index))
        self.tensors.append(tensor)
        return index

    def _real(self, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return self.tensors[argument.value]
        if isinstance(argument, Many):
            return [self._real(item) for item in argument.items]
        return argument


def branches_program(*, branches: int = 3, depth: int = 2, size: int = 32) -> tuple[Program, dict[int, torch.Tensor]]:
    """An input, ``branches`` chains of ``depth`` (mm, relu) pairs, and a concatenation: operators 0 .. 2 * branches * depth."""
    builder = ProgramBuilder()
    source = builder.input(size, size)
    ends: list[Ref] = []
    for _ in range(branches):
        value = source
        for _ in range(depth):
            weight = builder.constant(size, size)
            value = builder.operator("aten::mm.default", Ref(value), Ref(weight))
            value = builder.operator("aten::relu.default", Ref(value))
        ends.append(Ref(value))
    joined = builder.operator("aten::cat.default", Many(tuple(ends)), 1)
    return builder.build(joined)


def chain_program(*, length: int = 6, size: int = 16) -> tuple[Program, dict[int, torch.Tensor]]:
    """A chain of sigmoid operators, all of one signature: nothing may run at the same time."""
    builder = ProgramBuilder()
    value = builder.input(size, size)
    for _ in range(length):
        value = builder.operator("aten::sigmoid.default", Ref(value))
    return builder.build(value)


def not_finite_program(size: int = 8) -> tuple[Program, dict[int, torch.Tensor]]:
    """Divides by zero: its own reference is not finite either."""
    builder = ProgramBuilder()
    value = builder.input(size, size)
    zero = builder.operator("aten::mul.Scalar", Ref(value), 0.0)
    return builder.build(builder.operator("aten::div.Tensor", Ref(value), Ref(zero)))
