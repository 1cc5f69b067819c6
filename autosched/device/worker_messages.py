"""What the parent and the measuring process say to each other: typed, as JSON, never pickled.

A message is four bytes of length (big-endian) and one JSON object. Tensors travel beside it, as safetensors files in the
private folder of the worker; opaque (packed) tensors never travel.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from autosched.core.decoding import decoder_of
from autosched.core.program import Argument
from autosched.core.records import Failure, GroupRecord, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule
from autosched.device.base import Comparison, Group, Pair

LENGTH = struct.Struct(">I")
# Shared between both sides without a system call: beats so far, and the item now worked on (-1: none in particular).
BOARD = struct.Struct("<qq")


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class OpenRequest(_Message, frozen=True):
    """Bind the program in ``program_file`` to the tensors in ``constants_file``, under settings (``host_key.numerics_key``).

    ``native_lanes``: on a CPU, whether lanes run without the interpreter, as whoever asks will say of what is measured. ``widths``: on a
    CPU, at which it will be asked for.
    """

    program_file: str
    constants_file: str
    seed: int
    numerics: tuple[tuple[str, str], ...] = ()
    native_lanes: bool = False
    widths: tuple[int, ...] = (1,)


class LimitsRequest(_Message, frozen=True):
    """Measure the costs between operators."""


class SoloRequest(_Message, frozen=True):
    """Time every operator alone in each column (a width, a variant; all 0 if empty).

    Items, of the board and in ``skip`` (those known to kill the worker), are operators in columns: ``column * n_operators + operator``.
    """

    widths: tuple[int, ...]
    repeats: int
    skip: tuple[int, ...]
    seed: int
    variants: tuple[int, ...] = ()


class PrepareRegionsRequest(_Message, frozen=True):
    """Compile the variants of these columns (width, variant), several regions at a time; what fails shows in a ``RegionsRequest``.

    With ``begin`` they are only begun: the same without it, which is to come later, waits for them.
    """

    columns: tuple[tuple[int, int], ...]
    limit_s: float | None = None
    begin: bool = False


class RegionsRequest(_Message, frozen=True):
    """Compile the ``variant`` of every operator that has it, for ``width`` threads; ``skip`` are operators known to kill the worker.

    What is not begun within ``limit_s`` seconds stays uncompiled for as long as the process lives.
    """

    width: int
    variant: int
    skip: tuple[int, ...]
    limit_s: float | None = None


class PairsRequest(_Message, frozen=True):
    """Time pairs together."""

    pairs: tuple[Pair, ...]
    repeats: int
    seed: int


class GroupsRequest(_Message, frozen=True):
    """Time groups of three and more together."""

    groups: tuple[Group, ...]
    repeats: int
    seed: int


class SchedulesRequest(_Message, frozen=True):
    """Time schedules, interleaved."""

    schedules: tuple[Schedule, ...]
    rounds: int
    trace: bool
    min_block_us: float
    seed: int


class PairedRequest(_Message, frozen=True):
    """Raw interleaved times of schedules."""

    schedules: tuple[Schedule, ...]
    rounds: int
    seed: int


class CompareRequest(_Message, frozen=True):
    """Run one schedule on the input sets in ``inputs_files`` and compare with ``references_files``, pairwise."""

    schedule: Schedule
    inputs_files: tuple[str, ...]
    references_files: tuple[str, ...]


class CompileRequest(_Message, frozen=True):
    """Compile a model for ``threads`` threads, in Inductor's mode of ``lowering``.

    ``source`` is a ``.pt2`` file, or ``module:function`` that makes a model when called with ``options``. Its call is described by
    ``tree`` and ``leaves``, where ``Ref(i)`` is tensor ``i`` of ``tensors_file``; its right answer is in ``references_file``.
    ``numerics``: settings, as in ``OpenRequest``.
    """

    source: str
    options: tuple[tuple[str, str | int | None], ...]
    tree: str
    leaves: tuple[Argument, ...]
    tensors_file: str
    references_file: str
    threads: int
    lowering: str = "inductor"
    numerics: tuple[tuple[str, str], ...] = ()


class RoundRequest(_Message, frozen=True):
    """Time one block of the compiled model."""

    min_block_us: float


class ExtraRequest(_Message, frozen=True):
    """A question that only one kind of device understands: its name, and its JSON, whose type that device's own file defines."""

    name: str
    body: msgspec.Raw


Measurement = (
    LimitsRequest
    | SoloRequest
    | PrepareRegionsRequest
    | RegionsRequest
    | PairsRequest
    | GroupsRequest
    | SchedulesRequest
    | PairedRequest
    | CompareRequest
)
"""What sessions of every device ask of their process."""

Request = OpenRequest | Measurement | CompileRequest | RoundRequest | ExtraRequest


class Ready(_Message, frozen=True):
    """The process has imported what it needs and waits for requests."""


class Done(_Message, frozen=True):
    """The request is answered in full."""


class Broken(_Message, frozen=True):
    """The request as a whole failed; the process is fine."""

    failure: Failure


class LimitsAnswer(_Message, frozen=True):
    """Costs in microseconds, as in ``Limits``."""

    launch_gap_us: float
    cross_lane_us: float
    fixed_us: float
    concurrent_gap_us: float = 0.0
    native_lanes: bool = False
    one_team: bool = False


class SoloAnswer(_Message, frozen=True):
    """One operator at one width (places in the request): a record or a failure."""

    operator: int
    width: int
    record: SoloRecord | None = None
    failure: Failure | None = None


class RegionsPrepared(_Message, frozen=True):
    """Distinct regions compiled for a ``PrepareRegionsRequest``, and by how many processes at a time."""

    compiled: int
    processes: int


class RegionAnswer(_Message, frozen=True):
    """One operator's variant: ``reason`` says why it cannot be had, empty if it can."""

    operator: int
    reason: str = ""


class PairAnswer(_Message, frozen=True):
    """One pair, by its place in the request: a record or a failure."""

    index: int
    record: PairRecord | None = None
    failure: Failure | None = None


class GroupAnswer(_Message, frozen=True):
    """One group, by its place in the request: a record or a failure."""

    index: int
    record: GroupRecord | None = None
    failure: Failure | None = None


class ScheduleAnswer(_Message, frozen=True):
    """One schedule, by its place in the request: a record or a failure."""

    index: int
    record: ScheduleRecord | None = None
    failure: Failure | None = None


class PairedAnswer(_Message, frozen=True):
    """Times in microseconds, ``[len(schedules)][rounds]``."""

    times_us: tuple[tuple[float, ...], ...]


class CompareAnswer(_Message, frozen=True):
    """The comparison asked for: a result or a failure."""

    comparison: Comparison | None = None
    failure: Failure | None = None


class CompileAnswer(_Message, frozen=True):
    """Largest absolute error against the references."""

    max_abs_error: float


class RoundAnswer(_Message, frozen=True):
    """Time of one run in microseconds, the mean over a block."""

    time_us: float


class ExtraAnswer(_Message, frozen=True):
    """One answer to an ``ExtraRequest``: a name, and its JSON."""

    name: str
    body: msgspec.Raw


Answer = (
    Ready
    | Done
    | Broken
    | LimitsAnswer
    | SoloAnswer
    | RegionsPrepared
    | RegionAnswer
    | PairAnswer
    | GroupAnswer
    | ScheduleAnswer
    | PairedAnswer
    | CompareAnswer
    | CompileAnswer
    | RoundAnswer
    | ExtraAnswer
)

_REQUESTS: msgspec.json.Decoder[Any] = decoder_of(Request)
_ANSWERS: msgspec.json.Decoder[Any] = decoder_of(Answer)


def pack(message: Request | Answer) -> bytes:
    """Length and JSON of a message."""
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body


def read_request(body: bytes) -> Request:
    """The request whose JSON is ``body``.

    Raises:
        msgspec.MsgspecError: if it is none.
    """
    request: Request = _REQUESTS.decode(body)
    return request


def read_answer(body: bytes) -> Answer:
    """The answer whose JSON is ``body``.

    Raises:
        msgspec.MsgspecError: if it is none.
    """
    answer: Answer = _ANSWERS.decode(body)
    return answer
