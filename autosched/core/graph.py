"""The operator graph: what is scheduled, and every ordering that a schedule must keep.

Edges are derived from the operators, never stored: a data edge where an operator reads a value
another one produced, a mutation edge where two operators touch one storage and at least one of
them writes it. Values that share memory (views) share a storage index.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.computed_once import computed_once
from autosched.core.custom_operators import is_custom
from autosched.core.digests import GrowingDigest, digest_of
from autosched.core.errors import InvalidGraph
from autosched.core.program import Argument, Call, Many, Ref

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2,
    "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16, "float4_e2m1fn_x2": 1, "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element of every dtype that a value may have, by name without ``torch.``."""


class ValueRole(enum.StrEnum):
    """Who owns a value, and how long it lives."""

    INPUT = "input"  # given at each call
    CONSTANT = "constant"  # a parameter, or computed from parameters once
    INTERMEDIATE = "intermediate"  # made by one operator, read by others
    INTERNAL = "internal"  # made and read inside one operator


class EdgeKind(enum.StrEnum):
    """Why one operator must come before another."""

    DATA = "data"  # the second reads what the first made
    MUTATION = "mutation"  # both touch one storage and one of them writes it


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape (elements), dtype name without ``torch.``, strides (elements; empty for opaque layouts)."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without padding."""
        return self.elements * ITEM_BYTES.get(self.dtype, 4)

    @property
    def overlaps(self) -> bool:
        """Whether two elements may share memory, as in an expanded tensor; also for opaque layouts."""
        if len(self.strides) != len(self.shape):
            return True
        if 0 in self.shape:
            # Operators on no elements leave any strides.
            return False
        reach = 1
        for stride, size in sorted((stride, size) for stride, size in zip(self.strides, self.shape, strict=True) if size > 1):
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
        return False


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the value table; ``storage`` is the index of the value that owns the memory."""

    index: int
    spec: TensorSpec
    role: ValueRole
    storage: int


@dataclass(frozen=True, slots=True)
class Operator:
    """What a schedule places: one ATen call, or a fused region, run as one unit on one lane.

    Args:
        index: position in ``OpGraph.operators``, which is a topological order.
        name: unique, for people; never part of a hash.
        calls: what it runs, in order.
        reads: values made outside that it reads.
        writes: values it makes that live on outside.
        mutates: values made outside that it changes in place.
        flops: floating point operations, a multiply-add counted as two.
        bytes_read, bytes_written: bytes of ``reads`` and ``writes``.
        signature: digest of what decides its speed: calls, literals, shapes, dtypes, strides.
        source: ``file:line`` of the model's code, or empty.
    """

    index: int
    name: str
    calls: tuple[Call, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    signature: str
    source: str

    @property
    def kind(self) -> str:
        """The main call's operator name, for example ``aten::convolution``."""
        heaviest = self.calls[0]
        for call in self.calls:
            if is_custom(call.target) or any(word in call.target for word in ("conv", "mm", "linear", "attention", "lstm", "rnn", "gru")):
                heaviest = call
                break
        return heaviest.target.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Edge:
    """Operator ``before`` must have finished when operator ``after`` starts."""

    before: int
    after: int
    kind: EdgeKind


@dataclass(frozen=True)
class OpGraph:
    """Operators in a topological order, the value table, and the values that go in and out."""

    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.operators)

    @computed_once
    def producer(self) -> dict[int, int]:
        """Value index -> operator that makes it."""
        return {value: operator.index for operator in self.operators for value in operator.writes}

    @computed_once
    def storage_uses(self) -> dict[int, tuple[int, ...]]:
        """Storage index -> operators that read or write any value in it, ascending."""
        uses: dict[int, dict[int, None]] = {}
        for operator in self.operators:
            for value in (*operator.reads, *operator.writes, *operator.mutates):
                uses.setdefault(self.values[value].storage, {})[operator.index] = None
        return {storage: tuple(users) for storage, users in uses.items()}

    @computed_once
    def edges(self) -> tuple[Edge, ...]:
        """Every ordering a schedule must keep, each pair once (data before mutation)."""
        return _derive_edges(self)

    @computed_once
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators it must wait for, ascending."""
        before: list[list[int]] = [[] for _ in self.operators]
        for edge in self.edges:
            before[edge.after].append(edge.before)
        return tuple(map(tuple, before))  # the edges are in order

    @computed_once
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that must wait for it, ascending."""
        after: list[list[int]] = [[] for _ in self.operators]
        for edge in self.edges:
            after[edge.before].append(edge.after)
        return tuple(map(tuple, after))

    @computed_once
    def reachable(self) -> tuple[int, ...]:
        """For each operator, a bit mask of all operators that come after it, directly or not."""
        masks = [0] * len(self.operators)
        for index in range(len(self.operators) - 1, -1, -1):
            for after in self.successors[index]:
                masks[index] |= masks[after] | (1 << after)
        return tuple(masks)

    @computed_once
    def ancestors(self) -> tuple[int, ...]:
        """For each operator, a bit mask of all operators that come before it, directly or not."""
        masks = [0] * len(self.operators)
        for index in range(len(self.operators)):
            for before in self.predecessors[index]:
                masks[index] |= masks[before] | (1 << before)
        return tuple(masks)

    def independent(self, a: int, b: int) -> bool:
        """Whether operators ``a`` and ``b`` may run at the same time."""
        return a != b and not (self.reachable[a] >> b & 1) and not (self.reachable[b] >> a & 1)

    @computed_once
    def width(self) -> int:
        """Most operators on one level of the as-soon-as-possible levelling; a cheap lower bound of the true width."""
        level = [0] * len(self.operators)
        for index in range(len(self.operators)):
            level[index] = 1 + max((level[before] for before in self.predecessors[index]), default=-1)
        return max(Counter(level).values(), default=0)

    @computed_once
    def hash(self) -> str:
        """sha256 that depends on what is computed, not on names or on the order of independent operators."""
        return _canonical_hash(self)

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvalidGraph: naming the operator or value that breaks one.
        """
        _validate(self)


def _derive_edges(graph: OpGraph) -> tuple[Edge, ...]:
    found: dict[tuple[int, int], EdgeKind] = {}
    last_writers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for operator in graph.operators:
        for value in operator.reads:
            producer = graph.producer.get(value)
            if producer is not None and producer != operator.index:
                found[producer, operator.index] = EdgeKind.DATA
        written = {graph.values[value].storage for value in operator.mutates}
        touched = {graph.values[value].storage for value in (*operator.reads, *operator.writes)} | written
        for storage in touched:
            # A view made of a storage reads it; the first writer of a fresh storage has nobody before it.
            if (writer := last_writers.get(storage)) is not None:
                found.setdefault((writer, operator.index), EdgeKind.MUTATION)
            if storage in written:
                for reader in readers.get(storage, ()):
                    found.setdefault((reader, operator.index), EdgeKind.MUTATION)
        for storage in touched:
            if storage in written:
                last_writers[storage] = operator.index
                readers[storage] = []
            else:
                readers.setdefault(storage, []).append(operator.index)
    return tuple(Edge(before, after, kind) for (before, after), kind in sorted(found.items()))


def _validate(graph: OpGraph) -> None:
    values = graph.values
    for position, value in enumerate(values):
        if value.index != position or not 0 <= value.storage < len(values):
            raise InvalidGraph(
                f"value {position} has index {value.index} and storage {value.storage}; expected its own position and a value"
            )
        if values[value.storage].storage != value.storage:
            raise InvalidGraph(f"value {position} lives in storage {value.storage}, which is itself a view; expected the owner")
    available = set(graph.inputs) | {value.index for value in values if value.role is ValueRole.CONSTANT}
    names: set[str] = set()
    for position, operator in enumerate(graph.operators):
        if operator.index != position:
            raise InvalidGraph(f"operator {operator.name} has index {operator.index} at position {position}")
        if operator.name in names:
            raise InvalidGraph(f"two operators are called {operator.name}")
        names.add(operator.name)
        if not operator.calls:
            raise InvalidGraph(f"operator {operator.name} calls nothing")
        for value_index in (*operator.reads, *operator.mutates):
            if value_index not in available:
                raise InvalidGraph(
                    f"operator {operator.name} reads value {value_index}, which nothing before it makes (a cycle, or a wrong order)"
                )
        local = set(operator.reads) | set(operator.mutates)
        for call in operator.calls:
            missing = [value_index for value_index in call.reads() if value_index not in local]
            if missing:
                raise InvalidGraph(f"operator {operator.name}: call {call.target} reads values {missing} that it does not have")
            made = {value_index for value_index in call.outputs if value_index >= 0}
            # Not their union: that would be made anew for each call, of all values there are.
            if not (made.isdisjoint(available) and made.isdisjoint(local)):
                raise InvalidGraph(f"operator {operator.name}: call {call.target} makes a value that exists already")
            local |= made
        absent = [value_index for value_index in operator.writes if value_index not in local]
        if absent:
            raise InvalidGraph(f"operator {operator.name} should write values {absent}, but none of its calls makes them")
        available.update(operator.writes)
    dangling = [value_index for value_index in graph.outputs if value_index not in available]
    if dangling:
        raise InvalidGraph(f"outputs {dangling} are made by no operator")


def _canonical_hash(graph: OpGraph) -> str:
    operators, outputs = merkle_digests(graph, numbered_inputs=True)
    return digest_of(sorted(operators), list(outputs)).hex()


def merkle_digests(graph: OpGraph, *, numbered_inputs: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """For each operator, and for each output, a digest of all that it is computed from; names and constants' contents do not matter.

    Args:
        numbered_inputs: whether the first input is another thing than the second of the same shape.
    """
    digests: dict[int, bytes] = {}
    for position, value_index in enumerate(graph.inputs):
        digests[value_index] = digest_of("input", position if numbered_inputs else 0, graph.values[value_index].spec)
    for value in graph.values:
        if value.role is ValueRole.CONSTANT:
            digests[value.index] = digest_of("constant", value.spec)
    operator_digests: list[str] = []
    mutated: dict[int, bytes] = {}
    for operator in graph.operators:
        # A reader after an in-place change reads something else than a reader before it.
        parts = GrowingDigest(mutated.get(graph.values[value].storage, b"").hex() for value in operator.reads)
        for call in operator.calls:
            described = [_describe(argument, digests) for argument in call.args]
            described += [[name, _describe(argument, digests)] for name, argument in call.kwargs]
            parts.add([call.target, described])
            call_digest = parts.digest()
            for slot, value_index in enumerate(call.outputs):
                if value_index >= 0:
                    owner = graph.values[value_index].storage != value_index
                    digests[value_index] = digest_of(call_digest.hex(), slot, owner, graph.values[value_index].spec)
        parts.add(len(operator.calls))
        digest = parts.digest()
        for value_index in operator.mutates:
            mutated[graph.values[value_index].storage] = digest
        operator_digests.append(digest.hex())
    return tuple(operator_digests), tuple(digests[value_index].hex() for value_index in graph.outputs)


def _describe(argument: Argument, digests: dict[int, bytes]) -> object:
    if isinstance(argument, Ref):
        return ["ref", digests[argument.value].hex()]
    if isinstance(argument, Many):
        return ["list", [_describe(item, digests) for item in argument.items]]
    if isinstance(argument, float):
        return ["float", argument.hex()]
    return argument


def kernel_signature(calls: Sequence[Call], values: Sequence[Value]) -> str:
    """Digest of what decides an operator's speed: two operators with equal signatures are one kernel.

    Which tensors are read does not matter; their specs do, and whether two arguments are the same tensor.
    """
    seen: dict[int, int] = {}
    described: list[object] = []
    for call in calls:
        arguments = [_spec_of(argument, values, seen) for argument in call.args]
        arguments += [[name, _spec_of(argument, values, seen)] for name, argument in call.kwargs]
        outputs = [values[value].spec if value >= 0 else None for value in call.outputs]
        described.append([call.target, arguments, outputs])
    return digest_of(described).hex()[:24]


def _spec_of(argument: Argument, values: Sequence[Value], seen: dict[int, int]) -> object:
    if isinstance(argument, Ref):
        place = seen.setdefault(argument.value, len(seen))
        return ["ref", place, values[argument.value].spec]
    if isinstance(argument, Many):
        return ["list", [_spec_of(item, values, seen) for item in argument.items]]
    if isinstance(argument, float):
        return ["float", argument.hex()]
    return argument
