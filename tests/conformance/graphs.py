"""Programs recorded call by call from real operators, random ones among them, and the model that one of them was taken from.

Aliases and in-place changes are observed from the tensors, so a recorded graph never lies about them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature
from autosched.core.program import Argument, Binding, Call, ConstantSource, InputSpec, Many, Program, Ref
from autosched.core.schedule import Schedule, make_schedule
from autosched.runtime.calls import resolve
from autosched.runtime.kernels import dtype_name
from autosched.runtime.trees import describe_tree


class Recorder:
    """Runs calls on real tensors and writes down what they did."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.tensors: list[torch.Tensor] = []
        self.operators: list[Operator] = []
        self.inputs: list[int] = []
        self.bindings: list[Binding] = []
        self.prologue_calls: list[Call] = []

    def input(self, tensor: torch.Tensor) -> Ref:
        self.inputs.append(self._value(tensor, ValueRole.INPUT))
        return Ref(self.inputs[-1])

    def constant(self, name: str, tensor: torch.Tensor, source: ConstantSource = ConstantSource.PARAMETER) -> Ref:
        index = self._value(tensor.detach(), ValueRole.CONSTANT)
        self.bindings.append(Binding(index, source, name))
        return Ref(index)

    def prologue(self, target: str, *args: Argument) -> Ref:
        call, _ = self._call(target, args, ValueRole.CONSTANT)
        self.prologue_calls.append(call)
        return Ref(call.outputs[0])

    def run(self, target: str, *args: Argument) -> Any:
        """One operator of one call; returns a ``Ref``, or a tuple of them if it has several results."""
        call, mutates = self._call(target, args, ValueRole.INTERMEDIATE)
        self._operator((call,), call.reads(), call.outputs, mutates)
        made = tuple(Ref(value) for value in call.outputs)
        return made[0] if len(made) == 1 else made

    def region(self, *calls: tuple[str, Sequence[Argument | None]]) -> Ref:
        """One operator of several calls; each takes the result of the one before where its argument is ``None``."""
        done: list[Call] = []
        last: Ref | None = None
        mutated: list[int] = []
        for target, args in calls:
            call, mutates = self._call(target, [last if item is None else item for item in args], ValueRole.INTERNAL)
            done.append(call)
            mutated += mutates
            last = Ref(call.outputs[0])
        assert last is not None
        made = {value for call in done for value in call.outputs}
        final = self.values[last.value]
        self.values[last.value] = Value(final.index, final.spec, ValueRole.INTERMEDIATE, final.storage)
        reads = dict.fromkeys(value for call in done for value in call.reads() if value not in made)
        self._operator(tuple(done), tuple(reads), (last.value,), [value for value in mutated if value not in made])
        return last

    def build(self, outputs: Sequence[Ref], *, call: Any = None, result: Any = None) -> Program:
        """``call`` is ``(args, kwargs)`` and ``result`` the output, with a ``Ref`` for each tensor; by default flat."""
        call = (tuple(Ref(value) for value in self.inputs), {}) if call is None else call
        input_leaves, input_tree = describe_tree(call)
        output_leaves, output_tree = describe_tree(tuple(outputs) if result is None else result)
        graph = OpGraph(tuple(self.operators), tuple(self.values), tuple(self.inputs), tuple(item.value for item in outputs))
        graph.validate()
        return Program(
            graph=graph,
            prologue=tuple(self.prologue_calls),
            bindings=tuple(self.bindings),
            inputs=tuple(InputSpec(value, 0, 0, 0.0, 1.0) for value in self.inputs),
            input_tree=input_tree,
            output_tree=output_tree,
            input_leaves=tuple(input_leaves),
            output_leaves=tuple(output_leaves),
            lowering="aten",
        )

    def constants(self) -> dict[int, torch.Tensor]:
        """The tensor of each constant by value index."""
        return {binding.value: self.tensors[binding.value] for binding in self.bindings}

    def _call(self, target: str, args: Sequence[Argument], role: ValueRole) -> tuple[Call, list[int]]:
        function: Any = resolve(target)
        real = [self._real(item) for item in args]
        with torch.no_grad():
            result = function(*real)
        made = [self._value(tensor, role) for tensor in (result if isinstance(result, (tuple, list)) else (result,))]
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments]
        mutates = [item.value for item, changed in zip(args, written, strict=False) if changed and isinstance(item, Ref)]
        return Call(target, tuple(args), (), tuple(made)), mutates

    def _operator(self, calls: tuple[Call, ...], reads: Sequence[int], writes: Sequence[int], mutates: Sequence[int]) -> None:
        index = len(self.operators)
        self.operators.append(
            Operator(
                index,
                f"op{index}",
                calls,
                tuple(reads),
                tuple(writes),
                tuple(mutates),
                0,
                sum(self.values[value].spec.bytes for value in reads),
                sum(self.values[value].spec.bytes for value in writes),
                kernel_signature(calls, self.values),
                "",
            )
        )

    def _value(self, tensor: torch.Tensor, role: ValueRole) -> int:
        index = len(self.values)
        memory = tensor.untyped_storage()._cdata
        owner = next((value.storage for value in self.values if self.tensors[value.index].untyped_storage()._cdata == memory), index)
        spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), tuple(tensor.stride()))
        self.values.append(Value(index, spec, role, owner))
        self.tensors.append(tensor)
        return index

    def _real(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self.tensors[argument.value]
        if isinstance(argument, Many):
            return [self._real(item) for item in argument.items]
        return argument


def normals(rng: random.Random) -> Callable[..., torch.Tensor]:
    """Draws tensors of the shape it is given, from a generator that ``rng`` seeds."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return normal


def random_program(rng: random.Random, operators: int = 12) -> tuple[Program, dict[int, torch.Tensor]]:
    """An executable program of cheap operators on ``[4, 6]`` float32 tensors, with views, in-place changes and several outputs.

    Returns:
        The program, and the tensor of each of its constants by value index.
    """
    recorder = Recorder()
    normal = normals(rng)
    pool = [recorder.input(normal(4, 6)) for _ in range(2)]
    pool += [recorder.constant(f"weight{index}", normal(4, 6)) for index in range(2)]
    square = recorder.constant("square", normal(6, 6) * 0.4)
    while len(recorder.operators) < operators:
        pick = rng.choice(pool[-7:])
        other = rng.choice(pool[-7:])
        # In-place changes stay on memory that the program itself made.
        own = [item for item in pool if recorder.values[recorder.values[item.value].storage].role is ValueRole.INTERMEDIATE]
        draw = rng.randrange(9)
        if draw == 0 and own:
            pool.append(recorder.run("aten::relu_.default", rng.choice(own)))
        elif draw == 1 and own:
            changed = rng.choice(own)
            if recorder.values[changed.value].storage != recorder.values[other.value].storage:
                pool.append(recorder.run("aten::add_.Tensor", changed, other))
        elif draw == 2:
            flat = recorder.run("aten::view.default", pick, Many((24,)))
            pool.append(recorder.run("aten::view.default", flat, Many((4, 6))))
        elif draw == 3:
            halves = recorder.run("aten::split.Tensor", pick, 3, 1)
            pool.append(recorder.run("aten::cat.default", Many((halves[1], halves[0])), 1))
        elif draw == 4:
            rows = recorder.run("aten::unbind.int", pick, 0)
            pool.append(recorder.run("aten::stack.default", Many(rows[::-1]), 0))
        elif draw == 5:
            pool.append(recorder.run("aten::mm.default", pick, square))
        elif draw == 6:
            pool.append(recorder.region(("aten::sigmoid.default", [pick]), ("aten::mul.Tensor", [None, other])))
        else:
            pool.append(recorder.run("aten::add.Tensor", pick, other))
    read = {value for operator in recorder.operators for value in operator.reads}
    outputs = [item for item in pool if item.value not in read and recorder.values[item.value].role is ValueRole.INTERMEDIATE][:3]
    return recorder.build(outputs or pool[-1:]), recorder.constants()


def random_order(rng: random.Random, graph: OpGraph) -> list[int]:
    """A random topological launch order."""
    waiting = [len(before) for before in graph.predecessors]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        index = ready.pop(rng.randrange(len(ready)))
        order.append(index)
        for after in graph.successors[index]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    return order


def random_placement(rng: random.Random, graph: OpGraph, lanes: int, extra_edges: int = 0) -> Schedule:
    """A random legal schedule on at most ``lanes`` lanes."""
    order = random_order(rng, graph)
    extra = [tuple(sorted(rng.sample(range(len(order)), 2))) for _ in range(extra_edges)] if len(order) > 1 else []
    return make_schedule(
        graph, order, [rng.randrange(lanes) for _ in order], extra_edges=[(order[first], order[last]) for first, last in extra]
    )


class TwoBranches(torch.nn.Module):
    """Two linear branches with a parameter folded ahead of time, a buffer, a literal, an in-place change and views.

    ``forward(x, *, more)`` takes ``more["shift"]`` and a flag, and returns ``{"sum": ..., "parts": (...), "name": "two"}``.
    """

    offset: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.left = torch.nn.Linear(8, 8)
        self.right = torch.nn.Linear(8, 8, bias=False)
        self.register_buffer("offset", torch.randn(8, generator=generator))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        assert more["flag"] is True
        left = torch.relu_(self.left(x))
        right = x @ (self.right.weight * 2.0).t() + self.offset + torch.arange(8.0)
        low, high = torch.split(right, 4, 1)
        return {"sum": left + right * more["shift"], "parts": (low.sigmoid(), high.tanh()), "name": "two"}


def two_branches_inputs(seed: int = 1, rows: int = 4) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    """Arguments of a call of :class:`TwoBranches`."""
    generator = torch.Generator().manual_seed(seed)
    x, shift = torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)
    return (x,), {"more": {"shift": shift, "flag": True}}


def two_branches_program(model: TwoBranches, rows: int = 4) -> tuple[Program, dict[str, torch.Tensor]]:
    """The program of :class:`TwoBranches` for ``rows`` rows, and its literals by name."""
    recorder = Recorder()
    (x_tensor,), kwargs = two_branches_inputs(rows=rows)
    x, shift = recorder.input(x_tensor), recorder.input(kwargs["more"]["shift"])
    weight, bias = recorder.constant("left.weight", model.left.weight), recorder.constant("left.bias", model.left.bias)
    right = recorder.constant("right.weight", model.right.weight)
    offset = recorder.constant("offset", model.offset, ConstantSource.BUFFER)
    literals = {"range": torch.arange(8.0)}
    numbers = recorder.constant("range", literals["range"], ConstantSource.LITERAL)
    folded = recorder.prologue("aten::t.default", recorder.prologue("aten::mul.Tensor", right, 2.0))
    transposed = recorder.run("aten::t.default", weight)
    left = recorder.run("aten::relu_.default", recorder.run("aten::addmm.default", bias, x, transposed))
    product = recorder.run("aten::mm.default", x, folded)
    shifted = recorder.region(("aten::add.Tensor", [product, offset]), ("aten::add.Tensor", [None, numbers]))
    low, high = recorder.run("aten::split.Tensor", shifted, 4, 1)
    parts = recorder.run("aten::sigmoid.default", low), recorder.run("aten::tanh.default", high)
    total = recorder.run("aten::add.Tensor", left, recorder.run("aten::mul.Tensor", shifted, shift))
    program = recorder.build(
        [total, *parts],
        call=((x,), {"more": {"shift": shift, "flag": True}}),
        result={"sum": total, "parts": parts, "name": "two"},
    )
    return program, literals


@st.composite
def op_graphs(draw: st.DrawFn, max_operators: int = 14) -> OpGraph:
    """Abstract graphs: views, in-place changes, several results, results that nobody reads, operators that read constants only."""
    values = [Value(index, _SPEC, ValueRole.INPUT if index < 2 else ValueRole.CONSTANT, index) for index in range(3)]
    operators: list[Operator] = []
    for index in range(draw(st.integers(1, max_operators))):
        reads = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True))
        own = [value for value in reads if values[values[value].storage].role is ValueRole.INTERMEDIATE]
        kind = draw(st.sampled_from(("plain", "plain", "view", "mutate", "mutate_view", "many")))
        given = tuple(reads)
        mutates = tuple(own[:1]) if kind.startswith("mutate") else ()
        if mutates and draw(st.booleans()):
            # As captured operators have it: what is changed is not listed as read.
            reads.remove(mutates[0])
        writes: list[int] = []
        for _ in range(draw(st.integers(2, 3)) if kind == "many" else 1):
            alias = kind in ("view", "mutate_view") or (kind == "many" and draw(st.booleans()))
            storage = values[(mutates or reads)[0]].storage if alias else len(values)
            writes.append(len(values))
            values.append(Value(len(values), _SPEC, ValueRole.INTERMEDIATE, storage))
        call = Call(f"aten::fake{kind}.default", tuple(map(Ref, given)), (), tuple(writes))
        operators.append(Operator(index, f"op{index}", (call,), tuple(reads), tuple(writes), mutates, 0, 0, 0, "", ""))
    made = [value.index for value in values if value.role is ValueRole.INTERMEDIATE]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    graph = OpGraph(tuple(operators), tuple(values), (0, 1), tuple(outputs))
    graph.validate()
    return graph


@st.composite
def placements(draw: st.DrawFn, graph: OpGraph, max_lanes: int = 4, extra_edges: bool = True) -> Schedule:
    """Legal schedules of ``graph``: a random launch order, random lanes, and now and then edges on purpose."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    return random_placement(rng, graph, draw(st.integers(1, max_lanes)), draw(st.integers(0, 3)) if extra_edges else 0)


_SPEC = TensorSpec((4,), "float32", (1,))
