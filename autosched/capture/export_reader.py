"""One call of a draft for each call of an exported graph, and what its signature says of inputs, outputs and state."""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from autosched.capture.draft import Constant, Draft, Node
from autosched.capture.plain_calls import complex_as_tensors, in_plain_words
from autosched.capture.screen import is_check, require_schedulable, require_true_for_all_inputs
from autosched.capture.sources import source_of
from autosched.core.errors import UnsupportedGraph
from autosched.core.namedtuples import register_namedtuples
from autosched.core.parts import named_tensors
from autosched.core.program import ConstantSource, Ref

# Calls whose result is their argument: without autograd they change nothing.
_SAME_TENSOR = frozenset({"aten::alias", "aten::detach", "aten::detach_", "aten::lift_fresh", "aten::_conj_physical_identity"})
OWN_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
_COPIES = frozenset({"aten::clone", "aten::lift_fresh_copy"})
_HELD = "torch.fx.immutable_collections.immutable_"
_SPELLED = {f"{_HELD}dict": "builtins.dict", f"{_HELD}list": "builtins.list"}


class ExportReader:
    """Walks an exported graph once, filling a draft."""

    def __init__(self, exported: ExportedProgram, model: torch.nn.Module) -> None:
        self._exported = exported
        self._model = model
        self._ids: dict[torch.fx.Node, int | list[int] | None] = {}
        self._next = 0
        self._nodes: list[Node] = []
        self._constants: dict[int, Constant] = {}
        self._targets: dict[str, int] = {}  # what a call may change, by the name that the signature has for it
        self._state: dict[int, Constant] = {}
        self._writes: list[tuple[int, int]] = []
        self._varying: set[torch.fx.Node] = set()  # what depends on inputs or state
        self._returned = _reach_outputs(exported)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        """The draft of the call that was exported with these arguments.

        Raises:
            UnsupportedGraph: naming what cannot be scheduled.
        """
        graph = self._exported.graph
        given, in_spec = tree_flatten((args, kwargs))
        # Export may put keyword arguments in the order of the model's signature; the program keeps the caller's.
        numbered_args, numbered_kwargs = tree_unflatten(list(range(len(given))), in_spec)
        places: list[int] = tree_leaves((numbered_args, self._ordered(numbered_kwargs)))
        leaves = [given[place] for place in places]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._constants, inputs, input_leaves, examples = self._placeholders(placeholders, leaves)
        caller_leaves = [leaf for _, leaf in sorted(zip(places, input_leaves, strict=True), key=lambda pair: pair[0])]
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr" and node.users:
                require_schedulable(next(iter(node.users)))
                raise UnsupportedGraph(
                    f"the model holds a sub-graph or object {node.target!r} that cannot be scheduled. Expected operators on tensors only; "
                    "unroll the control flow."
                )
        output_leaves = self._outputs(next(node for node in graph.nodes if node.op == "output"))
        return Draft(
            inputs=[*sorted(inputs, key=lambda value: caller_leaves.index(Ref(value))), *self._state],
            constants=self._constants,
            prologue=[],
            nodes=self._nodes,
            input_leaves=caller_leaves,
            output_leaves=output_leaves,
            input_tree=_tree(in_spec, "inputs"),
            output_tree=self._output_tree(),
            examples=examples,
            next_value=self._next,
            state=self._state,
            writes=self._writes,
        )

    def _output_tree(self) -> str:
        text = _tree(self._exported.call_spec.out_spec, "outputs")
        model = self._model
        if not isinstance(model, torch.fx.GraphModule) or type(model.graph._codegen) is not torch.fx.graph.CodeGen:
            return text
        # Export runs a graph node by node, and returns the containers that a node's arguments are held in; the model's code spells others.
        document = json.loads(text)
        pending = [document[1]]
        while pending:
            node = pending.pop()
            node["type"] = _SPELLED.get(node["type"], node["type"])
            pending += node["children_spec"]
        return str(treespec_dumps(treespec_loads(json.dumps(document))))

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def _ordered(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        spec = self._exported.call_spec.in_spec
        names = spec.children()[1].context if spec is not None else None
        return {name: kwargs[name] for name in names} if names and set(names) == set(kwargs) else kwargs

    def _placeholders(
        self, nodes: list[torch.fx.Node], leaves: list[Any]
    ) -> tuple[dict[int, Constant], list[int], list[object], dict[int, torch.Tensor]]:
        constants: dict[int, Constant] = {}
        inputs: list[int] = []
        input_leaves: list[object] = []
        examples: dict[int, torch.Tensor] = {}
        signature = self._exported.graph_signature
        named = named_tensors(self._model)
        changed = {item.target for item in signature.output_specs if item.kind in OWN_CHANGES}
        for node, spec in zip(nodes, signature.input_specs, strict=True):
            name = spec.target or ""
            if spec.kind is InputKind.USER_INPUT:
                leaf = leaves[len(input_leaves)]
                if isinstance(spec.arg, ConstantArgument) or not isinstance(leaf, torch.Tensor):
                    input_leaves.append(leaf)
                    self._ids[node] = None
                    continue
                value = self._fresh()
                inputs.append(value)
                input_leaves.append(Ref(value))
                examples[value] = leaf.detach()
                self._targets[node.name] = value
                self._varying.add(node)
            elif spec.kind is InputKind.PARAMETER:
                value = self._fresh()
                tensor = named[ConstantSource.PARAMETER].get(name, self._exported.state_dict.get(name))
                constants[value] = Constant(ConstantSource.PARAMETER, name, tensor)
            elif spec.kind is InputKind.BUFFER:
                value = self._fresh()
                stored = self._exported.state_dict if spec.persistent else self._exported.constants
                constants[value] = Constant(ConstantSource.BUFFER, name, named[ConstantSource.BUFFER].get(name, stored.get(name)))
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                value = self._fresh()
                constants[value] = Constant(ConstantSource.LITERAL, name, self._exported.constants[name])
            elif not node.users:
                self._ids[node] = None
                continue
            else:
                raise UnsupportedGraph(
                    f"the model uses {name or node.name!r}, a {spec.kind.name.lower()}, which cannot be scheduled. Expected tensors only; "
                    "pass what a generator draws as an input, and unpack packed weights."
                )
            if name in changed and spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                # No constant: it is another at each call.
                self._state[value] = constants.pop(value)
                examples[value] = self._state[value].tensor.detach()
                self._targets[name] = value
                self._varying.add(node)
            self._ids[node] = value
        return constants, inputs, input_leaves, examples

    def _call(self, node: torch.fx.Node) -> None:
        varies = not self._varying.isdisjoint(node.all_input_nodes)
        if varies:
            self._varying.add(node)
        if node.target is operator.getitem:
            source, index = node.args
            items = self._ids[source] if isinstance(source, torch.fx.Node) else None
            if isinstance(items, list) and isinstance(index, int):
                self._ids[node] = items[index]
                return
        if is_check(node):
            require_true_for_all_inputs(node, varies)
            self._ids[node] = None
            return
        require_schedulable(node)
        op = node.target
        assert isinstance(op, OpOverload)
        if self._passes_through(node, op):
            return
        made = node.meta.get("val")
        outputs: tuple[int, ...]
        if isinstance(made, list | tuple):
            items = [self._fresh() if isinstance(item, torch.Tensor) else -1 for item in made]
            self._ids[node] = items
            outputs = tuple(items)
        elif isinstance(made, torch.Tensor):
            value = self._fresh()
            self._ids[node] = value
            outputs = (value,)
        else:
            self._ids[node] = None
            outputs = (-1,)
        args = tuple(self._argument(item) for item in node.args)
        kwargs = {name: self._argument(item) for name, item in node.kwargs.items()}
        op, args = complex_as_tensors(op, args, made)
        args = tuple(self._literal(item) if isinstance(item, torch.Tensor) else item for item in args)
        op, args, kwargs = in_plain_words(op, args, kwargs, made)
        self._nodes.append(Node(op, args, kwargs, outputs, node.name, source_of(node.meta.get("stack_trace"))))

    def _literal(self, tensor: torch.Tensor) -> Ref:
        """A constant of its own, which travels with the program."""
        value = self._fresh()
        self._constants[value] = Constant(ConstantSource.LITERAL, f"number_{value}", tensor)
        return Ref(value)

    def _passes_through(self, node: torch.fx.Node, op: OpOverload[..., Any]) -> bool:
        name = op._schema.name
        if name not in _SAME_TENSOR and name not in _COPIES:
            return False
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        if name in _COPIES:
            before, after = source.meta.get("val"), node.meta.get("val")
            same = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.stride() == after.stride()
            # A copy that leaves the model, whole or as a view, must stay one: its owner may write to it, or to what it was copied from.
            if not same or node in self._returned:
                return False
        self._ids[node] = self._ids[source]
        return True

    def _argument(self, item: object) -> object:
        if isinstance(item, torch.fx.Node):
            value = self._ids[item]
            if isinstance(value, int):
                return Ref(value)
            if isinstance(value, list):
                return [Ref(part) for part in value]
            return item.meta.get("val")
        if isinstance(item, list | tuple):
            return [self._argument(part) for part in item]
        return item

    def _outputs(self, node: torch.fx.Node) -> list[object]:
        leaves: list[object] = []
        returned = node.args[0]
        assert isinstance(returned, list | tuple)
        for item, spec in zip(returned, self._exported.graph_signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                leaves.append(self._argument(item))
            elif spec.kind in OWN_CHANGES or spec.kind is OutputKind.USER_INPUT_MUTATION:
                made = self._argument(item)
                assert isinstance(made, Ref)
                self._writes.append((self._targets[spec.target or ""], made.value))
            else:
                raise UnsupportedGraph(f"the model has an output of kind {spec.kind.name.lower()}; expected tensors and numbers.")
        return leaves


def _reach_outputs(exported: ExportedProgram) -> set[torch.fx.Node]:
    """Calls whose result leaves the model, or whose memory does: what an output may be a view of, by the operators' schemas."""
    found: set[torch.fx.Node] = set()
    pending = list(next(node for node in exported.graph.nodes if node.op == "output").all_input_nodes)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if isinstance(node.target, OpOverload):
            schema = node.target._schema
            if any(item.alias_info is not None for item in schema.returns):
                # A list of views, as of a split, has no mark of its own on every argument: take all of them.
                pending += node.all_input_nodes
        else:
            pending += node.all_input_nodes
    return found


def _tree(spec: Any, what: str) -> str:
    try:
        register_namedtuples(tree_unflatten(list(range(spec.num_leaves)), spec))
        text = treespec_dumps(spec)
        if treespec_loads(text) != spec:
            raise ValueError("what was written is read as something else")
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedGraph(
            f"the model's {what} hold a container that cannot be written down ({error}). Expected tuples, lists, dataclasses of a "
            "module that can be imported, and dictionaries with text, numbers or tuples of them as keys; register another container with "
            "torch.utils._pytree and a serialised name, or return a tuple."
        ) from error
    return text
