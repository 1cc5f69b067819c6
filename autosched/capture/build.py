"""From a draft to an immutable program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from autosched.capture.arguments import map_refs, to_argument
from autosched.capture.draft import Draft, Node, iterate_regions
from autosched.capture.flops import count_flops
from autosched.capture.traffic import bytes_read, bytes_written, is_view
from autosched.core.errors import UnsupportedGraph
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature
from autosched.core.in_place import chains_in, in_graph_order, in_place_signature, is_copy
from autosched.core.program import Binding, Call, InputSpec, Program, WriteBack

_WIDEST = 2**62


def build_program(draft: Draft, lowering: str) -> tuple[Program, dict[int, torch.Tensor]]:
    """Number the values, write the calls down, count what they cost.

    Args:
        draft: observed after its last change.
        lowering: the name of the operator granularity.

    Returns:
        The program (its graph validated), and the tensor of each binding by value index.

    Raises:
        UnsupportedGraph: if an argument cannot be written down, or the model gives what it changes another shape or dtype.
        InvalidGraph: if the draft breaks an invariant (a bug).
    """
    regions = [list(region) for region in iterate_regions(draft)]
    numbers, values = _number(draft, regions)
    operators = tuple(_operator(index, region, draft, numbers, values) for index, region in enumerate(_named(regions)))
    graph = OpGraph(
        operators,
        tuple(values),
        tuple(numbers[value] for value in draft.inputs),
        tuple(numbers[value] for value in draft.output_values()),
    )
    writes = tuple(WriteBack(numbers[target], numbers[value]) for target, value in _fitting(draft))
    graph.validate()
    graph = dataclasses.replace(graph, operators=counted_in_place(graph, writes))
    program = Program(
        graph=graph,
        prologue=tuple(_call(node, numbers) for node in draft.prologue),
        bindings=tuple(Binding(numbers[value], item.source, item.name) for value, item in draft.constants.items()),
        inputs=tuple(_drawn(numbers[value], draft, value) for value in draft.inputs),
        input_tree=draft.input_tree,
        output_tree=draft.output_tree,
        input_leaves=tuple(to_argument(leaf, numbers) for leaf in draft.input_leaves),
        output_leaves=tuple(to_argument(leaf, numbers) for leaf in draft.output_leaves),
        lowering=lowering,
        state=tuple(Binding(numbers[value], item.source, item.name) for value, item in draft.state.items()),
        writes=writes,
        decided=draft.decided,
    )
    return program, {numbers[value]: item.tensor.detach() for value, item in draft.constants.items()}


def _fitting(draft: Draft) -> list[tuple[int, int]]:
    """``draft.writes``, where each value is one that its input can hold."""
    for target, value in draft.writes:
        old, new = draft.specs[target], draft.specs[value]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            what = f"buffer {draft.state[target].name!r}" if target in draft.state else f"input {draft.inputs.index(target)}"
            raise UnsupportedGraph(
                f"the model makes its {what} {list(new.shape)} {new.dtype}, and is given it as {list(old.shape)} {old.dtype}; expected "
                "writes that change neither. Give it the shape and dtype that it ends with (PyTorch resizes what is given as out=)."
            )
    return draft.writes


def _number(draft: Draft, regions: Sequence[Sequence[Node]]) -> tuple[dict[int, int], list[Value]]:
    """New numbers in the order inputs, constants, prologue, operators; and the value table."""
    outside = set(draft.output_values())
    home: dict[int, int] = {}
    for position, region in enumerate(regions):
        for node in region:
            home.update((value, position) for value in node.outputs if value >= 0)
    for position, region in enumerate(regions):
        outside.update(value for node in region for value in node.reads() if home.get(value, position) != position)
    roles: dict[int, ValueRole] = {value: ValueRole.INPUT for value in draft.inputs}
    roles |= {value: ValueRole.CONSTANT for value in draft.constants}
    roles |= {value: ValueRole.CONSTANT for node in draft.prologue for value in node.outputs if value >= 0}
    for value in home:
        roles[value] = ValueRole.INTERMEDIATE if value in outside else ValueRole.INTERNAL
    numbers = {value: index for index, value in enumerate(roles)}
    owners: dict[int, int] = {}
    values: list[Value] = []
    for value, role in roles.items():
        root = draft.storage[value]
        # The value that owned the memory may itself be unused: then the first one left stands for it.
        owner = owners.setdefault(root, numbers.get(root, numbers[value]))
        values.append(Value(numbers[value], draft.specs[value], role, owner))
    return numbers, values


def _named(regions: Sequence[list[Node]]) -> list[tuple[str, list[Node]]]:
    seen: dict[str, int] = {}
    named: list[tuple[str, list[Node]]] = []
    for region in regions:
        name = _main(region).name
        count = seen.get(name, 0)
        seen[name] = count + 1
        named.append((name if count == 0 else f"{name}.{count}", region))
    return named


def _main(region: Sequence[Node]) -> Node:
    """The call a region is called after: the first that is no view."""
    heavy = ("conv", "mm", "linear", "attention")
    return next(
        (node for node in region if any(word in node.kind for word in heavy)),
        next((node for node in region if not node.kind.endswith(("view", "permute", "reshape", "slice", "select", "expand"))), region[-1]),
    )


def _operator(index: int, named: tuple[str, list[Node]], draft: Draft, numbers: dict[int, int], values: list[Value]) -> Operator:
    name, region = named
    made = [value for node in region for value in node.outputs if value >= 0]
    mutates = list(dict.fromkeys(value for node in region for value in node.mutates() if value not in made))
    reads = list(dict.fromkeys(value for node in region for value in node.reads() if value not in made and value not in mutates))
    writes = [value for value in made if values[numbers[value]].role is ValueRole.INTERMEDIATE]
    calls = tuple(_call(node, numbers) for node in region)
    touched = [*(value for value in writes if draft.storage[value] in made), *mutates]
    return Operator(
        index=index,
        name=name,
        calls=calls,
        reads=tuple(numbers[value] for value in reads),
        writes=tuple(numbers[value] for value in writes),
        mutates=tuple(numbers[value] for value in mutates),
        flops=sum(_flops(node, draft) for node in region),
        bytes_read=bytes_read(region, draft.specs, draft.storage),
        bytes_written=bytes_written(touched, draft.specs, draft.storage),
        signature=kernel_signature(calls, values),
        source=_main(region).source,
    )


def counted_in_place(graph: OpGraph, writes: Sequence[WriteBack]) -> tuple[Operator, ...]:
    """The operators, those that are timed in place with what they then move, under a signature of its own: it is another kernel."""
    operators = list(graph.operators)
    for chain in chains_in(graph, writes):
        if not chain.repeatable or not in_graph_order(graph, chain):
            continue
        whole = graph.values[writes[chain.write].target].spec.bytes
        for link in chain.links:
            operator = operators[link.operator]
            call = operator.calls[link.call]
            others = [graph.values[value].spec.bytes for value in call.reads() if value != link.before]
            moved = 0 if is_copy(call) else min(whole, max(others, default=whole))
            operators[link.operator] = dataclasses.replace(
                operator,
                bytes_read=max(0, operator.bytes_read - whole),
                bytes_written=max(0, operator.bytes_written - whole) + moved,
                signature=in_place_signature(operator.signature),
            )
    return tuple(operators)


def _call(node: Node, numbers: dict[int, int]) -> Call:
    return Call(
        node.target,
        tuple(to_argument(item, numbers) for item in node.args),
        tuple(sorted((name, to_argument(item, numbers)) for name, item in node.kwargs.items())),
        tuple(numbers[value] if value >= 0 else -1 for value in node.outputs),
    )


def _flops(node: Node, draft: Draft) -> int:
    if is_view(node, draft.storage):
        return 0

    def stand_in(value: int) -> torch.Tensor:
        spec = draft.specs[value]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if len(spec.strides) != len(spec.shape):
            return torch.empty(spec.shape, dtype=dtype, device="meta")
        return torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="meta")

    args = [map_refs(item, stand_in) for item in node.args]
    kwargs = {name: map_refs(item, stand_in) for name, item in node.kwargs.items()}
    outputs: list[TensorSpec | None] = [draft.specs[value] if value >= 0 else None for value in node.outputs]
    return count_flops(node.op, args, kwargs, outputs)


def _drawn(number: int, draft: Draft, value: int) -> InputSpec:
    if (held := draft.held.get(value)) is not None:
        return InputSpec(number, *held, 0.0, 0.0)
    return _input_spec(number, draft.examples[value], state=value in draft.state)


def _input_spec(value: int, example: torch.Tensor, *, state: bool) -> InputSpec:
    if example.numel() == 0:
        return InputSpec(value, 0, 0, 0.0, 0.0)
    if example.dtype is torch.float4_e2m1fn_x2:
        # Two numbers in each byte, of which every pattern is one.
        return InputSpec(value, 0, 255, 0.0, 1.0)
    if example.dtype.is_floating_point:
        wide = example.detach().to(torch.float64)
        # A mask of 0 and -inf is a common input, and has no mean.
        wide = wide[wide.isfinite()]
        if wide.numel() == 0:
            return InputSpec(value, 0, 0, 0.0, 1.0)
        std = float(wide.std(correction=0))
        if state and std == 0.0:
            # As it begins, and not for long: an empty cache would hide what is done with a full one.
            std = 1.0
        return InputSpec(value, 0, 0, float(wide.mean()), std)
    if example.dtype.is_complex:
        return InputSpec(value, 0, 0, 0.0, 1.0)
    return InputSpec(value, *integer_range(example), 0.0, 0.0)


def integer_range(example: torch.Tensor) -> tuple[int, int]:
    """The smallest and the largest of the integers in ``example``, which has some; 63 bits hold both, and what is drawn between them."""
    # Not every kind of integer can be compared.
    wide = example.detach().to(torch.int64) if example.dtype is not torch.uint64 else example.detach().view(torch.int64)
    low, high = (max(-_WIDEST, min(int(item), _WIDEST)) for item in wide.aminmax())
    return low, high
