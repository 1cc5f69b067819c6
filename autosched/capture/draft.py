"""The mutable working form of a captured model: what export fills, what rewriting passes change, what a program is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._ops import OpOverload

from autosched.capture.aliasing import shared_with, written_values
from autosched.capture.arguments import map_refs, refs_in
from autosched.core.graph import TensorSpec
from autosched.core.program import ConstantSource, Decision, Ref
from autosched.core.specs import spec_of

Around = Callable[["Node", Mapping[int, torch.Tensor], Callable[[], list[object]]], list[object]]
"""Runs one call of a draft: given the call, the tensors by value id, and the call as a function; returns what that made."""


@dataclass(slots=True, eq=False)
class Node:
    """One call of one operator overload.

    Args:
        op: the overload.
        args, kwargs: torch's own arguments, tensors replaced by ``Ref``, lists as lists.
        outputs: value id of each tensor returned; -1 where it is not used.
        name: for people.
        source: ``file:line``, or empty.
    """

    op: OpOverload[..., Any]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    outputs: tuple[int, ...]
    name: str
    source: str = ""

    @property
    def target(self) -> str:
        """``namespace::name.overload``."""
        return f"{self.op._schema.name}.{self.op._schema.overload_name or 'default'}"

    @property
    def kind(self) -> str:
        """``namespace::name``."""
        return self.op._schema.name

    def reads(self) -> tuple[int, ...]:
        """Value ids of every tensor argument, in order, without repetition."""
        return tuple(dict.fromkeys([*refs_in(list(self.args)), *refs_in(list(self.kwargs.values()))]))

    def mutates(self) -> tuple[int, ...]:
        """Value ids of every argument written in place."""
        return written_values(self.op, self.args, self.kwargs)

    def argument(self, name: str) -> object:
        """The argument called ``name`` in the schema, its default if the call leaves it out."""
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value if argument.has_default_value() else None)
        raise KeyError(f"{self.target} has no argument {name}")

    def tensor(self, name: str) -> int | None:
        """Value id of the tensor argument called ``name``; None if it is absent or no tensor."""
        item = self.argument(name)
        return item.value if isinstance(item, Ref) else None

    def become(self, layer: Node, weight: int, bias: int | None) -> None:
        """Compute what ``layer``, a convolution or a linear layer, does of the same numbers with that weight and bias."""
        self.op = layer.op
        self.args = (layer.args[0], Ref(weight), None if bias is None else Ref(bias), *layer.args[3:])
        self.kwargs = {name: item for name, item in layer.kwargs.items() if name not in ("weight", "bias")}

    def substitute(self, mapping: Mapping[int, int]) -> None:
        """Replace argument ids by what ``mapping`` says."""

        def change(value: int) -> Ref:
            return Ref(mapping.get(value, value))

        self.args = tuple(map_refs(item, change) for item in self.args)
        self.kwargs = {name: map_refs(item, change) for name, item in self.kwargs.items()}

    def copy(self, outputs: tuple[int, ...]) -> Node:
        """The same call, filling other outputs."""
        return Node(self.op, self.args, dict(self.kwargs), outputs, self.name, self.source)


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor of the model, and the name it has there."""

    source: ConstantSource
    name: str
    tensor: torch.Tensor


@dataclass(slots=True)
class Draft:
    """A captured model, changeable.

    Args:
        inputs: value ids of the user's tensors, in flattened order, and of ``state``.
        constants: value id -> tensor of the model.
        prologue: calls evaluated once, from constants.
        nodes: calls of each run, in a topological order.
        regions: how calls are grouped into operators; None: each call is one operator.
        input_leaves, output_leaves: flattened leaves, ``Ref`` or literal.
        input_tree, output_tree: ``treespec_dumps``.
        examples: the user's tensors by value id.
        specs, storage: shape and strides, and the owner of the memory, of each value, as last observed.
        state: input value id -> tensor of the model's that it changes, so that it is no constant.
        writes: ``(input, value)``: what the contents of an input become after the run, in order.
        held: input value id -> the whole numbers, first and last, that it is drawn from in place of the example's; see ``held_inputs``.
        target: kind of device that it is rewritten for; empty: where it lies.
        decided: by which of its own tensors the model decides what runs.
    """

    inputs: list[int]
    constants: dict[int, Constant]
    prologue: list[Node]
    nodes: list[Node]
    input_leaves: list[object]
    output_leaves: list[object]
    input_tree: str
    output_tree: str
    examples: dict[int, torch.Tensor]
    next_value: int
    regions: list[list[Node]] | None = None
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    storage: dict[int, int] = field(default_factory=dict)
    state: dict[int, Constant] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    target: str = ""
    decided: tuple[Decision, ...] = ()

    def copy(self) -> Draft:
        """The same draft, to be changed apart from this one; tensors are shared. It is not grouped into operators."""
        return Draft(
            list(self.inputs),
            dict(self.constants),
            [node.copy(node.outputs) for node in self.prologue],
            [node.copy(node.outputs) for node in self.nodes],
            list(self.input_leaves),
            list(self.output_leaves),
            self.input_tree,
            self.output_tree,
            dict(self.examples),
            self.next_value,
            specs=dict(self.specs),
            storage=dict(self.storage),
            state=dict(self.state),
            writes=list(self.writes),
            held=dict(self.held),
            target=self.target,
            decided=self.decided,
        )

    def fresh(self) -> int:
        """A value id not used before."""
        self.next_value += 1
        return self.next_value - 1

    def prepare(self, node: Node, what: str, op: OpOverload[..., Any], *args: object) -> int:
        """The value that one more call of the prologue makes for ``node``, after which it is named, with ``what`` behind."""
        value = self.fresh()
        self.prologue.append(Node(op, args, {}, (value,), f"{node.name}_{what}", node.source))
        return value

    @property
    def device(self) -> torch.device:
        """Where the example inputs are, else where the constants are."""
        tensors = [*self.examples.values(), *(constant.tensor for constant in self.constants.values())]
        return tensors[0].device if tensors else torch.device("cpu")

    def output_values(self) -> list[int]:
        """Value ids of the graph's outputs, in order, without repetition."""
        return list(dict.fromkeys([*refs_in(self.output_leaves), *(value for _, value in self.writes)]))

    def leaving(self) -> set[int]:
        """Owners of memory that leaves the model, whole or as a view; of an observed draft."""
        return {self.storage[value] for value in self.output_values()}

    def written(self) -> set[int]:
        """Owners of memory that calls of the body change in place; of an observed draft."""
        return {self.storage[value] for node in self.nodes for value in node.mutates()}

    def made_for_one(self) -> dict[int, Node]:
        """Value id -> the body call that makes it, of those that one call reads and that do not leave the model."""
        users, outputs = self.users(), set(self.output_values())
        return {value: node for value, node in self.producers().items() if value not in outputs and len(users.get(value, ())) == 1}

    def users(self) -> dict[int, list[Node]]:
        """Value id -> the body calls that read it, in order."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            for value in node.reads():
                found.setdefault(value, []).append(node)
        return found

    def producers(self) -> dict[int, Node]:
        """Value id -> the body call that makes it."""
        return {value: node for node in self.nodes for value in node.outputs if value >= 0}

    def fixed_values(self) -> set[int]:
        """Value ids that are the same in every run: constants nobody writes, and what the prologue makes."""
        written = {self.storage.get(value, value) for node in self.nodes for value in node.mutates()}
        fixed = set(self.constants) - written
        return fixed | {value for node in self.prologue for value in node.outputs if value >= 0}

    def substitute(self, mapping: Mapping[int, int]) -> None:
        """Replace value ids everywhere they are read; chains in ``mapping`` are followed."""
        if not mapping:
            return
        resolved = {value: _follow(value, mapping) for value in mapping}
        for node in self.nodes:
            node.substitute(resolved)
        self.output_leaves = [map_refs(leaf, lambda value: Ref(resolved.get(value, value))) for leaf in self.output_leaves]
        self.writes = [(target, resolved.get(value, value)) for target, value in self.writes]
        # Views of what went are views of what stands for it.
        for value, owner in self.storage.items():
            if owner in resolved:
                self.storage[value] = self.storage.get(resolved[owner], resolved[owner])

    def remove_dead(self) -> int:
        """Drop calls and constants that no output and no mutation needs; mark unused outputs -1. Returns how many calls went."""
        before = len(self.nodes) + len(self.prologue)
        live = set(self.output_values())
        self.nodes = _live(self.nodes, live)
        self.prologue = _live(self.prologue, live)
        self.constants = {value: constant for value, constant in self.constants.items() if value in live}
        return before - len(self.nodes) - len(self.prologue)

    def observe(
        self,
        before: Callable[[Node], Sequence[Node]] = lambda node: (),
        around: Around = lambda node, tensors, run: run(),
    ) -> dict[int, torch.Tensor]:
        """Run the draft once on the example inputs and note the spec and the storage of every value; returns the outputs by id.

        Buffers that the model changes are copied first: observing leaves the model as it was. A call of the prologue runs when the first
        call that needs it comes, and what it made goes with the last: all packed weights together are as large as the model.

        Args:
            before: asked before each call of the body, when all calls ahead of it are noted; the calls it returns become part of the
                body there, and it may change the arguments of the call it was asked about to what they make.
            around: runs each call.
        """
        written = {value for node in self.nodes for value in node.mutates()}
        self.specs, self.storage = {}, {}
        tensors: dict[int, torch.Tensor] = {}
        for value, tensor in self.examples.items():
            self._note(value, tensor, value, tensors)
        for value, constant in self.constants.items():
            tensor = constant.tensor.detach()
            self._note(value, tensor.clone() if value in written else tensor, value, tensors)
        outputs = self.output_values()
        with torch.inference_mode():
            order = _each_when_needed(self.prologue, self.nodes)
            last: dict[int, Node] = {value: node for node in order for value in node.reads()}
            kept = {*outputs, *self.constants, *self.inputs}
            ahead = {id(node) for node in self.prologue}
            body: list[Node] = []
            for node in order:
                read = node.reads()
                if id(node) in ahead:
                    self._run(node, tensors, around)
                else:
                    for item in (*before(node), node):
                        self._run(item, tensors, around)
                        body.append(item)
                _drop(tensors, [value for value in read if last[value] is node and value not in kept])
            self.nodes = body
        return {value: tensors[value] for value in outputs}

    def _note(self, value: int, tensor: torch.Tensor, owner: int, tensors: dict[int, torch.Tensor]) -> None:
        tensors[value] = tensor
        self.specs[value] = spec_of(tensor)
        self.storage[value] = owner

    def _run(
        self,
        node: Node,
        tensors: dict[int, torch.Tensor],
        around: Around,
    ) -> None:
        made = around(node, tensors, lambda: call(node, tensors.__getitem__))
        given = [(value, tensors[value]) for value in node.reads()]
        for value, item in zip(node.outputs, made, strict=True):
            if value >= 0:
                tensor = cast(torch.Tensor, item)
                shared = shared_with(tensor, iter(given))
                self._note(value, tensor, self.storage[shared] if shared is not None else value, tensors)
                given.append((value, tensor))


def _each_when_needed(prologue: Sequence[Node], body: Sequence[Node]) -> list[Node]:
    """All calls, those of the prologue each right before the first of the body that needs it; first those that none needs."""
    due: dict[int, int] = {}
    for place, node in enumerate(body):
        for value in node.reads():
            due.setdefault(value, place)
    ahead: dict[int, list[Node]] = {}
    for node in reversed(prologue):
        place = min((due[value] for value in node.outputs if value in due), default=-1)
        ahead.setdefault(place, []).append(node)
        for value in node.reads():
            due[value] = min(due.get(value, place), place)
    return [*reversed(ahead.get(-1, [])), *(each for place, node in enumerate(body) for each in (*reversed(ahead.get(place, [])), node))]


def call(node: Node, lookup: Callable[[int], torch.Tensor]) -> list[object]:
    """Run one call on real tensors; the items it returned, as a list."""
    args = [map_refs(item, lookup) for item in node.args]
    kwargs = {name: map_refs(item, lookup) for name, item in node.kwargs.items()}
    result = node.op(*args, **kwargs)
    return list(result) if isinstance(result, list | tuple) else [result]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense row-major tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_dense(spec: TensorSpec) -> bool:
    """Whether it has elements and they lie row by row; a dimension of one element may have any stride."""
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return spec.elements > 0


def _drop(tensors: dict[int, torch.Tensor], values: Sequence[int]) -> None:
    for value in values:
        tensors.pop(value, None)


def _follow(value: int, mapping: Mapping[int, int]) -> int:
    while value in mapping:
        value = mapping[value]
    return value


def _live(nodes: list[Node], live: set[int]) -> list[Node]:
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.mutates() or any(value in live for value in node.outputs):
            node.outputs = tuple(value if value in live else -1 for value in node.outputs)
            live.update(node.reads())
            kept.append(node)
    kept.reverse()
    return kept


def iterate_regions(draft: Draft) -> Iterator[list[Node]]:
    """The operators as lists of calls."""
    yield from draft.regions if draft.regions is not None else ([node] for node in draft.nodes)
