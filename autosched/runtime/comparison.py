"""The comparison of a bound schedule with its model, which must pass before it may serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from autosched.core.errors import IncompatibleArtifact
from autosched.core.extents import storage_of
from autosched.core.from_outside import let_through
from autosched.core.program import Binding, InputSpec, Program
from autosched.runtime.agreement import models_answer, require_agreement
from autosched.runtime.attribute_tensors import AttributeTensors
from autosched.runtime.audit import audit_run
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.float32 import full_float32, rounded_as
from autosched.runtime.kernels import BoundProgram, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.prepared import ChangedMeanwhile, Runner
from autosched.runtime.reads import Reads, storages_written
from autosched.runtime.state import OtherBuffers, copies_of, version_of, whole_answer
from autosched.runtime.telling_inputs import telling_inputs
from autosched.runtime.trees import output_tensors
from autosched.runtime.weights import ModelWatch
from autosched.runtime.written import changes_callers_memory

SEED = 20_259  # of the inputs of the comparison; any will do, one makes a failure reproducible

Tensors = dict[str, tuple[torch.Tensor, int, int]]
"""Parameters and buffers by name, with how often each was changed, and where its memory is."""


class ReadsMore(Exception):
    """The model reads parameters and buffers that the schedule does without: they have to be watched from before it was bound."""

    def __init__(self, bindings: tuple[Binding, ...]) -> None:
        super().__init__()
        self.bindings = bindings


class Comparison:
    """Of schedules on one device with one model.

    Args:
        label: of the bundle, for messages.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, label: str) -> None:
        self._model = model
        self._device = device
        self._label = label

    def at_rest(
        self,
        bundle: Bundle,
        bound: BoundProgram,
        runner: Callable[[], Runner],
        began: Tensors,
        watch: ModelWatch,
        attributes: AttributeTensors,
        reads: Reads | None,
    ) -> float:
        """As :meth:`_compared`; twice, if the model itself has changed anything by then that ``watch`` or a schedule does not know of.

        Raises:
            IncompatibleArtifact: also if a call leaves what another may read.
        """
        others = OtherBuffers(bundle.program, self._model)
        error = self._compared(bundle, bound, runner, began, reads)
        attributes.note()
        buffer, attribute = others.changed(), watch.renew()
        if not buffer and not attribute:
            return error
        # Once may be a table that is made at the first call; twice is a state. And a model that keeps count of something, or what it made
        # of the first inputs, may have agreed by chance, in that very call.
        try:
            error = max(error, self._compared(bundle, bound, runner, began, seed=SEED + 2))
        except IncompatibleArtifact:
            self._require_unchanged(others, bundle.program)
            raise
        self._require_unchanged(others, bundle.program)
        if named := attributes.state():
            what = f"each call leaves another tensor in the model's {printable(named)}, and the schedule leaves none"
            advice = "keep in a buffer what another call reads, or delete it at the end of forward()"
            raise IncompatibleArtifact(self._label, [f"{what}; {advice}"])
        watch.settle()
        return error

    def _require_unchanged(self, others: OtherBuffers, program: Program) -> None:
        if name := others.changed():
            tensor = dict(self._model.named_buffers()).get(name)
            if tensor is not None and not self._writes_into({name: tensor}, program):
                raise changed_meanwhile([name])
            said = f"the model changes its buffer {printable(name)} at each call, and the schedule does not"
            raise IncompatibleArtifact(self._label, [said])

    def _compared(
        self,
        bundle: Bundle,
        bound: BoundProgram,
        runner: Callable[[], Runner],
        began: Tensors,
        reads: Reads | None = None,
        seed: int = SEED,
    ) -> float:
        """As :meth:`_verify`, of a model that had the tensors ``began`` when it was read.

        Raises:
            ChangedMeanwhile: if it differs, and has others by now.
        """
        try:
            return self._verify(bundle, bound, runner, reads, seed)
        except ReadsMore:
            # No difference: what the model changes among it is looked at when it is watched.
            raise
        except Exception as error:
            let_through(error)
            changed = self.changed_since(began, bundle.program)
            # Where there was none, the model itself may have put one.
            if not changed:
                raise
            raise changed_meanwhile(changed) from error

    def changed_since(self, began: Tensors, program: Program) -> list[str]:
        """The names of those of ``began`` that are others by now, but for buffers into which the model itself writes when it is called."""
        now = self.tensors(program)
        changed = [name for name, tensor in began.items() if not _same(now.get(name), tensor)]
        buffers = dict(self._model.named_buffers())
        doubtful = {name: tensor for name in changed if (tensor := buffers.get(name)) is began[name][0]}
        own = self._writes_into(doubtful, program) if doubtful else set()
        return [name for name in changed if name not in own]

    def _writes_into(self, tensors: Mapping[str, torch.Tensor], program: Program) -> set[str]:
        """Which of its buffers the model itself writes into, or replaces, in a call; all of them if nobody can tell."""
        inputs = random_inputs(program, SEED, self._device)
        written = storages_written(lambda: models_answer(program, self._model, inputs))
        now = dict(self._model.named_buffers())
        return {name for name, tensor in tensors.items() if written is None or storage_of(tensor) in written or now.get(name) is not tensor}

    def tensors(self, program: Program) -> Tensors:
        """Parameters and buffers now, those apart that the model itself replaces."""
        state = {binding.name for binding in program.state}
        named = chain(self._model.named_buffers(), self._model.named_parameters())
        return {name: (tensor, version_of(tensor), _place(tensor)) for name, tensor in named if name not in state}

    def _verify(self, bundle: Bundle, bound: BoundProgram, runner: Callable[[], Runner], reads: Reads | None, seed: int) -> float:
        """Audit the operators, then compare the schedule's outputs with the model's; the largest absolute difference.

        Args:
            reads: notes what the model reads.
            seed: of the inputs.

        Raises:
            ReadsMore: if that is more than is known.
            IncompatibleArtifact: saying what differs.
        """
        label, model, program = self._label, self._model, bundle.program
        if operator := changes_callers_memory(program.graph):
            what = "changes an input or a constant in place, and such a model is not scheduled; return the new value instead"
            raise IncompatibleArtifact(label, [f"operator {operator} {what}"])

        def answered(tensors: list[torch.Tensor]) -> Any:
            asked = partial(models_answer, program, model, tensors)
            return asked() if reads is None else reads.during(asked)

        inputs, answer = telling_inputs(program, seed, bound.device, answered)
        if reads is not None and (found := reads.found()) != reads.known:
            raise ReadsMore(found)
        in_order, lies = audit_run(bound, inputs)
        if lies:
            raise IncompatibleArtifact(label, [printable(line) for line in lies[:5]])
        # Copies: a schedule may overwrite what it is given.
        made = runner()(copies_of(inputs))
        worst = self._agree(bundle, bound, made, inputs, answer, in_order)
        if all(_is_telling(program, item) for item in program.inputs):
            return worst
        # Again with inputs that the file has no say in: its own may hide what it computes (all zeros, say).
        plain = dataclasses.replace(program, inputs=tuple(_plain(program, item) for item in program.inputs))
        try:
            others, answer = telling_inputs(plain, seed + 1, bound.device, lambda tensors: models_answer(program, model, tensors))
        except Exception as error:
            let_through(error)
            # Inputs unlike the example's may be beyond the model itself.
            return worst
        return max(worst, self._agree(bundle, bound, runner()(copies_of(others)), others, answer))

    def _agree(
        self,
        bundle: Bundle,
        bound: BoundProgram,
        made: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        answer: Any,
        in_order: Sequence[torch.Tensor] | None = None,
    ) -> float:
        """The largest absolute difference between a schedule's outputs and its model's answer.

        A GPU may round float32 to TF32, in convolutions unless it is told not to, and a CPU to bfloat16, if it is told to. A schedule
        multiplies other numbers than its model (the factors of normalisations are folded into weights, say), so that the two are as far
        from each other as from the truth. That they are one function is then judged without rounding; and that the schedule, which rounds
        as it was captured, computes what its operators do: on a CPU to that rounding, which the number of threads may turn either way.

        Raises:
            IncompatibleArtifact: saying what differs.
        """
        label, program = self._label, bundle.program
        try:
            worst = require_agreement(program, made, answer, label)
            if in_order is not None:
                require_agreement(program, in_order, answer, label)
            return worst
        except IncompatibleArtifact:
            if (rounding := rounded_as(bound.device.type)) is None:
                raise
        again = in_order if in_order is not None else bound.run(inputs)
        agreement = compare(made, again, rounded=rounding if bound.device.type == "cpu" else None)
        if not agreement.within_tolerance:
            raise IncompatibleArtifact(label, [f"its outputs differ from those of its operators one after another: {agreement.reason}"])
        # Compiled code keeps the rounding that it was compiled with.
        compiled = bool(program.source) or any(bundle.schedule.variant)
        with full_float32():
            truth = models_answer(program, self._model, inputs)
            require_agreement(program, bound.run(inputs), truth, label, rounded=rounding if compiled else None)
        return compare(output_tensors(whole_answer(program, made)), output_tensors(answer)).max_abs_error


def changed_meanwhile(names: Sequence[str]) -> ChangedMeanwhile:
    """Why a comparison says nothing: another has changed what is called ``names``."""
    return ChangedMeanwhile(
        f"its {printable(min(names))} was changed while the schedule was compared with the model, by another thread or the model itself; "
        "the next call, or load(), compares again"
    )


def _same(now: tuple[torch.Tensor, int, int] | None, before: tuple[torch.Tensor, int, int]) -> bool:
    return now is not None and now[0] is before[0] and now[1:] == before[1:]


def _place(tensor: torch.Tensor) -> int:
    """Where its memory is: another one is given to it (``parameter.data = ...``, ``module.to(...)``) past PyTorch's count."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _is_telling(program: Program, item: InputSpec) -> bool:
    """Whether random inputs as the file describes them are about those it has no say in; integers are the same either way."""
    if not _is_floating(program, item):
        return True
    return (item.low, item.high) == (0, 0) and 0.25 <= item.std <= 4.0 and abs(item.mean) <= 2.0 * item.std


def _plain(program: Program, item: InputSpec) -> InputSpec:
    """As it is drawn where the file has no say."""
    bounds = {"low": 0, "high": 0} if _is_floating(program, item) else {}
    return dataclasses.replace(item, mean=0.0, std=1.0, **bounds)


def _is_floating(program: Program, item: InputSpec) -> bool:
    """By dtype, not by the range: the range is the file's word too. What has four bits is drawn from all that there are."""
    dtype = program.graph.values[item.value].spec.dtype
    return dtype.startswith(("float", "bfloat", "complex")) and not dtype.startswith("float4")
