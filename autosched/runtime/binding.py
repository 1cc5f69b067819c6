"""Binding a bundle's schedule to a model: constants, plan and runner. :mod:`comparison` must pass before it may serve."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import nullcontext
from functools import cache, partial

import torch

from autosched.config import openmp_binding
from autosched.core.custom_operators import trusted, trusting
from autosched.core.errors import IncompatibleArtifact
from autosched.core.program import Binding, Program
from autosched.core.standing_aside import all_aside
from autosched.runtime.agreement import models_answer
from autosched.runtime.attribute_tensors import AttributeTensors
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.called import Called
from autosched.runtime.comparison import SEED, Comparison, ReadsMore, changed_meanwhile
from autosched.runtime.cores import usable_cores
from autosched.runtime.cpu_kernels.steps import packed_by_own
from autosched.runtime.current_device import made_current
from autosched.runtime.float32 import as_it_is_set
from autosched.runtime.in_place import first_of_lanes, granted, homes_of, in_place
from autosched.runtime.instructions import fixed_tensors
from autosched.runtime.kernels import Begun, BoundProgram, bind, gather_constants, random_inputs
from autosched.runtime.plan import Plan, make_plan
from autosched.runtime.prepared import Bound, InAnotherMode, Overwriting, Prepared, Runner
from autosched.runtime.reads import Reads
from autosched.runtime.runners import regions_of, runner_factory
from autosched.runtime.state import Asked, ask
from autosched.runtime.thread_state import ThreadKept, inference_mode
from autosched.runtime.weights import ModelWatch, in_training
from autosched.runtime.widths import bind_for
from autosched.runtime.workspace import peak_live_bytes, unshared_bytes
from autosched.runtime.write_back import WriteBacks

_log = logging.getLogger(__name__)


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
        self._comparison = Comparison(model, device, label)
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
                except ReadsMore as found:
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
        began = self._comparison.tensors(program)
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
            if changed := self._comparison.changed_since(began, program):
                # What a kernel has packed was held against what others made of other weights.
                raise changed_meanwhile(changed)
            without = f"{len(regions.refusals)} operators run call by call: {regions.refusals[0].reason}"
            _log.warning("of %s, %s", self._label, without)
        if program.writes and (verify or manners.seen is None):
            manners.seen = self._asked(program)
        served = self._in_place(bound, plan, manners.seen)
        # To make one may run the operators: not before they are audited.
        runner = cache(lambda: self._factory(served, plan, random_inputs(program, SEED, device)))
        error = None
        if attributes is not None:
            # A graph keeps the rounding of the moment when it is captured, and the model is to answer with the same.
            with as_it_is_set() if device.type == "cuda" else nullcontext():
                error = self._comparison.at_rest(bundle, bound, runner, began, watch, attributes, reads)
            inputs = random_inputs(program, SEED, device)
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
        one, other = (ask(program, self.model, random_inputs(program, SEED, self._device))[2] for _ in range(2))
        if one != other:
            raise IncompatibleArtifact(self._label, ["the model changes its memory in one way in one call, and in another way in the next"])
        return one


def _require_threads(bundle: Bundle, label: str) -> None:
    widest = max(bundle.schedule.width, default=1)
    # The thread library ends the process when it cannot start as many threads as it was told to.
    if bundle.key.device.kind == "cpu" and widest > usable_cores():
        binding = openmp_binding()
        why = f", for OpenMP binds threads to cores ({binding}): unset that" if binding else ""
        difference = f"width: an operator asks for {widest} threads there, {usable_cores()} cores are usable here{why}"
        raise IncompatibleArtifact(label, [difference])
