"""Binding a bundle's schedule to a model: constants, plan, runner, and the comparison that must pass before it may serve."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any

import torch

from autosched.config import openmp_binding
from autosched.core.custom_operators import trusted, trusting
from autosched.core.errors import IncompatibleArtifact
from autosched.core.extents import storage_of
from autosched.core.from_outside import let_through
from autosched.core.program import Binding, InputSpec, Program
from autosched.core.standing_aside import all_aside
from autosched.runtime.agreement import models_answer, require_agreement
from autosched.runtime.attribute_tensors import AttributeTensors
from autosched.runtime.audit import audit_run
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.called import Called
from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.steps import packed_by_own
from autosched.runtime.current_device import made_current
from autosched.runtime.float32 import as_it_is_set, full_float32, rounded_as
from autosched.runtime.in_place import first_of_lanes, granted, homes_of, in_place
from autosched.runtime.instructions import fixed_tensors
from autosched.runtime.kernels import Begun, BoundProgram, bind, gather_constants, random_inputs
from autosched.runtime.numerics import compare
from autosched.runtime.plan import Plan, make_plan
from autosched.runtime.prepared import Bound, ChangedMeanwhile, InAnotherMode, Overwriting, Prepared, Runner
from autosched.runtime.reads import Reads, storages_written
from autosched.runtime.runners import regions_of, runner_factory
from autosched.runtime.state import Asked, OtherBuffers, ask, copies_of, version_of, whole_answer
from autosched.runtime.telling_inputs import telling_inputs
from autosched.runtime.thread_state import ThreadKept, inference_mode
from autosched.runtime.trees import output_tensors
from autosched.runtime.weights import ModelWatch, in_training
from autosched.runtime.widths import bind_for
from autosched.runtime.workspace import peak_live_bytes, unshared_bytes
from autosched.runtime.write_back import WriteBacks
from autosched.runtime.written import changes_callers_memory

_log = logging.getLogger(__name__)

_SEED = 20_259  # of the inputs of the comparison; any will do, one makes a failure reproducible


@dataclasses.dataclass(slots=True)
class _Manners:
    """What a model was last seen to do.

    Args:
        seen: with the memory that it changes.
        unbound: parameters and buffers that it reads and the program does not.
        called: what it calls, its inputs and weights being what they may.
    """

    seen: Asked | None = None
    unbound: tuple[Binding, ...] = ()
    called: Called = dataclasses.field(default_factory=Called)


class _ReadsMore(Exception):
    """The model reads parameters and buffers that the schedule does without: they have to be watched from before it was bound."""

    def __init__(self, bindings: tuple[Binding, ...]) -> None:
        super().__init__()
        self.bindings = bindings


class Binder:
    """Prepares schedules for one model on one device. On a CPU they share one set of lane threads, and so take turns.

    Args:
        label: of the bundle, for messages.
        frozen: as in ``ModelWatch``.
        overwrites: whether schedules may do write-backs in place.
        padded: whether calls are padded, which what is in the weights may forbid.

    Whenever a schedule is bound, now or after a change of the model, the custom operators are trusted that are trusted when this is made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        label: str,
        *,
        frozen: bool = False,
        overwrites: bool = True,
        padded: bool = False,
    ) -> None:
        self._trusted = trusted()
        self.model = model
        self._device = device
        self._label = label
        self._frozen = frozen
        self._overwrites = overwrites
        self._padded = padded
        self._factory = runner_factory(device)
        # Of every schedule, also while it is not in memory: what the model was seen to do is held against what it is by then.
        self._manners: dict[Bundle, _Manners] = {}

    def prepare(self, bundle: Bundle) -> Prepared:
        """Bind, audit and compare one schedule.

        Raises:
            IncompatibleArtifact: saying in what it does not compute what the model computes.
            Exception: whatever its operators raise.
        """
        _require_threads(bundle, self._label)
        graph = bundle.program.graph
        plan = make_plan(graph, bundle.schedule)
        manners = self._manners.setdefault(bundle, _Manners())
        return Prepared(
            bundle.program,
            self._device,
            lambda verify: self._bind(bundle, plan, manners, verify=verify),
            offsets_matter=any("as_strided" in call.target for operator in graph.operators for call in operator.calls),
            late_watch=self._device.type == "cuda" and not bundle.program.writes,
        )

    def _bind(self, bundle: Bundle, plan: Plan, manners: _Manners, *, verify: bool) -> Bound:
        # A shape may be made ready long after load, and then in whatever mode the model is by now.
        if verify and in_training(self.model):
            raise InAnotherMode
        # A call in inference mode may be the one that binds: what is made here is written to by calls outside of it, too.
        kept = ThreadKept(self._device)
        with kept, trusting(self._trusted), all_aside(), made_current(self._device), inference_mode(False), torch.no_grad():
            attributes = AttributeTensors(self.model) if verify else None
            while True:
                try:
                    return self._bind_trusting(bundle, plan, manners, attributes)
                except _ReadsMore as found:
                    manners.unbound = found.bindings
                except BaseException:
                    # The model runs instead, and other forms of call may read what those of the comparison have left.
                    if attributes is not None:
                        # Buffers that calls change have been given back: a number that counts what is in them goes with these.
                        attributes.give_back(numbers=bool(bundle.program.writes))
                    raise

    def _bind_trusting(self, bundle: Bundle, plan: Plan, manners: _Manners, attributes: AttributeTensors | None) -> Bound:
        """As :meth:`_bind`; compared with the model if there are ``attributes``, as they were before any comparison."""
        program, device, verify = bundle.program, self._device, attributes is not None
        reads = Reads(program, self.model, manners.unbound) if verify and not self._frozen else None
        # The watch first: a change while the weights are read is then seen at the next call.
        beside = reads.known if reads is not None else manners.unbound
        packed = packed_by_own(program.graph, bundle.schedule.variant)
        watch = ModelWatch(self.model, program, beside, frozen=self._frozen, all_words=self._padded, packed=packed)
        began = self._tensors(program)
        constants = gather_constants(program, self.model, bundle.literals)
        if device.type == "cpu":
            regions = regions_of(program, plan, device)
            bound = bind_for(plan, program, constants, regions)
        else:
            bound = bind(program, constants, device)
            regions = regions_of(program, plan, device, bound.kernels)
            bound = bound if regions is None else regions.apply(bound, plan)
        without = ""
        if regions is not None and regions.refusals:
            if changed := self._changed_since(began, program):
                # What a kernel has packed was held against what others made of other weights.
                raise _changed_meanwhile(changed)
            without = f"{len(regions.refusals)} operators run call by call: {regions.refusals[0].reason}"
            _log.warning("of %s, %s", self._label, without)
        if program.writes and (verify or manners.seen is None):
            manners.seen = self._asked(program)
        served = self._in_place(bound, plan, manners.seen)
        # To make one may run the operators: not before they are audited.
        runner = cache(lambda: self._factory(served, plan, random_inputs(program, _SEED, device)))
        error = None
        if attributes is not None:
            # A graph keeps the rounding of the moment when it is captured, and the model is to answer with the same.
            with as_it_is_set() if device.type == "cuda" else nullcontext():
                error = self._compared_at_rest(bundle, bound, runner, began, watch, attributes, reads)
            inputs = random_inputs(program, _SEED, device)
            if manners.called.differs(self.model, inputs, partial(models_answer, program, self.model, inputs)):
                raise IncompatibleArtifact(self._label, ["the model calls other operators than before, or gives them other numbers"])
        intermediates = getattr(runner(), "peak_bytes", 0) or peak_live_bytes(program.graph, plan, homes_of(served.in_place))
        taken = unshared_bytes([*bound.constants, *fixed_tensors(bound.kernels)], constants.values())
        if manners.seen is None:
            return Bound(runner(), watch, intermediates, taken, error, without=without)
        writes = WriteBacks(program, self.model, list(constants.values()), manners.seen, served.in_place)
        return Bound(runner(), watch, intermediates, taken, error, writes, self._overwriting(served, plan, runner()), without)

    def _in_place(self, bound: BoundProgram, plan: Plan, asked: Asked | None) -> BoundProgram:
        """The program that is served: with those of its write-backs done in place that may be, by the plan and by what the model does."""
        if asked is None or not self._overwrites:
            return bound
        chains = granted(bound.program, plan, [place for place, replaced in enumerate(asked.replaced) if replaced])
        # On a GPU nobody knows how far a graph has come; whoever launches it says so.
        marking = first_of_lanes(plan, chains) if self._device.type == "cpu" else ()
        return in_place(bound, chains, Begun(), marking)

    def _overwriting(self, served: BoundProgram, plan: Plan, runner: Runner) -> Overwriting | None:
        if served.begun is None or served.otherwise is None:
            return None
        otherwise, on_copies = served.otherwise, getattr(runner, "on_copies", None)
        return Overwriting(served.begun, lambda: on_copies or self._factory(otherwise, plan, ()))

    def _asked(self, program: Program) -> Asked:
        """What the model does with the memory that it changes: twice the same, or nothing that can be relied on.

        Raises:
            IncompatibleArtifact: if it is not.
        """
        one, other = (ask(program, self.model, random_inputs(program, _SEED, self._device))[2] for _ in range(2))
        if one != other:
            raise IncompatibleArtifact(self._label, ["the model changes its memory in one way in one call, and in another way in the next"])
        return one

    def _compared_at_rest(
        self,
        bundle: Bundle,
        bound: BoundProgram,
        runner: Callable[[], Runner],
        began: _Tensors,
        watch: ModelWatch,
        attributes: AttributeTensors,
        reads: Reads | None,
    ) -> float:
        """As :meth:`_compared`; twice, if the model itself has changed anything by then that ``watch`` or a schedule does not know of.

        Raises:
            IncompatibleArtifact: also if a call leaves what another may read.
        """
        others = OtherBuffers(bundle.program, self.model)
        error = self._compared(bundle, bound, runner, began, reads)
        attributes.note()
        buffer, attribute = others.changed(), watch.renew()
        if not buffer and not attribute:
            return error
        # Once may be a table that is made at the first call; twice is a state. And a model that keeps count of something, or what it made
        # of the first inputs, may have agreed by chance, in that very call.
        try:
            error = max(error, self._compared(bundle, bound, runner, began, seed=_SEED + 2))
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
            tensor = dict(self.model.named_buffers()).get(name)
            if tensor is not None and not self._writes_into({name: tensor}, program):
                raise _changed_meanwhile([name])
            said = f"the model changes its buffer {printable(name)} at each call, and the schedule does not"
            raise IncompatibleArtifact(self._label, [said])

    def _compared(
        self,
        bundle: Bundle,
        bound: BoundProgram,
        runner: Callable[[], Runner],
        began: _Tensors,
        reads: Reads | None = None,
        seed: int = _SEED,
    ) -> float:
        """As :meth:`_verify`, of a model that had the tensors ``began`` when it was read.

        Raises:
            ChangedMeanwhile: if it differs, and has others by now.
        """
        try:
            return self._verify(bundle, bound, runner, reads, seed)
        except _ReadsMore:
            # No difference: what the model changes among it is looked at when it is watched.
            raise
        except Exception as error:
            let_through(error)
            changed = self._changed_since(began, bundle.program)
            # Where there was none, the model itself may have put one.
            if not changed:
                raise
            raise _changed_meanwhile(changed) from error

    def _changed_since(self, began: _Tensors, program: Program) -> list[str]:
        """The names of those of ``began`` that are others by now, but for buffers into which the model itself writes when it is called."""
        now = self._tensors(program)
        changed = [name for name, tensor in began.items() if not _same(now.get(name), tensor)]
        buffers = dict(self.model.named_buffers())
        doubtful = {name: tensor for name in changed if (tensor := buffers.get(name)) is began[name][0]}
        own = self._writes_into(doubtful, program) if doubtful else set()
        return [name for name in changed if name not in own]

    def _writes_into(self, tensors: Mapping[str, torch.Tensor], program: Program) -> set[str]:
        """Which of its buffers the model itself writes into, or replaces, in a call; all of them if nobody can tell."""
        inputs = random_inputs(program, _SEED, self._device)
        written = storages_written(lambda: models_answer(program, self.model, inputs))
        now = dict(self.model.named_buffers())
        return {name for name, tensor in tensors.items() if written is None or storage_of(tensor) in written or now.get(name) is not tensor}

    def _tensors(self, program: Program) -> _Tensors:
        """Parameters and buffers now, those apart that the model itself replaces."""
        state = {binding.name for binding in program.state}
        named = chain(self.model.named_buffers(), self.model.named_parameters())
        return {name: (tensor, version_of(tensor), _place(tensor)) for name, tensor in named if name not in state}

    def _verify(self, bundle: Bundle, bound: BoundProgram, runner: Callable[[], Runner], reads: Reads | None, seed: int) -> float:
        """Audit the operators, then compare the schedule's outputs with the model's; the largest absolute difference.

        Args:
            reads: notes what the model reads.
            seed: of the inputs.

        Raises:
            _ReadsMore: if that is more than is known.
            IncompatibleArtifact: saying what differs.
        """
        label, model, program = self._label, self.model, bundle.program
        if operator := changes_callers_memory(program.graph):
            what = "changes an input or a constant in place, and such a model is not scheduled; return the new value instead"
            raise IncompatibleArtifact(label, [f"operator {operator} {what}"])

        def answered(tensors: list[torch.Tensor]) -> Any:
            asked = partial(models_answer, program, model, tensors)
            return asked() if reads is None else reads.during(asked)

        inputs, answer = telling_inputs(program, seed, bound.device, answered)
        if reads is not None and (found := reads.found()) != reads.known:
            raise _ReadsMore(found)
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
            truth = models_answer(program, self.model, inputs)
            require_agreement(program, bound.run(inputs), truth, label, rounded=rounding if compiled else None)
        return compare(output_tensors(whole_answer(program, made)), output_tensors(answer)).max_abs_error


_Tensors = dict[str, tuple[torch.Tensor, int, int]]
"""Parameters and buffers by name, with how often each was changed, and where its memory is."""


def _changed_meanwhile(names: Sequence[str]) -> ChangedMeanwhile:
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


def _require_threads(bundle: Bundle, label: str) -> None:
    widest = max(bundle.schedule.width, default=1)
    # The thread library ends the process when it cannot start as many threads as it was told to.
    if bundle.key.device.kind == "cpu" and widest > usable_cores():
        binding = openmp_binding()
        why = f", for OpenMP binds threads to cores ({binding}): unset that" if binding else ""
        difference = f"width: an operator asks for {widest} threads there, {usable_cores()} cores are usable here{why}"
        raise IncompatibleArtifact(label, [difference])
