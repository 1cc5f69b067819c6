"""From a program (data) to callables: which operators may run, with which arguments, on which tensors.

Programs come from bundles, and bundles come from strangers: only operators of the allow-list resolve. A bound program
keeps one list of *slots*, one for each value of the table; kernel ``i`` reads its inputs from slots and writes its outputs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UnsupportedGraph
from autosched.core.graph import Operator, ValueRole
from autosched.core.program import Argument, Call, ConstantSource, Many, NonFinite, Program, Ref, TorchLiteral

Slots = list[Any]
Kernel = Callable[[Slots], None]

_NAMESPACES = frozenset({"aten", "mkldnn", "mkl", "prims", "autosched"})
# Reading files, printing, and changing what memory a tensor means have no place in a captured model.
_REFUSED = frozenset(
    {"from_file", "_print", "set_", "set_data", "resize_", "resize_as_", "_resize_output_", "set_source", "pin_memory", "_pin_memory"}
)


def resolve(target: str) -> Callable[..., Any]:
    """The operator overload called ``namespace::name.overload``.

    Raises:
        UnsupportedGraph: if it is not on the allow-list, or this PyTorch does not have it.
    """
    namespace, separator, rest = target.partition("::")
    name, dot, overload = rest.rpartition(".")
    if not separator or not dot or namespace not in _NAMESPACES or name in _REFUSED or name.startswith("__"):
        raise UnsupportedGraph(
            f"operator {target!r} may not run from a schedule; expected one of {sorted(_NAMESPACES)}. Capture the model again."
        )
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in packet.overloads():  # type: ignore[no-untyped-call]
        raise UnsupportedGraph(f"operator {target!r} does not exist in torch {torch.__version__}; tune again with this version.")
    found: Callable[..., Any] = getattr(packet, overload)
    return found


@dataclass(frozen=True)
class BoundProgram:
    """A program with its constants, ready to run on ``device``.

    Args:
        program: what was bound.
        device: where it runs.
        kernels: one callable for each operator; call under ``torch.inference_mode()``.
        constants: slots with every constant filled and everything else ``None``.
    """

    program: Program
    device: torch.device
    kernels: tuple[Kernel, ...]
    constants: Slots

    def new_slots(self, inputs: Sequence[torch.Tensor]) -> Slots:
        """Slots for one run; ``inputs`` in the order of ``program.graph.inputs``."""
        slots = self.constants.copy()
        for value, tensor in zip(self.program.graph.inputs, inputs, strict=True):
            slots[value] = tensor
        return slots

    def outputs(self, slots: Slots) -> list[torch.Tensor]:
        """The tensors of ``program.graph.outputs``."""
        return [slots[value] for value in self.program.graph.outputs]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run every operator in the graph's own order on the calling thread: the reference for any schedule."""
        with torch.inference_mode():
            slots = self.new_slots(inputs)
            for kernel in self.kernels:
                kernel(slots)
            return self.outputs(slots)


def bind(program: Program, constants: Mapping[int, torch.Tensor], device: torch.device | str | None = None) -> BoundProgram:
    """Fill in the constants, evaluate the prologue, and make a callable of every operator.

    Args:
        constants: tensor of every ``Binding``, by value index.
        device: where to run; by default where the constants are.

    Raises:
        UnsupportedGraph: if an operator is not allowed or does not exist here.
        ArtifactCorrupt: if a constant is missing.
    """
    graph = program.graph
    home = torch.device(device) if device is not None else _home(constants)
    slots: Slots = [None] * len(graph.values)
    for binding in program.bindings:
        if binding.value not in constants:
            raise ArtifactCorrupt("the program", f"constant {binding.name} is missing")
        slots[binding.value] = constants[binding.value]
    with torch.inference_mode():
        for call in program.prologue:
            _compile_call(call, home)(slots)
    needed = {value for operator in graph.operators for value in (*operator.reads, *operator.mutates)} | set(graph.outputs)
    for value in graph.values:
        if value.index not in needed:
            slots[value.index] = None
    kernels = tuple(_compile_operator(operator, program, home) for operator in graph.operators)
    return BoundProgram(program, home, kernels, slots)


def gather_constants(program: Program, model: torch.nn.Module, literals: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensor of every binding, from the model's parameters and buffers and from the literals that travel with the program.

    Raises:
        IncompatibleArtifact: naming every parameter that is absent or has another shape or dtype.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    sources: dict[ConstantSource, Mapping[str, torch.Tensor]] = {
        ConstantSource.PARAMETER: parameters,
        ConstantSource.BUFFER: buffers,
        ConstantSource.LITERAL: literals,
    }
    found: dict[int, torch.Tensor] = {}
    differences: list[str] = []
    for binding in program.bindings:
        tensor = sources[binding.source].get(binding.name)
        spec = program.graph.values[binding.value].spec
        if tensor is None:
            differences.append(f"{binding.source} {binding.name}: {list(spec.shape)} there, absent here")
        elif tuple(tensor.shape) != spec.shape or dtype_name(tensor.dtype) != spec.dtype:
            differences.append(
                f"{binding.source} {binding.name}: {list(spec.shape)} {spec.dtype} there, "
                f"{list(tensor.shape)} {dtype_name(tensor.dtype)} here"
            )
        else:
            found[binding.value] = tensor.detach()
    if differences:
        raise IncompatibleArtifact("the schedule", differences)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def random_inputs(program: Program, seed: int, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Inputs like the example's, in the order of ``program.graph.inputs``; equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    made: list[torch.Tensor] = []
    for item in program.inputs:
        spec = program.graph.values[item.value].spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if dtype is torch.bool:
            tensor = torch.randint(item.low, item.high + 1, spec.shape, generator=generator).to(torch.bool)
        elif not dtype.is_floating_point and not dtype.is_complex:
            tensor = torch.randint(item.low, item.high + 1, spec.shape, generator=generator).to(dtype)
        else:
            real = torch.float64 if dtype is torch.float64 else torch.float32
            tensor = (torch.randn(spec.shape, generator=generator, dtype=real) * item.std + item.mean).to(dtype)
        # An expanded input (stride 0) cannot be filled element by element; its values then come as they are.
        overlapping = any(stride == 0 and size > 1 for stride, size in zip(spec.strides, spec.shape, strict=True))
        dense = tensor if overlapping else torch.empty_strided(spec.shape, spec.strides, dtype=dtype).copy_(tensor)
        made.append(dense.to(device))
    return made


def _home(constants: Mapping[int, torch.Tensor]) -> torch.device:
    for tensor in constants.values():
        return tensor.device
    return torch.device("cpu")


def _compile_operator(operator: Operator, program: Program, device: torch.device) -> Kernel:
    calls = tuple(_compile_call(call, device) for call in operator.calls)
    # Values that nobody outside reads would otherwise keep their memory until the end of the run.
    kept = set(operator.writes)
    scratch = tuple(
        value
        for call in operator.calls
        for value in call.outputs
        if value >= 0 and value not in kept and program.graph.values[value].role in (ValueRole.INTERNAL, ValueRole.INTERMEDIATE)
    )
    if len(calls) == 1 and not scratch:
        return calls[0]

    def run(slots: Slots) -> None:
        for call in calls:
            call(slots)
        for value in scratch:
            slots[value] = None

    return run


def _compile_call(call: Call, device: torch.device) -> Kernel:
    function = resolve(call.target)
    template: list[Any] = []
    plain: list[tuple[int, int]] = []
    nested: list[tuple[int, Callable[[Slots], Any]]] = []
    for position, argument in enumerate(call.args):
        if isinstance(argument, Ref):
            plain.append((position, argument.value))
            template.append(None)
        elif isinstance(argument, Many) and _has_ref(argument):
            nested.append((position, _filler(argument, device)))
            template.append(None)
        else:
            template.append(_literal(argument, device))
    keywords = {name: _literal(argument, device) for name, argument in call.kwargs if not _has_ref(argument)}
    keyword_fillers = [(name, _filler(argument, device)) for name, argument in call.kwargs if _has_ref(argument)]
    store = _storer(call.outputs)

    if not keyword_fillers and not nested:

        def run_plain(slots: Slots) -> None:
            arguments = template.copy()
            for position, value in plain:
                arguments[position] = slots[value]
            store(slots, function(*arguments, **keywords))

        return run_plain

    def run(slots: Slots) -> None:
        arguments = template.copy()
        for position, value in plain:
            arguments[position] = slots[value]
        for position, fill in nested:
            arguments[position] = fill(slots)
        named = {**keywords, **{name: fill(slots) for name, fill in keyword_fillers}}
        store(slots, function(*arguments, **named))

    return run


def _storer(outputs: tuple[int, ...]) -> Callable[[Slots, Any], None]:
    if len(outputs) == 1 and outputs[0] >= 0:
        only = outputs[0]

        def store_one(slots: Slots, result: Any) -> None:
            # An operator that returns a list of one tensor still fills one slot.
            slots[only] = result[0] if isinstance(result, (tuple, list)) else result

        return store_one
    pairs = tuple((position, value) for position, value in enumerate(outputs) if value >= 0)

    def store_many(slots: Slots, result: Any) -> None:
        for position, value in pairs:
            slots[value] = result[position]

    return store_many


def _has_ref(argument: Argument) -> bool:
    return isinstance(argument, Ref) or (isinstance(argument, Many) and any(_has_ref(item) for item in argument.items))


def _filler(argument: Argument, device: torch.device) -> Callable[[Slots], Any]:
    if isinstance(argument, Ref):
        value = argument.value
        return lambda slots: slots[value]
    if isinstance(argument, Many) and _has_ref(argument):
        fillers = tuple(_filler(item, device) for item in argument.items)
        return lambda slots: [fill(slots) for fill in fillers]
    fixed = _literal(argument, device)
    return lambda slots: fixed


_LITERAL_TYPES: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def _literal(argument: Argument, device: torch.device) -> Any:
    if isinstance(argument, Many):
        return [_literal(item, device) for item in argument.items]
    if isinstance(argument, NonFinite):
        return float(argument.name)
    if isinstance(argument, TorchLiteral):
        if argument.kind == "device":
            return device
        found = getattr(torch, argument.name, None)
        if not isinstance(found, _LITERAL_TYPES[argument.kind]):
            raise UnsupportedGraph(
                f"{argument.kind} {argument.name!r} does not exist in torch {torch.__version__}; tune again with this version."
            )
        return found
    return argument
