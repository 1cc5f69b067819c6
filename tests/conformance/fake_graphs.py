"""Random operator graphs for executors that run no real operator: branches, views, in-place changes, several outputs, several sizes."""

from __future__ import annotations

import random

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature
from autosched.core.program import Call, Ref
from autosched.core.schedule import Schedule, make_schedule
from tests.conformance.graphs import random_order


class GraphBuilder:
    """Adds operators one by one; every method returns the index of the value made."""

    def __init__(self, inputs: int = 1) -> None:
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.inputs = tuple(self.value(ValueRole.INPUT) for _ in range(inputs))

    def value(self, role: ValueRole = ValueRole.INTERMEDIATE, *, elements: int = 128, storage: int | None = None) -> int:
        index = len(self.values)
        spec = TensorSpec((elements,), "float32", (1,))
        self.values.append(Value(index, spec, role, index if storage is None else storage))
        return index

    def add(
        self, reads: list[int], *, outputs: int = 1, elements: int = 128, view_of: int | None = None, mutates: tuple[int, ...] = ()
    ) -> int:
        made = [
            self.value(elements=elements, storage=self.values[view_of].storage if view_of is not None else None) for _ in range(outputs)
        ]
        index = len(self.operators)
        touched = [*reads, *mutates]
        call = Call("aten::fake.default", tuple(Ref(value) for value in touched), (), tuple(made))
        self.operators.append(
            Operator(
                index,
                f"op{index}",
                (call,),
                tuple(reads),
                tuple(made),
                mutates,
                1000,
                sum(self.values[value].spec.bytes for value in touched),
                sum(self.values[value].spec.bytes for value in made),
                kernel_signature((call,), self.values),
                "",
            )
        )
        return made[0] if made else -1

    def build(self, outputs: list[int] | None = None) -> OpGraph:
        if outputs is None:
            read = {value for operator in self.operators for value in operator.reads}
            outputs = [value.index for value in self.values if value.role is ValueRole.INTERMEDIATE and value.index not in read]
        graph = OpGraph(tuple(self.operators), tuple(self.values), self.inputs, tuple(outputs))
        graph.validate()
        return graph


def random_graph(rng: random.Random, operators: int) -> OpGraph:
    """A graph of ``operators`` operators with views, in-place changes and multi-output operators."""
    builder = GraphBuilder(inputs=2)
    for _ in range(operators):
        known = [value.index for value in builder.values]
        recent = known[-8:]
        own = [value for value in recent if builder.values[value].role is ValueRole.INTERMEDIATE]
        reads = sorted({rng.choice(recent) for _ in range(rng.randint(1, 3))})
        draw = rng.random()
        if draw < 0.12 and own:
            base = rng.choice(own)
            builder.add([base], view_of=base)
        elif draw < 0.24 and own:
            changed = rng.choice(own)
            builder.add([value for value in reads if value != changed], outputs=1, mutates=(changed,))
        else:
            builder.add(reads, outputs=2 if draw > 0.85 else 1, elements=rng.choice((100, 128, 300, 512)))
    return builder.build()


def random_schedule(rng: random.Random, graph: OpGraph, lanes: int, *, priorities: bool = False, extra: int = 0) -> Schedule:
    """A random topological launch order, random lanes, and some extra edges."""
    order = random_order(rng, graph)
    edges = []
    for _ in range(extra):
        first, last = sorted(rng.sample(range(len(order)), 2))
        edges.append((order[first], order[last]))
    return make_schedule(
        graph,
        order,
        [rng.randrange(lanes) for _ in order],
        priority=[rng.randrange(3) for _ in order] if priorities else None,
        extra_edges=edges,
    )


def diamond(branches: int = 3, depth: int = 3) -> OpGraph:
    """One operator, ``branches`` chains of ``depth`` beside each other, and one that joins them."""
    builder = GraphBuilder()
    root = builder.add([builder.inputs[0]])
    ends = []
    for _ in range(branches):
        value = root
        for _ in range(depth):
            value = builder.add([value])
        ends.append(value)
    builder.add(ends)
    return builder.build()
