"""Checks on a program that came from a stranger, before anything computes with it.

``OpGraph.validate`` assumes that indices point into the value table; here nothing is assumed. What passes can be hashed,
planned and bound without an index going astray, and its call signature can be rebuilt without importing a module by name.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence

from autosched.core.errors import InvalidGraph
from autosched.core.graph import ITEM_BYTES, OpGraph, TensorSpec, ValueRole
from autosched.core.opened import OPENED, read_context
from autosched.core.program import Argument, Call, ConstantSource, Many, Program, Ref, fits_64_bits

_MAX_VALUES = 2_000_000
_MAX_OPERATORS = 50_000
_MAX_ITEMS = 4_000_000  # references and literals of all calls together
_MAX_ELEMENTS = 2**40  # of one tensor
_MAX_INPUT_BYTES = 2**33  # of all inputs together: load makes random ones
_MAX_NAME = 4096
_MAX_TREE_DEPTH = 64
# A defaultdict's factory is found by importing the module that the text names; these need no import.
_DEFAULT_FACTORIES = frozenset(("list", "dict", "set", "tuple", "int", "float", "str", "bool"))


def check_program(program: Program) -> None:
    """Raise unless every index, size and name of ``program`` is sane.

    Raises:
        InvalidGraph: naming what is not.
    """
    graph = program.graph
    count = len(graph.values)
    if count > _MAX_VALUES or len(graph.operators) > _MAX_OPERATORS:
        raise InvalidGraph(f"{count} values, {len(graph.operators)} operators; expected at most {_MAX_VALUES} and {_MAX_OPERATORS}")
    for value in graph.values:
        _check_spec(value.spec, value.index)
    calls = [*program.prologue, *(call for operator in graph.operators for call in operator.calls)]
    _check_calls(calls, count)
    for operator in graph.operators:
        _check_indices((*operator.reads, *operator.writes, *operator.mutates), count, f"operator {operator.index}")
        _check_range((operator.flops, operator.bytes_read, operator.bytes_written), f"operator {operator.index}")
        _check_names((operator.name, operator.signature, operator.source))
    _check_boundary(program)
    graph.validate()
    _check_storages(graph)
    _check_constants(program)
    _check_writes(program)
    _check_decided(program)
    _check_tree(program.input_tree, len(program.input_leaves), "inputs")
    _check_tree(program.output_tree, len(program.output_leaves), "outputs")


def _check_spec(spec: TensorSpec, index: int) -> None:
    if spec.dtype not in ITEM_BYTES:
        raise InvalidGraph(f"value {index} has dtype {spec.dtype[:40]!r}; expected one of {sorted(ITEM_BYTES)}")
    if len(spec.shape) > 64 or len(spec.strides) not in (0, len(spec.shape)):
        raise InvalidGraph(f"value {index} has {len(spec.shape)} sizes and {len(spec.strides)} strides; expected as many, or no strides")
    # Sizes are bounded one by one before their product, which would otherwise be a number without end.
    if any(not 0 <= size <= _MAX_ELEMENTS for size in (*spec.shape, *spec.strides)) or spec.elements > _MAX_ELEMENTS:
        raise InvalidGraph(f"value {index} has a size or stride outside 0 to {_MAX_ELEMENTS}")


def _check_calls(calls: Sequence[Call], count: int) -> None:
    items = 0
    for call in calls:
        _check_names((call.target, *(name for name, _ in call.kwargs)))
        stack: list[Argument] = [*call.args, *(argument for _, argument in call.kwargs)]
        while stack:
            argument = stack.pop()
            items += 1
            if isinstance(argument, Many):
                stack.extend(argument.items)
            elif isinstance(argument, Ref):
                _check_indices((argument.value,), count, f"call {call.target}")
            elif isinstance(argument, int):
                _check_range((argument,), f"call {call.target}")
        _check_indices((value for value in call.outputs if value != -1), count, f"call {call.target}")
        items += len(call.outputs)
        if items > _MAX_ITEMS:
            raise InvalidGraph(f"more than {_MAX_ITEMS} arguments and results in all calls together")


def _check_indices(indices: Iterable[int], count: int, what: str) -> None:
    for index in indices:
        if not 0 <= index < count:
            raise InvalidGraph(f"{what} names value {index}; expected 0 to {count - 1}")


def _check_range(numbers: Iterable[int], what: str) -> None:
    for number in numbers:
        if not fits_64_bits(number):
            raise InvalidGraph(f"{what} holds an integer that does not fit 64 bits")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        # Names end up in messages on terminals, where control characters are commands.
        if len(name) > _MAX_NAME or not name.isprintable():
            raise InvalidGraph(f"the name {name[:40]!r} is longer than {_MAX_NAME} characters or not printable")


def _check_boundary(program: Program) -> None:
    graph = program.graph
    count = len(graph.values)
    _check_indices((*graph.inputs, *graph.outputs), count, "the graph")
    _check_indices((item.value for item in program.inputs), count, "an input")
    _check_indices((binding.value for binding in (*program.bindings, *program.state)), count, "a binding")
    _check_names(binding.name for binding in (*program.bindings, *program.state))
    _check_indices((value for item in program.writes for value in (item.target, item.value)), count, "a write")
    if [binding.value for binding in program.state] != list(graph.inputs[len(graph.inputs) - len(program.state) :]):
        raise InvalidGraph("the model's state is not the graph's last inputs, in order")
    _check_names((program.lowering, *(text for choice in program.choices for text in choice)))
    if len(set(graph.inputs)) != len(graph.inputs):
        raise InvalidGraph("an input appears twice")
    if [item.value for item in program.inputs] != list(graph.inputs):
        raise InvalidGraph("the input descriptions are not those of the graph's inputs, in order")
    # Inputs are written to, when they are laid out as in tuning.
    overlapping = [value for value in graph.inputs if graph.values[value].spec.overlaps]
    if overlapping:
        raise InvalidGraph(f"input {overlapping[0]} has strides at which its elements share memory; give a dense example (x.contiguous())")
    if any(graph.values[value].role is not ValueRole.INPUT for value in graph.inputs):
        raise InvalidGraph("an input of the graph does not have the role of one")
    for item in program.inputs:
        if not (math.isfinite(item.mean) and math.isfinite(item.std) and item.std >= 0):
            raise InvalidGraph(f"input {item.value} has mean {item.mean} and deviation {item.std}; expected finite numbers")
        if not -(2**62) <= item.low <= item.high <= 2**62:
            raise InvalidGraph(f"input {item.value} ranges from {item.low} to {item.high}; expected an ascending range within 63 bits")
    if sum(_strided_bytes(graph.values[value].spec) for value in graph.inputs) > _MAX_INPUT_BYTES:
        raise InvalidGraph(f"the inputs hold more than {_MAX_INPUT_BYTES} bytes")
    given = {leaf.value for leaf in program.input_leaves if isinstance(leaf, Ref)}
    if given != set(program.given):
        raise InvalidGraph("the call signature does not fill exactly the graph's inputs")
    returned = [leaf.value for leaf in program.output_leaves if isinstance(leaf, Ref)]
    if not set(returned) <= set(graph.outputs):
        raise InvalidGraph("the call signature returns values that are no outputs of the graph")
    for leaf in (*program.input_leaves, *program.output_leaves):
        if isinstance(leaf, Many):
            raise InvalidGraph("a list is a leaf of the call signature; expected its items to be")
        if isinstance(leaf, int):
            _check_range((leaf,), "the call signature")


def _check_storages(graph: OpGraph) -> None:
    # What is changed in place is told from the caller's memory by the role of the value that owns the storage.
    callers = (ValueRole.INPUT, ValueRole.CONSTANT)
    for value in graph.values:
        if value.role in callers and graph.values[value.storage].role not in callers:
            raise InvalidGraph(f"value {value.index} is an {value.role} in memory that the program makes itself")


def _strided_bytes(spec: TensorSpec) -> int:
    # A stride can ask for more memory than the elements need.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=False) if size > 0)
    return max(reach, spec.elements) * 16


def _check_constants(program: Program) -> None:
    graph = program.graph
    made: set[int] = set()
    for binding in program.bindings:
        if binding.value in made:
            raise InvalidGraph(f"constant {binding.value} is bound twice")
        made.add(binding.value)
    for call in program.prologue:
        missing = [value for value in call.reads() if value not in made]
        if missing:
            raise InvalidGraph(f"the prologue reads values {missing} before anything makes them")
        new = {value for value in call.outputs if value >= 0}
        if new & made:
            raise InvalidGraph("the prologue makes a value that exists already")
        made |= new
    wrong = [value for value in made if graph.values[value].role not in (ValueRole.CONSTANT, ValueRole.INTERNAL)]
    if wrong:
        raise InvalidGraph(f"values {sorted(wrong)[:5]} are constants by origin, but not by role")
    needed = _constants_needed(graph)
    if not needed <= made:
        raise InvalidGraph(f"constants {sorted(needed - made)[:5]} come from nowhere")


def _constants_needed(graph: OpGraph) -> set[int]:
    used = {value for operator in graph.operators for value in (*operator.reads, *operator.mutates)} | set(graph.outputs)
    return {value for value in used if graph.values[value].role is ValueRole.CONSTANT}


def _check_writes(program: Program) -> None:
    graph = program.graph
    if any(binding.source is ConstantSource.LITERAL for binding in program.state):
        raise InvalidGraph("a tensor of the program's own is read as state of the model")
    names = [binding.name for binding in program.state]
    constants = {binding.name for binding in program.bindings if binding.source is not ConstantSource.LITERAL}
    twice = sorted({name for name in names if names.count(name) > 1 or name in constants})
    if twice:
        raise InvalidGraph(f"{twice[0][:40]!r} is state of the model, and read by another name as well")
    targets = [item.target for item in program.writes]
    if len(set(targets)) != len(targets) or not set(targets) <= set(graph.inputs):
        raise InvalidGraph("an input is written back twice, or what is written back is no input")
    if unwritten := [binding.name for binding in program.state if binding.value not in set(targets)]:
        raise InvalidGraph(f"{unwritten[0][:40]!r} is state of the model that nothing changes")
    for item in program.writes:
        if item.value not in graph.outputs:
            raise InvalidGraph(f"value {item.value} is written back and is no output of the graph")
        there, made = graph.values[item.target].spec, graph.values[item.value].spec
        if (there.shape, there.dtype) != (made.shape, made.dtype):
            raise InvalidGraph(f"value {item.value} is written back to {item.target}, which has another shape or dtype")


def _check_decided(program: Program) -> None:
    _check_names(text for item in program.decided for text in (item.name, item.digest))
    if any(item.source is ConstantSource.LITERAL for item in program.decided):
        raise InvalidGraph("the model decides by a tensor of the program's own")
    state = {(binding.source, binding.name) for binding in program.state}
    if changed := [item.name for item in program.decided if (item.source, item.name) in state]:
        raise InvalidGraph(f"the model decides by {changed[0][:40]!r}, which it changes at each call")


def _check_tree(text: str, leaves: int, what: str) -> None:
    """Check a serialised pytree: PyTorch imports modules that it names, so only what needs no import may pass."""
    tree = _parse(text, what)
    if not (isinstance(tree, list) and len(tree) == 2 and tree[0] == 1):
        raise InvalidGraph(f"the structure of the {what} is not a pytree of protocol 1")
    found = 0
    stack: list[tuple[object, int]] = [(tree[1], 0)]
    while stack:
        node, depth = stack.pop()
        if not isinstance(node, dict) or node.keys() != {"type", "context", "children_spec"} or depth > _MAX_TREE_DEPTH:
            raise InvalidGraph(f"the structure of the {what} holds something that is no pytree node, or is nested too deeply")
        kind, context, children = node["type"], node["context"], node["children_spec"]
        if not isinstance(children, list) or not (kind is None or isinstance(kind, str)):
            raise InvalidGraph(f"the structure of the {what} has a node without a type or children")
        if kind is None:
            if children or context is not None:
                raise InvalidGraph(f"the structure of the {what} has a leaf with children")
            found += 1
            continue
        _check_context(kind, context, len(children), what)
        stack.extend((child, depth + 1) for child in children)
    if found != leaves:
        raise InvalidGraph(f"the structure of the {what} has {found} leaves; expected {leaves}")


def _parse(text: str, what: str) -> object:
    # PyTorch reads these texts with the standard library; another parser may take a text for broken that this one accepts.
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGraph(f"the structure of the {what} is not readable: {error}") from error
    return parsed


def _check_context(kind: str, context: object, children: int, what: str) -> None:
    if kind == "collections.defaultdict":
        if not isinstance(context, dict) or context.get("default_factory_module") != "builtins":
            raise InvalidGraph(f"the structure of the {what} has a defaultdict whose factory is not a builtin")
        if context.get("default_factory_name") not in _DEFAULT_FACTORIES:
            raise InvalidGraph(f"the structure of the {what} has a defaultdict with an unexpected factory")
    elif kind in ("builtins.dict", "collections.OrderedDict"):
        keys = _parse(context, what) if isinstance(context, str) else None
        if not isinstance(keys, list) or len(keys) != children or not all(isinstance(key, (str, int, float, bool)) for key in keys):
            raise InvalidGraph(f"the structure of the {what} has a dict of {children} items without as many plain keys")
    elif kind == OPENED:
        try:
            form, _ = read_context(_parse(context, what) if isinstance(context, str) else None)
        except ValueError as error:
            raise InvalidGraph(f"the structure of the {what} has an object that cannot be made: {error}") from error
        if len(form.names) != children:
            raise InvalidGraph(f"the structure of the {what} has a {form.kind[:80]} of {children} items with {len(form.names)} names")
    # Contexts are JSON inside JSON: the marker of an enumeration may hide behind escapes, so look at what is decoded.
    pending: list[object] = [context]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if "__enum__" in item:
                raise InvalidGraph(f"the structure of the {what} has an enumeration as a key; expected text and numbers")
            with contextlib.suppress(ValueError, RecursionError):
                pending.append(json.loads(item))
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
