"""What is done with one model of the coverage sweep, in a process of its own."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosched.capture.build import build_program
from autosched.capture.export import Captured, draft_of
from autosched.capture.rewrite import rewrite_draft
from autosched.core.containers import objects_in
from autosched.core.custom_operators import trusting
from autosched.core.errors import UnsupportedGraph
from autosched.core.graph import OpGraph
from autosched.core.schedule import make_schedule, sequential
from autosched.core.variants import Lowering
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.load import load
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.state import ask
from autosched.runtime.trees import flatten_inputs, objects_given, unflatten_outputs
from autosched.runtime.write_back import WriteBacks
from experiments.coverage_cases.answers import (
    Answer,
    copied,
    error_of_scale,
    same_bits,
    says_nothing,
    scribble,
    share_memory,
    state_of,
    strides_that_matter,
    structural_difference,
    tensors_of,
    varied,
)
from experiments.coverage_cases.made import Build, Made, enliven
from experiments.coverage_cases.outcome import Outcome
from experiments.serve.common import bundle_of


@dataclass(frozen=True)
class Found:
    """What came of one model.

    Args:
        reason: why, empty if it works.
        stage: how far it came.
        operators: of the lowering ``rewritten``.
        error_of_scale: largest difference from the model over the largest magnitude of that output.
        notes: weaker things: outputs laid out otherwise, outputs that say nothing because they are constant or not finite.
        export_refuses: whether PyTorch's own export refuses the model, where autosched did.
    """

    outcome: Outcome
    reason: str = ""
    stage: str = ""
    operators: int = 0
    error_of_scale: float = 0.0
    notes: tuple[str, ...] = ()
    export_refuses: bool | None = None
    seconds: float = 0.0


class _Wrong(Exception):
    """A difference from the model; the message says which."""


class _Check:
    """One model and two calls of it."""

    def __init__(self, made: Made) -> None:
        self.model = made.model
        self.calls = [(made.args, made.kwargs), varied((made.args, made.kwargs), 1)]
        self.custom_operators = made.custom_operators
        self.stage = "model"
        self.operators = 0
        self.worst = 0.0
        self.notes: dict[str, None] = {}
        self._state = {name: tensor.detach().clone() for name, tensor in state_of(self.model).items()}

    def restore(self) -> None:
        """Give the model back the buffers it began with."""
        with torch.no_grad():
            for name, tensor in state_of(self.model).items():
                if name in self._state and not same_bits(tensor, self._state[name]):
                    tensor.copy_(self._state[name])

    def reference(self) -> list[Answer]:
        """What the model as it came does in both calls, one after the other."""
        self.restore()
        with torch.no_grad():
            return [self._answer(self.model, call) for call in self.calls]

    def agree(self, run: Callable[..., Any], expected: Sequence[Answer], stage: str) -> None:
        """Make both calls through ``run`` and compare all that can be seen of them."""
        self.stage = stage
        self.restore()
        for position, (call, wanted) in enumerate(zip(self.calls, expected, strict=True)):
            with torch.no_grad():
                given = self._answer(run, call)
            self._compare(given, wanted, f"{stage}, call {position}")

    def _compare(self, given: Answer, wanted: Answer, where: str) -> None:
        if difference := structural_difference(given.result, wanted.result, "output"):
            raise _Wrong(f"{where}: {difference}")
        if difference := structural_difference(given.call, wanted.call, "the call's arguments afterwards"):
            raise _Wrong(f"{where}: {difference}")
        if given.returned != wanted.returned:
            raise _Wrong(f"{where}: returns the objects {given.returned} of the call; the model returns {wanted.returned}")
        mine, theirs = tensors_of(given.result), tensors_of(wanted.result)
        held, kept = tensors_of(given.call), tensors_of(wanted.call)
        for what, a, b in (
            ("outputs", mine, theirs),
            ("inputs after the call", given.inputs, wanted.inputs),
            ("what the arguments hold after the call", held, kept),
        ):
            agreement = compare(a, b)
            if not agreement.within_tolerance:
                raise _Wrong(f"{where}: {what}: {agreement.reason}")
        changed = [name for name, tensor in given.state.items() if tensor is not wanted.state[name]]
        agreement = compare([given.state[name] for name in changed], [wanted.state[name] for name in changed])
        if not agreement.within_tolerance:
            raise _Wrong(f"{where}: the model's buffers after the call: {agreement.reason}")
        for one, other in zip(mine, theirs, strict=True):
            self.worst = max(self.worst, error_of_scale(one, other))
            if one.layout is torch.strided and strides_that_matter(one) != strides_that_matter(other):
                self.notes[f"{where.partition(',')[0]}: strides {one.stride()} where the model has {other.stride()}"] = None
        if given.shared != wanted.shared:
            self.notes[f"{where.partition(',')[0]}: shares memory {given.shared} where the model has {wanted.shared}"] = None

    def _answer(self, run: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]) -> Answer:
        args, kwargs = copy.deepcopy(call)
        inputs = tensors_of((args, kwargs))
        places = {id(item): place for place, item in enumerate(objects_in((args, kwargs)))}
        result = run(*args, **kwargs)
        returned = tuple(places.get(id(item), -1) for item in objects_in(result))
        outputs = tensors_of(result)
        shared: list[str] = []
        # Parameters apart: what a model returns of its own weights a schedule may fold.
        known = [(f"input {index}", tensor) for index, tensor in enumerate(inputs)]
        for index, tensor in enumerate(outputs):
            shared += [f"output {index} = {name}" for name, other in known if share_memory(tensor, other)]
            known.append((f"output {index}", tensor))
        state = {name: self._as_kept(name, tensor) for name, tensor in state_of(self.model).items()}
        # Copies, for the next call may write to what the model returns.
        result, after = copied(result), copied((args, kwargs))
        scribble(outputs, [*inputs, *state_of(self.model).values()])
        return Answer(result, inputs, state, tuple(shared), after, returned)

    def _as_kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy it began with if nothing changed it: one for each call would be the model four times."""
        began = self._state.get(name)
        return began if began is not None and same_bits(tensor, began) else tensor.detach().clone()


def check(build: Build) -> Found:
    """Build a model, capture and rewrite it, run it in order and on two lanes, write a bundle and load it."""
    began = time.perf_counter()
    try:
        torch.manual_seed(0)
        made = build()
        made.model.train(made.training) if not isinstance(made.model, torch.fx.GraphModule) else None
        if made.lively:
            enliven(made.model)
        one = _Check(made)
        try:
            expected = one.reference()
        except (RuntimeError, IndexError, ValueError):
            # Integers in another order are no call of every model: boxes have corners, offsets ascend.
            one.calls[1] = varied(one.calls[0], 1, integers=False)
            expected = one.reference()
    except Exception as error:
        return Found(Outcome.BROKEN, f"{type(error).__name__}: {_first(error)}", seconds=time.perf_counter() - began)
    try:
        with trusting(one.custom_operators):
            outcome, reason = _stages(one, expected)
    except _Wrong as wrong:
        outcome, reason = Outcome.WRONG, str(wrong)
    except UnsupportedGraph as error:
        outcome, reason = Outcome.REFUSED, str(error)
    except Exception as error:
        outcome, reason = Outcome.ERROR, f"{type(error).__name__}: {_first(error)}"
    refuses = None
    if outcome in (Outcome.REFUSED, Outcome.FALLS_BACK):
        one.restore()
        refuses = _export_refuses(one)
    if says_nothing(expected):
        one.notes["every output is constant or not finite"] = None
    took = time.perf_counter() - began
    return Found(
        outcome, reason, one.stage if outcome != Outcome.WORKS else "", one.operators, one.worst, tuple(one.notes), refuses, round(took, 1)
    )


def _stages(one: _Check, expected: list[Answer]) -> tuple[Outcome, str]:
    args, kwargs = one.calls[0]
    one.stage = "capture"
    one.restore()
    draft = draft_of(one.model, *copy.deepcopy((args, kwargs)))
    # What capture() does for each, but exported once.
    for lowering in (Lowering.ATEN, Lowering.FUSED, Lowering.REWRITTEN):
        # The packed weights of one lowering need not wait for those of the next.
        captured = bound = None
        one.stage = f"rewrite into {lowering}"
        chosen = draft.copy()
        reports = rewrite_draft(chosen, "cpu", lowering) if lowering is not Lowering.ATEN else ()
        captured = Captured(*build_program(chosen, lowering.value), reports)
        one.operators = len(captured.program.graph)
        bound = bind(captured.program, captured.constants)
        try:
            one.agree(_runner(captured, bound.run, one.model), expected, f"{lowering} in order")
        except _Wrong as wrong:
            if lowering is not Lowering.ATEN or not _export_differs(one, expected):
                raise
            # Then what matters is that nobody gets to use it.
            reason = _loaded(one, bundle_of(captured, sequential(captured.program.graph), "model"), expected)
            return Outcome.FALLS_BACK, f"torch.export's own program differs from the model ({wrong}); {reason}"
    schedule = two_lanes(captured.program.graph, random.Random(0))
    executor = LaneExecutor(bound, make_plan(captured.program.graph, schedule))
    one.agree(_runner(captured, executor.run, one.model), expected, "two lanes")
    one.stage = "bundle"
    data = bundle_of(captured, schedule, type(one.model).__name__)
    # What is loaded packs weights of its own.
    del draft, chosen, captured, bound, executor
    one.restore()
    reason = _loaded(one, data, expected)
    return (Outcome.FALLS_BACK, reason) if reason else (Outcome.WORKS, "")


def _loaded(one: _Check, data: bytes, expected: list[Answer]) -> str:
    """Why the loaded model falls back, if it does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = load(data, one.model, custom_operators=one.custom_operators)
        if loaded.report().scheduled:
            one.agree(loaded, expected, "loaded")
    reasons = [str(item.message) for item in said if issubclass(item.category, FallbackWarning)]
    report = loaded.report()
    if not reasons and report.calls != len(one.calls):
        raise _Wrong(f"loaded: {report.calls} of {len(one.calls)} calls ran the schedule, and nothing was said")
    return reasons[0] if reasons else ""


def two_lanes(graph: OpGraph, rng: random.Random) -> Any:
    """A random legal schedule on two lanes."""
    waiting = [len(before) for before in graph.predecessors]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for after in graph.successors[order[-1]]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    return make_schedule(graph, order, [rng.randrange(2) for _ in order])


def _runner(captured: Captured, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], model: torch.nn.Module) -> Callable[..., Any]:
    program = captured.program
    writes = None
    if program.writes:
        writes = WriteBacks(program, model, (), ask(program, model, random_inputs(program, 0))[2])

    def call(*args: Any, **kwargs: Any) -> Any:
        given = flatten_inputs(program, args, kwargs)
        inputs = given if writes is None else writes.inputs(given)
        if isinstance(inputs, str):
            raise _Wrong(f"what the model changes cannot be written back: {inputs}")
        outputs = run(inputs)
        outputs = outputs if writes is None else writes.finish(inputs, outputs)
        return unflatten_outputs(program, outputs, objects_given(program, args, kwargs))

    return call


def _export_refuses(one: _Check) -> bool:
    args, kwargs = one.calls[0]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.export(one.model, args, kwargs, strict=False)
    except Exception:
        return True
    return False


def _export_differs(one: _Check, expected: list[Answer]) -> bool:
    """Whether what PyTorch exports is what differs from the model; not where it exports nothing, for want of our objects."""
    if _export_refuses(one):
        return False
    args, kwargs = one.calls[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(one.model, args, kwargs, strict=False).module()
    try:
        one.agree(exported, expected, "torch.export")
    except _Wrong:
        return True
    return False


def _first(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0][:400] if lines else ""
