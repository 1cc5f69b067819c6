"""From a PyTorch model to a program: ``torch.export``, then one call of the program for each call of the exported graph."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from autosched.capture.assignments import assignments_seen
from autosched.capture.build import build_program
from autosched.capture.containers import real_containers
from autosched.capture.custom import run_twice
from autosched.capture.draft import Constant, Draft, Node, spec_of
from autosched.capture.passes.batch_norm import whole_batch_norms
from autosched.capture.passes.views import loosen_views
from autosched.capture.rewrite import RewriteReport, rewrite_draft
from autosched.capture.screen import (
    composites,
    explain_export_failure,
    is_check,
    no_nested_padding,
    quiet_torch,
    require_dense_dtypes,
    require_inference,
    require_schedulable,
)
from autosched.capture.sources import source_of
from autosched.capture.structure import structure_of
from autosched.core.containers import pack_call
from autosched.core.errors import UnsupportedGraph, UsageError
from autosched.core.namedtuples import register_namedtuples
from autosched.core.parts import named_tensors
from autosched.core.program import ConstantSource, Program, Ref
from autosched.core.variants import WHOLE, Lowering

logger = logging.getLogger(__name__)

# Calls whose result is their argument: without autograd they change nothing.
_SAME_TENSOR = frozenset({"aten::alias", "aten::detach", "aten::detach_", "aten::lift_fresh", "aten::_conj_physical_identity"})
# Python's operators, under the names they have everywhere else.
_RENAMED = {
    "aten::__and__": "bitwise_and", "aten::__or__": "bitwise_or", "aten::__xor__": "bitwise_xor",
    "aten::__lshift__": "bitwise_left_shift", "aten::__rshift__": "bitwise_right_shift",
}  # fmt: skip
_OWN_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
_COPIES = frozenset({"aten::clone", "aten::lift_fresh_copy"})


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Args:
        program: what it computes.
        constants: the tensor of each of ``program.bindings``, by value index: the model's own, not copies.
        rewrites: what each pass did, in order; empty for the lowering ``aten``.
        structure: ``structure.structure_of`` the model, the same for every lowering; empty if nobody asked.
    """

    program: Program
    constants: dict[int, torch.Tensor]
    rewrites: tuple[RewriteReport, ...]
    structure: str = ""


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    rewrite: bool = True,
    target: str = "",
    lowering: Lowering | None = None,
) -> Captured:
    """Capture ``model`` for inputs shaped like ``args`` and ``kwargs``.

    Args:
        model: in inference mode; it is run on the example inputs, on the device they are on, and left unchanged.
        args, kwargs: example inputs; nested containers of tensors and numbers. Numbers become part of the program.
        rewrite: fold, simplify and fuse (lowering ``rewritten``); otherwise one operator for each ATen call (lowering ``aten``).
        target: kind of device (``cpu``, ``cuda``) whose operators the rewriting may choose; by default that of the example inputs. A
            model on a CPU can be captured for a GPU that this process never touches.
        lowering: what an operator is; by default what ``rewrite`` says. Not one of ``WHOLE``: ``pipeline.inductor_capture`` does those.

    A custom operator is captured where its namespace is trusted (``core.custom_operators.trusting``), as an operator of its own.

    Raises:
        UnsupportedGraph: if the model cannot be captured or scheduled, naming the operator, its source line and what to do.
        UsageError: for a lowering of ``WHOLE``.
    """
    chosen = lowering if lowering is not None else Lowering.REWRITTEN if rewrite else Lowering.ATEN
    if chosen in WHOLE:
        raise UsageError(f"capture() got the lowering {chosen}, which needs the compiler of the device; use pipeline.inductor_capture")
    return lower_draft(draft_of(model, args, kwargs), chosen, target)


def lower_draft(draft: Draft, chosen: Lowering, target: str = "") -> Captured:
    """A draft of :func:`draft_of` in the lowering ``chosen``, not one of ``WHOLE``; it is changed. Target, errors: as :func:`capture`."""
    structure = structure_of(draft)
    reports: tuple[RewriteReport, ...] = ()
    if chosen is not Lowering.ATEN:
        reports = rewrite_draft(draft, target, chosen)
    elif (target or draft.device.type) == "cuda":
        # The model's own call: what export has put in its place is slower there than the model is.
        whole_batch_norms(draft)
        # Tensors are laid out otherwise there than on the device that the draft was observed on.
        loosen_views(draft)
    program, constants = build_program(draft, chosen.value)
    logger.info("captured %d operators, %d constants, width %d", len(program.graph), len(constants), program.graph.width)
    return Captured(program, constants, reports, structure)


def _export(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    try:
        with (
            torch.no_grad(), quiet_torch(), no_nested_padding(model), real_containers(model), assignments_seen(model),
            warnings.catch_warnings(),
        ):  # fmt: skip
            # torch's own use of its own deprecated class.
            warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)", category=FutureWarning)
            # torch.nn.LSTM and its kin keep their parameters a second time in a list, which export notices and may ignore.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights", category=UserWarning)
            exported = torch.export.export(model, args, kwargs, strict=False)
            decomposed: ExportedProgram = exported.run_decompositions(composites(exported.graph))
            return decomposed
    except UnsupportedGraph:
        raise
    except Exception as error:  # Whatever the user's model raises is the user's to read.
        raise explain_export_failure(error) from error


def _observe(draft: Draft) -> None:
    try:
        try:
            draft.observe(around=run_twice)
        except RuntimeError as error:
            if "view size is not compatible" not in str(error):
                raise
            # Export guessed another layout than a kernel gives: a view there is a copy here, as it is in eager mode.
            loosen_views(draft)
            draft.observe(around=run_twice)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        short_of_memory = isinstance(error, torch.OutOfMemoryError) or "allocate memory" in first
        advice = "Take a smaller batch" if short_of_memory else "Check that the model and its inputs are on one device"
        raise UnsupportedGraph(
            f"the captured operators cannot run on the example inputs: {first}. Expected what runs in eager mode. {advice}."
        ) from error


def draft_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Draft:
    """The observed draft of a model, one node for each ATen call, without dead code.

    Raises:
        UnsupportedGraph: as :func:`capture`.
    """
    require_inference(model)
    call = pack_call((args, dict(kwargs or {})))
    register_namedtuples(call)
    args, given = _as_examples(call)
    draft = _Reader(_export(model, args, given), model).read(args, given)
    draft.remove_dead()
    _observe(draft)
    require_dense_dtypes(draft)
    return draft


def _as_examples(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, each a dense tensor of its own: export takes one given twice for one input, and no call is laid out as one that
    was expanded.

    Raises:
        UnsupportedGraph: if one is sparse.
    """
    leaves, spec = tree_flatten(call)
    seen: set[int] = set()
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.layout is not torch.strided:
            raise UnsupportedGraph(
                f"an example input of shape {list(leaf.shape)} is {leaf.layout}; expected strided tensors. Give it as to_dense(), or make "
                "it sparse inside the model."
            )
        if id(leaf) in seen:
            leaves[place] = leaf.detach().clone()
        if leaf.layout is torch.strided and spec_of(leaf).overlaps:
            leaves[place] = leaf.detach().contiguous()
        seen.add(id(leaf))
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, spec)
    return made


class _Reader:
    """Walks an exported graph once, filling a draft."""

    def __init__(self, exported: ExportedProgram, model: torch.nn.Module) -> None:
        self._exported = exported
        self._model = model
        self._ids: dict[torch.fx.Node, int | list[int] | None] = {}
        self._next = 0
        self._nodes: list[Node] = []
        self._targets: dict[str, int] = {}  # what a call may change, by the name that the signature has for it
        self._state: dict[int, Constant] = {}
        self._writes: list[tuple[int, int]] = []
        self._returned = _reach_outputs(exported)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        graph = self._exported.graph
        given, in_spec = tree_flatten((args, kwargs))
        # Export may put keyword arguments in the order of the model's signature; the program keeps the caller's.
        numbered_args, numbered_kwargs = tree_unflatten(list(range(len(given))), in_spec)
        places: list[int] = tree_leaves((numbered_args, self._ordered(numbered_kwargs)))
        leaves = [given[place] for place in places]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        constants, inputs, input_leaves, examples = self._placeholders(placeholders, leaves)
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
            constants=constants,
            prologue=[],
            nodes=self._nodes,
            input_leaves=caller_leaves,
            output_leaves=output_leaves,
            input_tree=_tree(in_spec, "inputs"),
            output_tree=_tree(self._exported.call_spec.out_spec, "outputs"),
            examples=examples,
            next_value=self._next,
            state=self._state,
            writes=self._writes,
        )

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
        changed = {item.target for item in signature.output_specs if item.kind in _OWN_CHANGES}
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
            self._ids[node] = value
        return constants, inputs, input_leaves, examples

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            items = self._ids[source] if isinstance(source, torch.fx.Node) else None
            if isinstance(items, list) and isinstance(index, int):
                self._ids[node] = items[index]
                return
        if is_check(node):
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
        if op._schema.name in _RENAMED:
            op = _renamed(op)
        self._nodes.append(Node(op, args, kwargs, outputs, node.name, source_of(node.meta.get("stack_trace"))))

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
            elif spec.kind in _OWN_CHANGES or spec.kind is OutputKind.USER_INPUT_MUTATION:
                made = self._argument(item)
                assert isinstance(made, Ref)
                self._writes.append((self._targets[spec.target or ""], made.value))
            else:
                raise UnsupportedGraph(f"the model has an output of kind {spec.kind.name.lower()}; expected tensors and numbers.")
        return leaves


def _renamed(op: OpOverload[..., Any]) -> OpOverload[..., Any]:
    packet, overload = getattr(torch.ops.aten, _RENAMED[op._schema.name]), op._schema.overload_name
    found: OpOverload[..., Any] = getattr(packet, overload if overload in packet.overloads() else f"Tensor_{overload}")
    return found


def _reach_outputs(exported: ExportedProgram) -> set[torch.fx.Node]:
    """Calls whose result leaves the model, or whose memory does: what an output may be a view of, by the operators' schemas."""
    names = {item.arg.name for item in exported.graph_signature.output_specs if isinstance(item.arg, TensorArgument)}
    found: set[torch.fx.Node] = set()
    pending = [node for node in exported.graph.nodes if node.name in names]
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
