"""What is done with one model of the coverage sweep, in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autosched.capture.build import build_program
from autosched.capture.export import Captured, draft_of
from autosched.capture.rewrite import rewrite_draft
from autosched.core.custom_operators import trusting
from autosched.core.errors import UnsupportedGraph
from autosched.core.graph import OpGraph
from autosched.core.schedule import make_schedule, sequential
from autosched.core.variants import Lowering
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.kernels import bind
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.load import load
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.trees import flatten_inputs, unflatten_outputs
from experiments.coverage_cases.made import Build, Made, enliven
from experiments.serve.common import bundle_of

# What can come of one model; the parent adds crash, timeout and memory.
WORKS, FALLS_BACK, REFUSED, WRONG, ERROR, BROKEN = "works", "falls back", "refused", "wrong", "error", "broken"


@dataclass(frozen=True)
class Found:
    """What came of one model.

    Args:
        outcome: one of the constants above.
        reason: why, empty if it works.
        stage: how far it came.
        operators: of the lowering ``rewritten``.
        error_of_scale: largest difference from the model over the largest magnitude of that output.
        notes: weaker things: outputs laid out otherwise, outputs that say nothing because they are constant or not finite.
        export_refuses: whether PyTorch's own export refuses the model, where autosched did.
    """

    outcome: str
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
        self.calls = [(made.args, made.kwargs), _varied((made.args, made.kwargs), 1)]
        self.custom_operators = made.custom_operators
        self.stage = "model"
        self.operators = 0
        self.worst = 0.0
        self.notes: dict[str, None] = {}
        self._state = {name: tensor.detach().clone() for name, tensor in _state(self.model).items()}

    def restore(self) -> None:
        """Give the model back the buffers it began with."""
        with torch.no_grad():
            for name, tensor in _state(self.model).items():
                if name in self._state and not _same_bits(tensor, self._state[name]):
                    tensor.copy_(self._state[name])

    def reference(self) -> list[_Answer]:
        """What the model as it came does in both calls, one after the other."""
        self.restore()
        with torch.no_grad():
            return [self._answer(self.model, call) for call in self.calls]

    def agree(self, run: Callable[..., Any], expected: Sequence[_Answer], stage: str) -> None:
        """Make both calls through ``run`` and compare all that can be seen of them."""
        self.stage = stage
        self.restore()
        for position, (call, wanted) in enumerate(zip(self.calls, expected, strict=True)):
            with torch.no_grad():
                given = self._answer(run, call)
            self._compare(given, wanted, f"{stage}, call {position}")

    def _compare(self, given: _Answer, wanted: _Answer, where: str) -> None:
        if difference := _structure(given.result, wanted.result, "output"):
            raise _Wrong(f"{where}: {difference}")
        mine, theirs = _tensors(given.result), _tensors(wanted.result)
        for what, a, b in (("outputs", mine, theirs), ("inputs after the call", given.inputs, wanted.inputs)):
            agreement = compare(a, b)
            if not agreement.within_tolerance:
                raise _Wrong(f"{where}: {what}: {agreement.reason}")
        changed = [name for name, tensor in given.state.items() if tensor is not wanted.state[name]]
        agreement = compare([given.state[name] for name in changed], [wanted.state[name] for name in changed])
        if not agreement.within_tolerance:
            raise _Wrong(f"{where}: the model's buffers after the call: {agreement.reason}")
        for one, other in zip(mine, theirs, strict=True):
            self.worst = max(self.worst, _error_of_scale(one, other))
            if one.layout is torch.strided and _strides(one) != _strides(other):
                self.notes[f"{where.partition(',')[0]}: strides {one.stride()} where the model has {other.stride()}"] = None
        if given.shared != wanted.shared:
            self.notes[f"{where.partition(',')[0]}: shares memory {given.shared} where the model has {wanted.shared}"] = None

    def _answer(self, run: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]) -> _Answer:
        args, kwargs = copy.deepcopy(call)
        inputs = _tensors((args, kwargs))
        result = run(*args, **kwargs)
        outputs = _tensors(result)
        shared: list[str] = []
        # Parameters apart: what a model returns of its own weights a schedule may fold.
        known = [(f"input {index}", tensor) for index, tensor in enumerate(inputs)]
        for index, tensor in enumerate(outputs):
            shared += [f"output {index} = {name}" for name, other in known if _overlap(tensor, other)]
            known.append((f"output {index}", tensor))
        state = {name: self._as_kept(name, tensor) for name, tensor in _state(self.model).items()}
        # Copies, for the next call may write to what the model returns.
        result = _copied(result)
        _scribble(outputs, [*inputs, *_state(self.model).values()])
        return _Answer(result, inputs, state, tuple(shared))

    def _as_kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The copy it began with if nothing changed it: one for each call would be the model four times."""
        began = self._state.get(name)
        return began if began is not None and _same_bits(tensor, began) else tensor.detach().clone()


@dataclass(frozen=True)
class _Answer:
    """One call: what came back, the inputs and buffers afterwards, and which outputs share memory with what."""

    result: Any
    inputs: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    shared: tuple[str, ...]


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
            one.calls[1] = _varied(one.calls[0], 1, integers=False)
            expected = one.reference()
    except Exception as error:
        return Found(BROKEN, f"{type(error).__name__}: {_first(error)}", seconds=time.perf_counter() - began)
    try:
        with trusting(one.custom_operators):
            outcome, reason = _stages(one, expected)
    except _Wrong as wrong:
        outcome, reason = WRONG, str(wrong)
    except UnsupportedGraph as error:
        outcome, reason = REFUSED, str(error)
    except Exception as error:
        outcome, reason = ERROR, f"{type(error).__name__}: {_first(error)}"
    refuses = None
    if outcome in (REFUSED, FALLS_BACK):
        one.restore()
        refuses = _export_refuses(one)
    if _says_nothing(expected):
        one.notes["every output is constant or not finite"] = None
    took = time.perf_counter() - began
    return Found(
        outcome, reason, one.stage if outcome != WORKS else "", one.operators, one.worst, tuple(one.notes), refuses, round(took, 1)
    )


def _stages(one: _Check, expected: list[_Answer]) -> tuple[str, str]:
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
            one.agree(_runner(captured, bound.run), expected, f"{lowering} in order")
        except _Wrong as wrong:
            if lowering is not Lowering.ATEN or not _export_differs(one, expected):
                raise
            # Then what matters is that nobody gets to use it.
            reason = _loaded(one, bundle_of(captured, sequential(captured.program.graph), "model"), expected)
            return FALLS_BACK, f"torch.export's own program differs from the model ({wrong}); {reason}"
    schedule = two_lanes(captured.program.graph, random.Random(0))
    executor = LaneExecutor(bound, make_plan(captured.program.graph, schedule))
    one.agree(_runner(captured, executor.run), expected, "two lanes")
    one.stage = "bundle"
    data = bundle_of(captured, schedule, type(one.model).__name__)
    # What is loaded packs weights of its own.
    del draft, chosen, captured, bound, executor
    one.restore()
    reason = _loaded(one, data, expected)
    return (FALLS_BACK, reason) if reason else (WORKS, "")


def _loaded(one: _Check, data: bytes, expected: list[_Answer]) -> str:
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


def _runner(captured: Captured, run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return unflatten_outputs(captured.program, run(flatten_inputs(captured.program, args, kwargs)))

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


def _export_differs(one: _Check, expected: list[_Answer]) -> bool:
    """Whether what PyTorch exports is what differs from the model."""
    args, kwargs = one.calls[0]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(one.model, args, kwargs, strict=False).module()
    try:
        one.agree(exported, expected, "torch.export")
    except _Wrong:
        return True
    return False


def _scribble(outputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
    """Write to what a call returned and owns: the next call must not notice."""
    for tensor in outputs:
        if tensor.layout is not torch.strided or any(_overlap(tensor, other) for other in kept) or _overlaps_itself(tensor):
            continue
        with contextlib.suppress(RuntimeError), torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.zero_()


def _copied(item: Any) -> Any:
    """The same containers with a copy of each tensor, laid out alike."""
    memo = {id(tensor): _copy(tensor) for tensor in _tensors(item)}
    return copy.deepcopy(item, memo)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    dense = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return tensor.detach().clone() if _overlaps_itself(tensor) else dense.copy_(tensor.detach())


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in found.items() if tensor.layout is torch.strided}


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _extent(a), _extent(b)
    return begin < other_end and other_begin < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last; of two columns of one table these overlap, too."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is torch.strided and a.element_size() == 1:
        # Little is defined on floats of eight and four bits, equality of some not even.
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bool(
        torch.equal(torch.view_as_real(a) if a.is_complex() else a, torch.view_as_real(b) if b.is_complex() else b)
    )


def _varied(call: Any, seed: int, *, integers: bool = True) -> Any:
    """The same call with other values: the example's own elements in another order, floats scaled a little."""
    generator = torch.Generator().manual_seed(seed)

    def vary(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.numel() < 2 or (tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]):
            return tensor.detach().clone()
        if not integers and not tensor.is_floating_point():
            return tensor.detach().clone()
        plain = tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()
        other = plain.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape).view(tensor.dtype)
        if tensor.is_floating_point() and tensor.element_size() > 1:
            other = other * 1.25
        return other if _overlaps_itself(tensor) else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(other)

    return pytree.tree_map(lambda leaf: vary(leaf) if isinstance(leaf, torch.Tensor) else leaf, call)


def _structure(mine: Any, theirs: Any, where: str) -> str:
    """The first difference of two results apart from the values of tensors, or an empty string."""
    if type(mine) is not type(theirs) and not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return f"{where} is a {type(mine).__name__}; the model returns a {type(theirs).__name__}"
    if isinstance(theirs, torch.Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{where} is {list(mine.shape)} {mine.dtype}; the model returns {list(theirs.shape)} {theirs.dtype}"
        return "" if not mine.requires_grad else f"{where} requires gradients"
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(theirs, Mapping):
        if list(mine) != list(theirs):
            return f"{where} has the keys {list(mine)}; the model's has {list(theirs)}"
        pairs = [(f"{where}[{key!r}]", mine[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return f"{where} has {len(mine)} items; the model's has {len(theirs)}"
        pairs = [(f"{where}[{index}]", *items) for index, items in enumerate(zip(mine, theirs, strict=True))]
    elif dataclasses.is_dataclass(theirs) or hasattr(theirs, "__dict__"):
        if list(vars(mine)) != list(vars(theirs)):
            return f"{where} has the attributes {list(vars(mine))}; the model's has {list(vars(theirs))}"
        pairs = [(f"{where}.{name}", vars(mine)[name], vars(theirs)[name]) for name in vars(theirs)]
    elif repr(mine) != repr(theirs):
        return f"{where} is {mine!r}; the model returns {theirs!r}"
    return next((found for name, a, b in pairs if (found := _structure(a, b, name))), "")


def _tensors(item: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect(item, found)
    return found


def _collect(item: Any, into: list[torch.Tensor]) -> None:
    if isinstance(item, torch.Tensor):
        into.append(item)
    elif isinstance(item, Mapping):
        for part in item.values():
            _collect(part, into)
    elif isinstance(item, list | tuple):
        for part in item:
            _collect(part, into)
    elif dataclasses.is_dataclass(item) or (hasattr(item, "__dict__") and not isinstance(item, type)):
        for part in vars(item).values():
            _collect(part, into)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that mean something."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _error_of_scale(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if not (theirs.is_floating_point() or theirs.is_complex()) or theirs.numel() == 0 or theirs.layout is not torch.strided:
        return 0.0
    a, b = mine.to(torch.complex128), theirs.to(torch.complex128)
    finite = b.abs().isfinite()
    if not bool(finite.any()):
        return 0.0
    scale = float(b[finite].abs().max())
    return float((a - b)[finite].abs().max()) / scale if scale else float(a[finite].abs().max())


def _says_nothing(expected: Sequence[_Answer]) -> bool:
    floats = [tensor for answer in expected for tensor in _tensors(answer.result) if tensor.is_floating_point() and tensor.numel() > 1]
    wide = [tensor.double() for tensor in floats]
    return bool(wide) and all(not bool(tensor.isfinite().all()) or float(tensor.std()) == 0 for tensor in wide)


def _first(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0][:400] if lines else ""
