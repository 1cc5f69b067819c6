"""The launches of Inductor's whole-graph code as a program: recorded where it is captured, and again wherever it runs.

No compiled code travels. A program of the lowering ``inductor``, or of another mode of Inductor's, carries the program it was compiled from
(``Program.source``) and what was chosen by timing; binding it compiles that with the local Inductor in the same mode, reads the launches
off again, and goes on only if they are, operator by operator, those of the program. What differs is an ``IncompatibleArtifact`` naming the
first difference, so a loader runs the model as it came.

On a CPU the code depends on the number of threads, so a program is compiled for the number torch has at the time of binding; another
number that gives another graph is incompatible, and only the width it was captured at can be used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, InvalidGraph
from autosched.core.extents import storage_of
from autosched.core.from_outside import let_through
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole, kernel_signature
from autosched.core.in_place import Chain, Manner, chains_of, copy_target, is_copy
from autosched.core.program import Argument, Call, Program, Ref, WriteBack
from autosched.core.program_json import decode_program, encode_program
from autosched.core.specs import spec_of
from autosched.runtime.audit import audit_run
from autosched.runtime.bundle.program_check import check_program
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.inductor.common import Compiled, Refused
from autosched.runtime.inductor.compile import compile_whole, returned_of
from autosched.runtime.inductor.instructions import unit_instructions
from autosched.runtime.inductor.modes import PLAIN, Mode, mode_of
from autosched.runtime.inductor.output_layouts import layout_units
from autosched.runtime.inductor.source import Kernel as LaunchedKernel
from autosched.runtime.inductor.source import Module, Unrecognised, read_module
from autosched.runtime.inductor.traffic import bytes_changed, bytes_read
from autosched.runtime.inductor.units import Overwritten, Unit, function_text, make_units
from autosched.runtime.inductor.weight_views import weight_name, weight_view_units
from autosched.runtime.instructions import carrying
from autosched.runtime.kernels import BoundProgram, answers, bind, random_inputs
from autosched.runtime.one_copy import one_copy
from autosched.runtime.thread_state import inference_mode

_log = logging.getLogger(__name__)

PREPARE = "inductor::prepare"
"""The one call of the prologue: every tensor that Inductor, or the source's own prologue, computes from the parameters."""

_SEED = 20_260  # of the inputs of the run that shows shapes; any will do
_LABEL = "the inductor program"


@dataclass(frozen=True)
class Recording:
    """A program that is compiled as a whole, its kernels, and the tensors of its prologue by value."""

    program: Program
    kernels: tuple[Kernel, ...]
    prepared: Mapping[int, torch.Tensor]


def forms_of(source: Program) -> tuple[bool, ...]:
    """What ``in_place`` of :func:`record` may be for ``source``, the better first."""
    return (True, False) if chains_of(source) else (False,)


def record(
    source: Program, constants: Mapping[int, torch.Tensor], device: torch.device | str, mode: Mode = PLAIN, *, in_place: bool = True
) -> Recording | Refused:
    """Compile ``source`` as a whole for ``device`` and take the result apart.

    Args:
        source: a program of ATen calls.
        constants: tensor of each of its bindings, by value index, on ``device``.
        mode: how; on a CPU it must be frozen, for weights are packed and batch norms folded only where they are constants.
        in_place: whether Inductor's code is to overwrite what ``source`` lets it, as that of ``torch.compile`` does. The recording then has
            an operator that copies what is overwritten, which ``runtime.in_place`` may leave out.

    Returns:
        The recording, checked by running it once; or why there is none, in which case another lowering is to be used.

    Raises:
        UnsupportedGraph, ArtifactCorrupt: as ``kernels.bind`` of ``source``.
    """
    home = torch.device(device)
    bound = bind(source, constants, home)
    inputs = random_inputs(source, _SEED, home)
    chains = chains_of(source) if in_place else ()
    compiled = compile_whole(bound, inputs, mode, [source.writes[chain.write] for chain in chains])
    if isinstance(compiled, Refused):
        return compiled
    try:
        module = read_module(compiled.source)
        if module.devices - {home.index or 0}:
            return Refused(f"the generated code runs on devices {sorted(module.devices)}; expected {home}")
        recording = _Assembler(bound, compiled, module, chains, mode).assemble(inputs)
    except Unrecognised as error:
        return Refused(f"the code Inductor wrote is not understood: {error}")
    except InvalidGraph as error:
        return Refused(f"the launches of the code Inductor wrote do not form a graph: {error}")
    except Exception as error:
        let_through(error)
        return Refused(f"the launches of the code Inductor wrote do not run one by one: {type(error).__name__}: {error}")
    if _expands_an_output(source, recording.program):
        return Refused("Inductor returns an expanded tensor where the model returns one whose elements can be written one by one")
    whole = bound_of(recording, bound.program, constants, home)
    _, lies = audit_run(whole, random_inputs(recording.program, _SEED, home))
    return Refused(f"the launches touch other memory than their code says: {lies[0]}") if lies else recording


def _expands_an_output(source: Program, program: Program) -> bool:
    """Whether elements of an output share memory that do not in ``source``: Inductor gives back what adding zeros was to make dense."""
    leaves = zip(source.output_leaves, program.output_leaves, strict=True)
    returned = [(theirs.value, ours.value) for theirs, ours in leaves if isinstance(theirs, Ref) and isinstance(ours, Ref)]
    returned += [(theirs.value, ours.value) for theirs, ours in zip(source.writes, program.writes, strict=True)]
    values, made = source.graph.values, program.graph.values
    return any(made[ours].spec.overlaps and not values[theirs].spec.overlaps for theirs, ours in returned)


def bind_recorded(program: Program, constants: Mapping[int, torch.Tensor], device: torch.device | str | None = None) -> BoundProgram:
    """``kernels.bind`` of a program that is compiled as a whole: compile its source here, and require the same operators.

    Raises:
        IncompatibleArtifact: saying what is different here.
        ArtifactCorrupt: if the program carries no source that can be read.
    """
    source, given = source_of(program, constants)
    home = torch.device(device) if device is not None else next((tensor.device for tensor in given.values()), torch.device("cpu"))
    copies = any(is_copy(call) for operator in program.graph.operators for call in operator.calls)
    recording = record(source, given, home, mode_of(program, home.type), in_place=copies)
    if isinstance(recording, Refused):
        raise IncompatibleArtifact(_LABEL, [f"Inductor: it was compiled there, but not here: {recording.reason}"])
    if difference := first_difference(program, recording.program):
        raise IncompatibleArtifact(_LABEL, [f"Inductor writes other code here (torch {torch.__version__}): {difference}"])
    return dataclasses.replace(bound_of(recording, source, given, home), program=program)


def source_of(program: Program, constants: Mapping[int, torch.Tensor]) -> tuple[Program, dict[int, torch.Tensor]]:
    """The program of ATen calls that ``program`` was compiled from, and its constants.

    Raises:
        ArtifactCorrupt: if there is none that can be read, or a constant is missing.
    """
    try:
        source = decode_program(program.source.encode())
        check_program(source)
    except (msgspec.MsgspecError, UnicodeError, InvalidGraph) as error:
        raise ArtifactCorrupt("the program", f"the program that it was compiled from: {error}") from error
    described = [(binding.source, binding.name) for binding in source.bindings]
    if source.source or described != [(binding.source, binding.name) for binding in program.bindings]:
        raise ArtifactCorrupt("the program", "the program that it was compiled from takes other constants")
    missing = [binding.name for binding in program.bindings if binding.value not in constants]
    if missing:
        raise ArtifactCorrupt("the program", f"constant {missing[0]} is missing")
    pairs = zip(source.bindings, program.bindings, strict=True)
    return source, {theirs.value: constants[ours.value] for theirs, ours in pairs}


def first_difference(program: Program, here: Program) -> str:
    """The first thing in which ``here`` is not ``program``, or an empty string.

    Names and costs do not count; nor does how a constant is laid out that one operator alone reads, which on a CPU depends on the number of
    threads (``widths.WidePrograms`` gives each operator that of its own).
    """
    if len(program.graph) != len(here.graph):
        return f"{len(program.graph)} operators there, {len(here.graph)} here"
    for theirs, ours in zip(program.graph.operators, here.graph.operators, strict=True):
        if difference := _operator_difference(theirs, ours):
            return f"operator {theirs.index} {difference}"
    readers = Counter(value for operator in program.graph.operators for value in operator.reads)
    for value, other in zip(program.graph.values, here.graph.values, strict=False):
        own = value.role is ValueRole.CONSTANT and readers[value.index] == 1
        if value != (dataclasses.replace(other, spec=value.spec) if own else other):
            return f"value {value.index} is {value.spec} there, {other.spec} here"
    same = (program.graph.inputs, program.graph.outputs) == (here.graph.inputs, here.graph.outputs)
    return "" if same and len(program.graph.values) == len(here.graph.values) else "it takes or returns other tensors"


def _operator_difference(theirs: Operator, ours: Operator) -> str:
    if theirs.kind != ours.kind:
        return f"is {theirs.kind} there, {ours.kind} here"
    for does in ("reads", "writes", "mutates"):
        there, here = getattr(theirs, does), getattr(ours, does)
        if there != here:
            return f"({theirs.kind}) {does} values {list(there)} there, {list(here)} here"
    return "" if theirs.calls == ours.calls else f"is {theirs.kind} there and here, with other arguments"


def bound_of(recording: Recording, source: Program, constants: Mapping[int, torch.Tensor], device: torch.device) -> BoundProgram:
    """A recording with the constants that it was made with, ready to run; ``constants`` by value index of ``source``."""
    program = recording.program
    slots: Slots = [None] * len(program.graph.values)
    for theirs, ours in zip(source.bindings, program.bindings, strict=True):
        slots[ours.value] = constants[theirs.value]
    given, answered = {storage_of(tensor) for tensor in constants.values()}, answers(program.graph)
    for value, tensor in recording.prepared.items():
        slots[value] = tensor if value in answered else one_copy(tensor, given)
    needed = {value for operator in program.graph.operators for value in (*operator.reads, *operator.mutates)} | set(program.graph.outputs)
    slots = [item if value in needed else None for value, item in enumerate(slots)]
    return BoundProgram(program, device, recording.kernels, slots)


class _Assembler:
    """Numbers the values, makes the functions, runs them once for the shapes, and writes the program down."""

    def __init__(self, bound: BoundProgram, compiled: Compiled, module: Module, chains: Sequence[Chain], mode: Mode) -> None:
        self._source = bound.program
        self._mode = mode
        self._bound = bound
        self._compiled = compiled
        self._kernels = module.kernels
        if len(module.arguments) != len(compiled.takes):
            raise Unrecognised(f"call takes {len(module.arguments)} tensors; expected {len(compiled.takes)}")
        names = dict(zip(compiled.takes, module.arguments, strict=True))
        writes = [self._source.writes[chain.write] for chain in chains]
        overwritten = {names[item.target]: self._overwritten(item, chain.repeatable) for item, chain in zip(writes, chains, strict=True)}
        returned = returned_of(self._source, writes)
        values = self._source.graph.values
        owning = {
            place for place, value in enumerate(returned) if values[value].storage == value and values[value].role is not ValueRole.INPUT
        }
        self._units = units = make_units(module, compiled.constants, overwritten, owning)
        if len(units.returned) != len(returned):
            raise Unrecognised(f"call returns {len(units.returned)} tensors; expected {len(returned)}")
        # By output of the source, the name of what it is in the code.
        self._returned = dict(zip(returned, units.returned, strict=True))
        self._returned |= {item.value: units.copies[names[item.target]] for item in writes}
        for value, unit in weight_view_units(bound).items():
            units.units.append(unit)
            units.owner[unit.name] = weight_name(self._source.graph.values[value].storage)
            self._returned[value] = unit.name
        self._place: dict[str, int] = {}  # name in the code -> value
        self._of_source: dict[int, int] = {}  # value of the source -> value
        self._prepared: dict[int, torch.Tensor] = {}
        self._number(module)

    def _overwritten(self, item: WriteBack, repeatable: bool) -> Overwritten:
        spec = self._source.graph.values[item.target].spec
        kind = self._bound.device.type
        # Named in every module that Inductor writes.
        allocation = f"empty_strided_{kind}({spec.shape!r}, {spec.strides!r}, torch.{spec.dtype})"
        return Overwritten(copy_target(Manner.PLACES if repeatable else Manner.UPDATES), allocation)

    def _number(self, module: Module) -> None:
        for value in (*self._source.graph.inputs, *(binding.value for binding in self._source.bindings)):
            self._of_source[value] = self._place[weight_name(value)] = len(self._of_source)
        following = len(self._of_source)
        for name, value in zip(module.arguments, self._compiled.takes, strict=True):
            if value not in self._of_source:
                self._of_source[value] = following
                self._prepared[following] = self._bound.constants[value]
                following += 1
            self._place[name] = self._of_source[value]
        used = {name for unit in self._units.units for name in (*unit.reads, *unit.changes)} | set(self._returned.values())
        for name in self._compiled.constants:
            if name in used:
                self._place[name] = following
                self._prepared[following] = self._compiled.namespace[name].detach()
                following += 1
        self._first_made = following
        for unit in self._units.units:
            for name in unit.makes:
                self._place[name] = following
                following += 1

    def assemble(self, inputs: Sequence[torch.Tensor]) -> Recording:
        kernels, specs = self._observe(inputs)
        if self._lay_out_anew(specs):
            kernels, specs = self._observe(inputs)
        values = self._values(specs)
        operators = tuple(self._operator(index, unit, values) for index, unit in enumerate(self._units.units))
        outputs = {
            value: self._place[self._returned[value]] if value in self._returned else self._of_source[value]
            for value in self._source.graph.outputs
        }
        count = len(self._source.graph.inputs)
        graph = OpGraph(operators, values, tuple(range(count)), tuple(dict.fromkeys(outputs.values())))
        graph.validate()
        bindings = tuple(dataclasses.replace(binding, value=self._of_source[binding.value]) for binding in self._source.bindings)
        taken = tuple(Ref(binding.value) for binding in bindings)
        prologue = (Call(PREPARE, taken, (), tuple(self._prepared)),) if self._prepared else ()
        program = dataclasses.replace(
            self._source,
            graph=graph,
            prologue=prologue,
            bindings=bindings,
            inputs=tuple(dataclasses.replace(item, value=self._of_source[item.value]) for item in self._source.inputs),
            input_leaves=tuple(_renamed(leaf, self._of_source) for leaf in self._source.input_leaves),
            output_leaves=tuple(_renamed(leaf, outputs) for leaf in self._source.output_leaves),
            lowering=self._mode.lowering.value,
            state=tuple(dataclasses.replace(binding, value=self._of_source[binding.value]) for binding in self._source.state),
            writes=tuple(WriteBack(self._of_source[item.target], outputs[item.value]) for item in self._source.writes),
            source=encode_program(self._source).decode(),
            # A CPU's program says nothing of what it always is: older readers understand it.
            frozen=self._mode.frozen and self._bound.device.type != "cpu",
            choices=self._compiled.choices,
        )
        return Recording(program, kernels, self._prepared)

    def _lay_out_anew(self, specs: Mapping[int, TensorSpec]) -> bool:
        """Whether some outputs had other strides than the model's, and have units now that give them those."""
        made = {name: specs[self._place[name]] for name in self._returned.values()}
        units = layout_units(self._source, self._returned, made, self._bound.device.type)
        for value, unit in units.items():
            (name,) = unit.makes
            self._units.units.append(unit)
            self._returned[value] = name
            self._place[name] = 1 + max(self._place.values())
        return bool(units)

    def _observe(self, inputs: Sequence[torch.Tensor]) -> tuple[tuple[Kernel, ...], dict[int, TensorSpec]]:
        """A function of every unit, run once, in order; the spec of every value."""
        kernels = tuple(_function(unit, self._place, self._compiled.namespace, self._kernels) for unit in self._units.units)
        count = 1 + max(self._place.values(), default=len(self._of_source))
        slots: Slots = [None] * max(count, len(self._of_source))
        specs: dict[int, TensorSpec] = {}
        for value, tensor in zip(self._source.graph.inputs, inputs, strict=True):
            slots[self._of_source[value]] = tensor
        for binding in self._source.bindings:
            spec = self._source.graph.values[binding.value].spec
            specs[self._of_source[binding.value]] = spec
            slots[self._of_source[binding.value]] = self._bound.constants[binding.value]
        for value, tensor in self._prepared.items():
            slots[value] = tensor
        for value, tensor in enumerate(slots):
            if isinstance(tensor, torch.Tensor):
                specs.setdefault(value, spec_of(tensor))
        with inference_mode(True):
            for unit, kernel in zip(self._units.units, kernels, strict=True):
                kernel(slots)
                for name in unit.makes:
                    made = slots[self._place[name]]
                    if not isinstance(made, torch.Tensor):
                        raise Unrecognised(f"{unit.name} makes a {type(made).__name__}, not a tensor")
                    specs[self._place[name]] = spec_of(made)
        return kernels, specs

    def _values(self, specs: Mapping[int, TensorSpec]) -> tuple[Value, ...]:
        names = {value: name for name, value in self._place.items()}
        owners: dict[str, int] = {}
        found: list[Value] = []
        given = len(self._source.graph.inputs)
        for value in range(1 + max(specs)):
            role = ValueRole.INPUT if value < given else ValueRole.CONSTANT if value < self._first_made else ValueRole.INTERMEDIATE
            root = self._units.owner.get(names.get(value, ""), "")
            owner = self._place.get(root, value) if root else value
            # The buffer itself may be private to its unit: then the first window of it stands for it.
            owner = owners.setdefault(root, owner) if root else value
            found.append(Value(value, specs[value], role, owner))
        return tuple(found)

    def _operator(self, index: int, unit: Unit, values: Sequence[Value]) -> Operator:
        reads = tuple(self._place[name] for name in unit.reads)
        writes = tuple(self._place[name] for name in unit.makes)
        changes = tuple(self._place[name] for name in unit.changes)
        call = Call(unit.target, tuple(Ref(value) for value in (*reads, *changes)), (), writes)
        signature = kernel_signature([call], values) + unit.source
        return Operator(
            index=index,
            name=unit.name,
            calls=(call,),
            reads=reads,
            writes=writes,
            mutates=changes,
            flops=0,
            bytes_read=bytes_read(unit, self._place, values),
            bytes_written=sum(values[value].spec.bytes for value in writes) + bytes_changed(changes, reads, values),
            signature=hashlib.sha256(signature.encode()).hexdigest()[:24],
            source="",
        )


def _renamed(leaf: Argument, places: Mapping[int, int]) -> Argument:
    return Ref(places[leaf.value]) if isinstance(leaf, Ref) else leaf


def _function(unit: Unit, place: Mapping[str, int], namespace: Mapping[str, Any], kernels: Mapping[str, LaunchedKernel]) -> Kernel:
    """The unit as a callable, with its instructions where its code is understood."""
    # The text is Inductor's own, from the module that this process has just generated and run.
    text = function_text(unit, place)
    # Constants are read from the slots; here they would be held for good.
    scope = {name: item for name, item in namespace.items() if not isinstance(item, torch.Tensor)}
    exec(compile(text, f"<inductor {unit.name}>", "exec"), scope)
    made: Kernel = scope["unit"]
    try:
        return carrying(made, unit_instructions(text, kernels, namespace))
    except Unrecognised as error:
        _log.debug("%s needs the interpreter: %s", unit.name, error)
        return made


__all__ = ["PREPARE", "Recording", "bind_recorded", "bound_of", "first_difference", "forms_of", "record", "source_of"]
