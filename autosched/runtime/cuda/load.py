"""A plan made ready to serve on a GPU: warmed up, captured in a pool of its own, and audited before it may run."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch

from autosched.core.custom_operators import is_custom
from autosched.core.errors import DeviceError, ShortOfMemory
from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.standing_aside import all_aside
from autosched.runtime.cuda.audit import audit_graph
from autosched.runtime.cuda.bindings import open_bindings, why_unread
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.in_place import InPlaceRunner
from autosched.runtime.cuda.lanes import CaptureOptions, Launchable
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.cuda.streams import Tensor
from autosched.runtime.cuda.torch_streams import TorchStreams
from autosched.runtime.current_device import made_current
from autosched.runtime.float32 import as_it_is_set
from autosched.runtime.kernels import Begun, BoundProgram
from autosched.runtime.no_memory import ROOM
from autosched.runtime.plan import Plan
from autosched.runtime.thread_state import ThreadKept

_log = logging.getLogger(__name__)

# Operators of PyTorch that may call cuBLAS. One too many costs a workspace, one too few what ``hold_workspaces`` is for.
_MULTIPLIES = re.compile("mm|mv|matmul|linear|einsum|attention|encoder_layer|dot|cdist|lstm|gru|rnn|linalg_(?!vector)|triangular")
_lock = threading.RLock()  # a signal's handler may ask for a report in the midst of this
# One at a time: all share their device's streams, and no two captures may be under way; what waits for the device ends the other's.
# A custom operator may call another schedule, which another thread may be making ready and then waits for its turn: it stands aside.
_preparing = threading.RLock()
# A capture also ends if another thread waits for the whole device meanwhile, which is not in our hands.
_ATTEMPTS = 3
# How CUDA words cudaErrorStreamCaptureInvalidated, and what cuBLAS and cuDNN make of it.
_BROKEN = ("previous error during capture", "STATUS_EXECUTION_FAILED", "STATUS_INTERNAL_ERROR")

Made = TypeVar("Made")
_said: set[str] = set()
_capturers: dict[int, GraphCapturer] = {}


def cuda_runner(bound: BoundProgram, plan: Plan, inputs: Sequence[torch.Tensor]) -> GraphRunner | InPlaceRunner:
    """Capture ``plan`` for serving; the result takes inputs and returns tensors that belong to the caller.

    All runners of one device in a process share its streams, and so take turns.

    Args:
        bound: on the device; the runner keeps it, since the graph holds the addresses of its constants.
        inputs: an example, on the device; shapes, types and strides of every later call.

    Raises:
        DeviceError: if it cannot be captured, or the captured graph does not pass its audit.
    """
    graph = bound.program.graph

    def record(example: Sequence[Tensor], callers: Collection[int] = ()) -> GraphRunner:
        # A graph keeps the rounding of the moment when it is captured. First, as whoever compares has it before the other.
        with ThreadKept(bound.device), as_it_is_set(), _preparing, all_aside(), made_current(bound.device):
            return prepare_runner(_capturer(bound.device), bound, graph, plan, example, callers)

    if not bound.in_place:
        return record(inputs)
    ends = {chain.links[-1].after for chain in bound.in_place}
    begins = {chain.links[0].before for chain in bound.in_place}
    targets = [place for place, value in enumerate(graph.inputs) if value in begins]
    # A view that is returned would keep the memory of a caller alive.
    views = any(graph.values[value].storage in ends and value not in ends for value in graph.outputs)
    return InPlaceRunner(record, inputs, targets, bound.begun or Begun(), anywhere=not views)


def prepare_runner(
    capturer: GraphCapturer, program: Launchable, graph: OpGraph, plan: Plan, inputs: Sequence[Tensor], callers: Collection[int] = ()
) -> GraphRunner:
    """As :func:`cuda_runner`, on any backend.

    Args:
        callers: as for ``GraphCapturer.capture``.

    Raises:
        DeviceError: if it cannot be captured, or the captured graph does not pass its audit.
    """
    backend = capturer.backend
    # One that serves has a pool of its own, and takes the place of another where weights have changed or shapes take turns.
    capturer.give_back()
    static = [tensor if place in callers else backend.static_like(tensor) for place, tensor in enumerate(inputs)]
    own = [place for place in range(len(static)) if place not in callers]
    backend.copy([static[place] for place in own], [inputs[place] for place in own])
    backend.synchronize()
    # Nobody has asked for a run yet: what overwrites its inputs is warmed up in the form that does not.
    failure = capturer.warm_up(program.otherwise or program, static)
    if failure is not None:
        raise _refusal(failure, "the operators do not run on this device", "Run 'autosched check', or use the model as it is.")
    if any(_multiplies(call.target) for operator in graph.operators for call in operator.calls):
        failure = _attempted(lambda: capturer.hold_workspaces(plan))
        if failure is not None:
            raise _refusal(failure, "the libraries' workspaces cannot be made here", "Use the model as it is.")
    if not capturer.can_observe:
        _say_once(_not_audited(capturer.unread))
    options = CaptureOptions(observe=capturer.can_observe)
    made = _attempted(lambda: capturer.capture(program, plan, static, graph=graph, options=options, callers=callers))
    if isinstance(made, Failure):
        raise _refusal(made, "the schedule cannot be captured here", "Tune again on this machine, or use the model as it is.")
    if made.captured is not None:
        _require_sound(graph, plan, made.captured, made)
    return made


def _refusal(failure: Failure, what: str, advice: str) -> DeviceError:
    if failure.kind is FailureKind.OOM:
        return ShortOfMemory(f"{what}: {failure.detail}. {ROOM}")
    return DeviceError(f"{what}: {failure.detail}. {advice}")


def _multiplies(target: str) -> bool:
    # What a custom operator does, its name does not tell; and without cuDNN, convolutions are products.
    without_cudnn = "conv" in target and not torch.backends.cudnn.enabled
    return without_cudnn or is_custom(target) or _MULTIPLIES.search(target) is not None


def unaudited() -> str:
    """Why captured graphs are served without a static audit in this process; empty where they are audited."""
    with _lock:
        unread = [capturer.unread for capturer in _capturers.values()] or [why_unread()]
    return next((_not_audited(why) for why in unread if why), "")


def _not_audited(why: str) -> str:
    return f"captured graphs are not audited here: {why}. Their outputs are compared, but an order kept only by luck would not show"


def _attempted(capture: Callable[[], Made]) -> Made:
    """Capture again where something outside of it broke it: an operator of its own that may not be captured says so itself."""
    made = capture()
    for _ in range(_ATTEMPTS - 1):
        if not isinstance(made, Failure) or not any(words in made.detail for words in _BROKEN):
            break
        _log.info("a capture was broken from outside, once more: %s", made.detail)
        made = capture()
    return made


def _require_sound(graph: OpGraph, plan: Plan, captured: CapturedGraph, runner: GraphRunner) -> None:
    report = audit_graph(graph, plan, captured)
    if not report.sound:
        runner.close()
        raise DeviceError(f"the captured graph fails its audit: {report.problems[0]}. It is not used; tune again on this machine.")


def _say_once(words: str) -> None:
    if words not in _said:
        _said.add(words)
        _log.warning("%s", words)


def _capturer(device: torch.device) -> GraphCapturer:
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _lock:
        if index not in _capturers:
            _capturers[index] = GraphCapturer(TorchStreams(torch.device("cuda", index)), reader=open_bindings(), unread=why_unread())
        return _capturers[index]
