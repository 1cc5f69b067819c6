"""Questions only a CUDA session asks its measuring process: they travel as the body of an ``ExtraRequest``, under their class's name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from autosched.core.decoding import decode_json
from autosched.core.records import DeviceKey, Failure
from autosched.core.schedule import Schedule
from autosched.device.cuda.profile import OperatorProfile
from autosched.device.cuda.stress import DelaySet, StressOutcome
from autosched.device.worker_messages import CompileRequest, ExtraAnswer, ExtraRequest
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.plan import FreeRule


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class SettingsBody(_Body, frozen=True):
    """Settings of the parent that change which kernels run: sent before the program is opened. ``gpu`` is what the index means there."""

    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn_allow_tf32: bool
    float32_matmul_precision: str
    device_index: int
    gpu: DeviceKey | None
    deterministic: bool
    cudnn_enabled: bool
    attention: tuple[str, ...]
    half_precision: tuple[str, ...]
    depthwise_kernel: str
    products_library: str


class CapturedBody(_Body, frozen=True):
    """Capture ``schedule`` and describe the graph."""

    schedule: Schedule
    rule: FreeRule


class StressedBody(_Body, frozen=True):
    """Replay ``schedule`` under each delay set."""

    schedule: Schedule
    delay_sets: tuple[DelaySet, ...]
    replays: int
    seed: int


class ProfilesBody(_Body, frozen=True):
    """Profile ``operators``, each in the variant at its place in ``variants``."""

    operators: tuple[int, ...]
    cold: bool
    variants: tuple[int, ...]


class MemoryBody(_Body, frozen=True):
    """Peak memory of ``schedule`` under each rule of freeing, and of the eager program."""

    schedule: Schedule


class CapturedResult(_Body, frozen=True):
    """The graph or a failure."""

    graph: CapturedGraph | None = None
    failure: Failure | None = None


class StressedResult(_Body, frozen=True):
    """One delay set, by its place."""

    index: int
    outcome: StressOutcome | None = None
    failure: Failure | None = None


class ProfileResult(_Body, frozen=True):
    """One operator."""

    operator: int
    profile: OperatorProfile | None = None
    failure: Failure | None = None


class MemoryResult(_Body, frozen=True):
    """Peak bytes of intermediates and outputs: with vector-clock frees, with none, and of the eager program on one stream."""

    vector_clock_bytes: int
    hold_all_bytes: int
    eager_bytes: int


class BaselineBody(_Body, frozen=True):
    """Prepare the baseline called ``kind``: of the model that ``call`` describes, else of the program that was opened."""

    kind: str
    call: CompileRequest | None = None


class BaselineResult(_Body, frozen=True):
    """Largest absolute difference from the model's own answer or, without a model, from the program itself.

    ``peak_memory_bytes`` are of one run, see ``TimedBaseline``; ``of_model`` says what was prepared.
    """

    max_abs_error: float
    peak_memory_bytes: int
    of_model: bool = False


class FailedResult(_Body, frozen=True):
    """The request as a whole failed, in a way that an exception's text would not tell."""

    failure: Failure


class TaintedResult(_Body, frozen=True):
    """The process answered, and should be replaced before the next request: a capture in it could not be ended in order."""


_T = TypeVar("_T", bound=msgspec.Struct)


def wrap_request(body: msgspec.Struct) -> ExtraRequest:
    """A request whose name is the body's class."""
    return ExtraRequest(type(body).__name__, msgspec.Raw(msgspec.json.encode(body)))


def wrap_answer(body: msgspec.Struct) -> ExtraAnswer:
    """An answer whose name is the body's class."""
    return ExtraAnswer(type(body).__name__, msgspec.Raw(msgspec.json.encode(body)))


def unwrap(message: ExtraRequest | ExtraAnswer, kind: type[_T]) -> _T | None:
    """The body, if it is of ``kind``.

    Raises:
        msgspec.MsgspecError: if it is called so and is none.
    """
    return decode_json(message.body, kind) if message.name == kind.__name__ else None
