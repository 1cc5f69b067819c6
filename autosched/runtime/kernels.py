"""From a program (data) to callables: which operators may run, with which arguments, on which tensors.

A bound program keeps one list of *slots*, one for each value of the table; kernel ``i`` reads its inputs there and writes its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from autosched.core.computed_once import computed_once
from autosched.core.decided import decided_otherwise
from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact
from autosched.core.extents import overlaps_itself, storage_of
from autosched.core.graph import Operator, OpGraph, ValueRole
from autosched.core.in_place import Chain
from autosched.core.parts import named_tensors
from autosched.core.program import Call, ConstantSource, Program
from autosched.core.schedule import sequential
from autosched.core.variants import WHOLE
from autosched.runtime.bag_offsets import as_offsets, bag_offsets
from autosched.runtime.calls import Kernel, Slots, compile_call
from autosched.runtime.instructions import Release, carrying_all
from autosched.runtime.one_copy import one_copy
from autosched.runtime.plan import make_plan
from autosched.runtime.thread_state import inference_mode
from autosched.runtime.written import require_harmless


class Begun:
    """Whether the last run has begun to change memory that outlives it: a flag that its operators set, since no lane may be in Python."""

    __slots__ = ("flag",)

    def __init__(self) -> None:
        self.flag = torch.zeros((), dtype=torch.bool, device="cpu")

    @property
    def yes(self) -> bool:
        """Whether it has."""
        return bool(self.flag)

    def set(self, yes: bool) -> None:
        """Before a run: not yet. By whoever runs it otherwise than operator by operator: it has."""
        self.flag.fill_(yes)


@dataclass(frozen=True)
class BoundProgram:
    """A program with its constants, ready to run on ``device``.

    Args:
        program: what was bound.
        device: where it runs.
        kernels: one callable for each operator; call under ``torch.inference_mode()``.
        constants: slots with every constant filled and everything else ``None``.
        in_place: write-backs that a run does in the memory of its inputs (``runtime.in_place``); the outputs are then that memory.
        begun: whether the last run has begun to change any, if that is asked.
        otherwise: the same with nothing done in place.
    """

    program: Program
    device: torch.device
    kernels: tuple[Kernel, ...]
    constants: Slots
    in_place: tuple[Chain, ...] = ()
    begun: Begun | None = None
    otherwise: BoundProgram | None = None

    def new_slots(self, inputs: Sequence[torch.Tensor]) -> Slots:
        """Slots for one run; ``inputs`` in the order of ``program.graph.inputs``."""
        slots = self.constants.copy()
        for value, tensor in zip(self.program.graph.inputs, inputs, strict=True):
            slots[value] = tensor
        return slots

    def outputs(self, slots: Slots) -> list[torch.Tensor]:
        """The tensors of ``program.graph.outputs``."""
        return [slots[value] for value in self.program.graph.outputs]

    def run(self, inputs: Sequence[torch.Tensor], before_each: Callable[[], None] | None = None) -> list[torch.Tensor]:
        """Run every operator in the graph's own order on the calling thread: the reference for any schedule.

        Args:
            before_each: called before each operator.
        """
        return self.outputs(self.slots_after(inputs, before_each=before_each))

    def slots_after(
        self, inputs: Sequence[torch.Tensor], keep: Container[int] = (), before_each: Callable[[], None] | None = None
    ) -> Slots:
        """Slots as :meth:`run` leaves them: values that nothing reads any more are gone, but for those in ``keep``.

        Args:
            keep: values by index.
            before_each: called before each operator.
        """
        slots = self.new_slots(inputs)
        with inference_mode(True):
            for kernel, frees in zip(self.kernels, self.frees, strict=True):
                if before_each is not None:
                    before_each()
                kernel(slots)
                for value in frees:
                    if value not in keep:
                        slots[value] = None
        return slots

    @computed_once
    def frees(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the values that nothing reads after it when operators run in the graph's own order."""
        graph = self.program.graph
        return tuple(step.frees for step in make_plan(graph, sequential(graph)).steps)


def bind(
    program: Program,
    constants: Mapping[int, torch.Tensor],
    device: torch.device | str | None = None,
    before_each: Callable[[Call], object] = lambda call: None,
) -> BoundProgram:
    """Fill in the constants, evaluate the prologue, and make a callable of every operator.

    Args:
        constants: tensor of every ``Binding``, by value index.
        device: where to run; by default where the constants are.
        before_each: called before each call of the prologue, of a program that is not compiled as a whole.

    Raises:
        UnsupportedGraph: if an operator is not allowed or does not exist here.
        ArtifactCorrupt: if a constant is missing.
        IncompatibleArtifact: if its operators are compiled where they run, and here are others; or if they change what is not theirs.
    """
    if program.lowering in WHOLE:
        from autosched.runtime.inductor.bind import bind_recorded

        return bind_recorded(program, constants, device)
    require_harmless(program)
    graph = program.graph
    home = torch.device(device) if device is not None else _home(constants)
    slots: Slots = [None] * len(graph.values)
    for binding in program.bindings:
        if binding.value not in constants:
            raise ArtifactCorrupt("the program", f"constant {binding.name} is missing")
        slots[binding.value] = constants[binding.value]
    needed = {value for operator in graph.operators for value in (*operator.reads, *operator.mutates)} | set(graph.outputs)
    prologue = _each_to_its_end(program.prologue, needed)
    last = {value: place for place, call in enumerate(prologue) for value in (*call.outputs, *call.reads())}
    staying = needed - answers(graph)
    given = {storage_of(tensor) for tensor in constants.values()}
    with inference_mode(True):
        for place, call in enumerate(prologue):
            before_each(call)
            compile_call(call, home)(slots)
            for made in staying.intersection(call.outputs):
                slots[made] = one_copy(slots[made], given)
            for touched in (*call.outputs, *call.reads()):
                if touched >= 0 and last[touched] == place and touched not in needed:
                    slots[touched] = None
    for value in graph.values:
        if value.index not in needed:
            slots[value.index] = None
    kernels = tuple(compile_operator(operator, program, home) for operator in graph.operators)
    return BoundProgram(program, home, kernels, slots)


def answers(graph: OpGraph) -> frozenset[int]:
    """Values in the memory of what a run answers with, which is the caller's to change."""
    homes = {graph.values[value].storage for value in graph.outputs}
    return frozenset(value.index for value in graph.values if value.storage in homes)


def gather_constants(program: Program, model: torch.nn.Module, literals: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensor of every binding, from the model's parameters and buffers and from the literals that travel with the program.

    Raises:
        IncompatibleArtifact: naming every parameter that is absent or has another shape or dtype, or other numbers where the model
            decides by them what runs.
    """
    sources: dict[ConstantSource, Mapping[str, torch.Tensor]] = {**named_tensors(model), ConstantSource.LITERAL: literals}
    found: dict[int, torch.Tensor] = {}
    differences = decided_otherwise(program.decided, model)
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
    offsets = bag_offsets(program)
    made: list[torch.Tensor] = []
    for item in program.inputs:
        spec = program.graph.values[item.value].spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if dtype is torch.float4_e2m1fn_x2:
            tensor = torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8, device="cpu").view(dtype)
        elif dtype is torch.bool:
            tensor = torch.randint(item.low, item.high + 1, spec.shape, generator=generator, device="cpu").to(torch.bool)
        elif dtype.is_floating_point and (item.low, item.high) != (0, 0):
            tensor = torch.randint(item.low, item.high + 1, spec.shape, generator=generator, device="cpu").to(dtype)
        elif not dtype.is_floating_point and not dtype.is_complex:
            tensor = torch.randint(item.low, item.high + 1, spec.shape, generator=generator, device="cpu").to(dtype)
            if item.value in offsets:
                tensor = as_offsets(tensor, item.low, item.high, whole=offsets[item.value])
        else:
            real = torch.float64 if dtype is torch.float64 else torch.float32
            tensor = (torch.randn(spec.shape, generator=generator, dtype=real, device="cpu") * item.std + item.mean).to(dtype)
        # An expanded input (stride 0) cannot be filled element by element; its values then come as they are.
        overlapping = overlaps_itself(spec.shape, spec.strides)
        dense = tensor if overlapping else torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="cpu").copy_(tensor)
        made.append(dense.to(device))
    return made


def _each_to_its_end(prologue: Sequence[Call], needed: Container[int]) -> list[Call]:
    """The calls in another order that keeps every dependency: a weight is folded and packed before the next one is folded.

    All folded weights together are as large as the model.
    """
    made_by = {value: place for place, call in enumerate(prologue) for value in call.outputs}
    # Where the first value that stays is made of what a call makes.
    ends = [place if any(value in needed for value in call.outputs) else len(prologue) for place, call in enumerate(prologue)]
    for place in reversed(range(len(prologue))):
        for value in prologue[place].reads():
            if (before := made_by.get(value)) is not None:
                ends[before] = min(ends[before], ends[place])
    return [prologue[place] for place in sorted(range(len(prologue)), key=lambda place: (ends[place], place))]


def _home(constants: Mapping[int, torch.Tensor]) -> torch.device:
    for tensor in constants.values():
        return tensor.device
    return torch.device("cpu")


def compile_operator(
    operator: Operator, program: Program, device: torch.device, instead: Mapping[int, Kernel] = MappingProxyType({})
) -> Kernel:
    """One callable of an operator's calls, some of which, by place, run as what is given ``instead``."""
    calls = tuple(instead.get(place) or compile_call(call, device) for place, call in enumerate(operator.calls))
    # Values that nobody outside reads would otherwise keep their memory until the end of the run.
    kept = set(operator.writes)
    scratch = tuple(
        value
        for call in operator.calls
        for value in call.outputs
        if value >= 0 and value not in kept and program.graph.values[value].role in (ValueRole.INTERNAL, ValueRole.INTERMEDIATE)
    )
    return calls[0] if len(calls) == 1 and not scratch else in_turn(calls, scratch)


def joined(steps: Sequence[Kernel], operator: Operator) -> Kernel:
    """One callable of the steps that make up ``operator``, which keeps what others read and nothing else."""
    if len(steps) == 1:
        return steps[0]
    kept = set(operator.writes)
    return in_turn(steps, tuple(value for call in operator.calls for value in call.outputs if value >= 0 and value not in kept))


def in_turn(steps: Sequence[Kernel], scratch: tuple[int, ...]) -> Kernel:
    """One callable of several, which empties the ``scratch`` slots at its end."""

    def run(slots: Slots) -> None:
        for step in steps:
            step(slots)
        for value in scratch:
            slots[value] = None

    return carrying_all(run, steps, Release(scratch))
