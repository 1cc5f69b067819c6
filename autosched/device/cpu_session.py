"""A program opened on the CPU device: every request goes to the measuring process, and a death there is a value here."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from autosched.config import compile_workers, region_limit_s
from autosched.core.errors import DeviceError
from autosched.core.program import Program
from autosched.core.records import Engine, Failure, FailureKind, GroupRecord, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule, canonical_key, violations
from autosched.device.base import Comparison, Group, Limits, Pair
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_messages import (
    Answer,
    Broken,
    CompareAnswer,
    CompareRequest,
    GroupAnswer,
    GroupsRequest,
    LimitsAnswer,
    LimitsRequest,
    Measurement,
    OpenRequest,
    PairAnswer,
    PairedAnswer,
    PairedRequest,
    PairsRequest,
    PrepareRegionsRequest,
    RegionAnswer,
    RegionsPrepared,
    RegionsRequest,
    ScheduleAnswer,
    SchedulesRequest,
    SoloAnswer,
    SoloRequest,
)
from autosched.runtime.host_key import numerics_key
from autosched.runtime.native.build import engine_here
from autosched.runtime.regions.pieces import offered_variants
from autosched.runtime.regions.pool import MOST_LATE

if TYPE_CHECKING:
    import torch

_MODULE = "autosched.device.worker_main"
# Once may have been somebody else's doing.
_MOST_ENDED = 2
NO_ANSWER = Failure(FailureKind.CRASH, "the measuring process gave no answer for this one")

_Record = TypeVar("_Record")
_RecordOut = TypeVar("_RecordOut", covariant=True)


class _Indexed(Protocol[_RecordOut]):
    @property
    def index(self) -> int: ...
    @property
    def record(self) -> _RecordOut | None: ...
    @property
    def failure(self) -> Failure | None: ...


def new_worker(timeout_s: float, *, plugin: Path | None = None) -> Worker:
    """A measuring process, not yet started."""
    return Worker(_MODULE, timeout_s=timeout_s, plugin=plugin)


class CpuSession:
    """See ``base.Session``. The measuring process starts with the first request and is replaced whenever it dies.

    When it dies, what it was working on becomes a ``Failure``, records already answered are kept, and a fresh process goes on
    with the rest.

    Args:
        program, constants: as in ``Device.open``.
        timeout_s: how long the process may show no progress; one timed block of a schedule is progress.
        max_lanes, widths: as in ``Limits``.
        seed: of the inputs, and of the order of measurements.
        plugin: a Python file that the process runs first; tests inject faults with it.
        worker: a process that was started early, in the place of a new one.
    """

    _kind = "cpu"  # of device, for the variants that operators have there

    def __init__(
        self,
        program: Program,
        constants: Mapping[int, torch.Tensor],
        *,
        timeout_s: float,
        max_lanes: int,
        widths: tuple[int, ...],
        seed: int = 0,
        plugin: Path | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._program = program
        self._constants: Mapping[int, torch.Tensor] | None = constants
        self._max_lanes = max_lanes
        self._widths = widths
        self._seed = seed
        self._requests = 0
        self._closed = False
        self._limits: Limits | None = None
        self._ended: dict[str, list[Failure]] = {}  # by canonical key: processes that a schedule has ended since it came through
        self._worker = worker if worker is not None else new_worker(timeout_s, plugin=plugin)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the living measuring process, if there is one."""
        return self._worker.pid

    @property
    def limits(self) -> Limits:
        """As ``base.Session.limits``; the costs are measured at the first use.

        Raises:
            DeviceError: if they cannot be measured.
        """
        if self._limits is None:
            answer = self._single(LimitsRequest())
            if not isinstance(answer, LimitsAnswer):
                raise DeviceError(f"the costs between operators could not be measured: {_reason(answer)}. Run 'autosched doctor'.")
            self._limits = self._limits_with(answer)
        return self._limits

    def _limits_with(self, costs: LimitsAnswer) -> Limits:
        return Limits(
            max_lanes=self._max_lanes,
            widths=self._widths,
            priorities=(0,),
            lanes_matter=True,
            launch_gap_us=costs.launch_gap_us,
            cross_lane_us=costs.cross_lane_us,
            fixed_us=costs.fixed_us,
            concurrent_gap_us=costs.concurrent_gap_us,
            native_lanes=costs.native_lanes,
            one_team=costs.one_team,
        )

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        """As ``base.Session.solo``, operators timed where they stand in the program."""
        return self.solo_variants([(width, 0) for width in widths], repeats=repeats)

    def solo_variants(self, columns: Sequence[tuple[int, int]], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        """As ``variants.VariantSession.solo_variants``."""
        count = len(self._program.graph)
        widths, variants = tuple(width for width, _ in columns), tuple(variant for _, variant in columns)
        found: list[list[SoloRecord | Failure | None]] = [[None] * len(widths) for _ in range(count)]
        skip: list[int] = []
        while True:
            try:
                broken = None
                for answer in self._ask(SoloRequest(widths, max(1, repeats), tuple(skip), self._next_seed(), variants)):
                    if isinstance(answer, SoloAnswer):
                        found[answer.operator][answer.width] = answer.record if answer.record is not None else answer.failure
                    elif isinstance(answer, Broken):
                        broken = answer.failure
                return [[item if item is not None else broken or NO_ANSWER for item in row] for row in found]
            except WorkerDied as death:
                if 0 <= death.item < count * len(columns):
                    first, operator = divmod(death.item, count)
                    # What comes before stands: of an operator that breaks in one variant, others can be had.
                    for other, column in product(self._broken_with(operator, first), range(first, len(columns))):
                        skip.append(column * count + other)
                        found[other][column] = found[other][column] or death.failure

    def _broken_with(self, operator: int, column: int) -> list[int]:
        """``operator``, and behind the first column, through which all have come, those like it: they would break the process as well."""
        operators = self._program.graph.operators
        alike = [other.index for other in operators if other.signature == operators[operator].signature]
        return alike if column else [operator]

    def offered(self) -> tuple[tuple[int, ...], ...]:
        """As ``variants.VariantSession.offered``."""
        return offered_variants(self._program, self._kind)

    def prepare_variants(self, columns: Sequence[tuple[int, int]], limit_s: float | None = None) -> tuple[int, int]:
        """As ``variants.VariantSession.prepare_variants``.

        Raises:
            UsageError: if a variable that this goes by holds no number.
        """
        compile_workers(1), region_limit_s(1.0)  # said here: the measuring process would only do without
        compiled, processes = 0, 1
        try:
            for answer in self._ask(PrepareRegionsRequest(tuple(columns), limit_s)):
                if isinstance(answer, RegionsPrepared):
                    compiled, processes = answer.compiled, answer.processes
        except WorkerDied:
            # What it had compiled is kept; a fresh process compiles the rest, and names what kills it.
            pass
        return compiled, processes

    def begin_variants(self, columns: Sequence[tuple[int, int]], limit_s: float | None = None) -> None:
        """As ``variants.CompilesBeside.begin_variants``."""
        # What a process is lost to, here and there, is said by who asks for the regions.
        with contextlib.suppress(WorkerDied):
            for _ in self._ask(PrepareRegionsRequest(tuple(columns), limit_s, begin=True)):
                pass

    def compile_variant(self, width: int, variant: int, limit_s: float | None = None) -> dict[int, str]:
        """As ``variants.VariantSession.compile_variant``."""
        found: dict[int, str] = {}
        skip: list[int] = []
        end_s = math.inf if limit_s is None else time.monotonic() + limit_s
        late = 0
        while True:
            left_s = 0.0 if late >= MOST_LATE else max(0.0, end_s - time.monotonic())
            try:
                for answer in self._ask(RegionsRequest(width, variant, tuple(skip), None if math.isinf(left_s) else left_s)):
                    if isinstance(answer, RegionAnswer):
                        found[answer.operator] = answer.reason
                    elif isinstance(answer, Broken):
                        found.setdefault(-1, answer.failure.detail)
                return found
            except WorkerDied as death:
                if death.item < 0:
                    return {**found, -1: death.failure.detail}
                skip.append(death.item)
                found[death.item] = death.failure.detail
                late += death.failure.kind is FailureKind.TIMEOUT

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        """As ``base.Session.pairs``."""

        def request(places: Sequence[int]) -> PairsRequest:
            return PairsRequest(tuple(pairs[place] for place in places), max(1, repeats), self._next_seed())

        return self._batch(len(pairs), {}, request, PairAnswer)

    def groups(self, groups: Sequence[Group], *, repeats: int) -> list[GroupRecord | Failure]:
        """As ``base.Session.groups``; each member has a lane of its own, also where there are fewer cores."""

        def request(places: Sequence[int]) -> GroupsRequest:
            return GroupsRequest(tuple(groups[place] for place in places), max(1, repeats), self._next_seed())

        return self._batch(len(groups), {}, request, GroupAnswer)

    def schedules(
        self, schedules: Sequence[Schedule], *, rounds: int, trace: bool = False, min_block_us: float = 0.0
    ) -> list[ScheduleRecord | Failure]:
        """As ``base.Session.schedules``. Peak memory is computed from the plan, see ``CpuMeasurer.schedules``."""

        def request(places: Sequence[int]) -> SchedulesRequest:
            chosen = tuple(schedules[place] for place in places)
            return SchedulesRequest(chosen, max(1, rounds), trace, min_block_us, self._next_seed())

        return self._batch(len(schedules), self._not_to_run(schedules), request, ScheduleAnswer, schedules)

    def paired(self, schedules: Sequence[Schedule], *, rounds: int) -> list[list[float]] | Failure:
        """As ``base.Session.paired``."""
        for failure in self._not_to_run(schedules).values():
            return failure
        answer = self._single(PairedRequest(tuple(schedules), max(1, rounds), self._next_seed()), schedules)
        return [list(row) for row in answer.times_us] if isinstance(answer, PairedAnswer) else _failure(answer)

    def compare(
        self, schedule: Schedule, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
    ) -> Comparison | Failure:
        """As ``base.Session.compare``; ``runtime.numerics`` has the tolerances."""
        for failure in self._not_to_run([schedule]).values():
            return failure
        files: dict[str, list[Path]] = {"inputs": [], "references": []}
        try:
            for kind, sets in (("inputs", inputs), ("references", references)):
                for number, tensors in enumerate(sets):
                    # A user's model and its inputs may be on the GPU.
                    named = {str(place): tensor.detach().cpu() for place, tensor in enumerate(tensors)}
                    files[kind].append(self._worker.write_tensors(f"{kind}-{number}.safetensors", named))
            given, wanted = (tuple(str(path) for path in files[kind]) for kind in ("inputs", "references"))
            answer = self._single(CompareRequest(schedule, given, wanted), [schedule])
        finally:
            for path in (*files["inputs"], *files["references"]):
                path.unlink(missing_ok=True)
        if isinstance(answer, CompareAnswer) and answer.comparison is not None:
            return answer.comparison
        return answer.failure if isinstance(answer, CompareAnswer) and answer.failure is not None else _failure(answer)

    def close(self) -> None:
        """As ``base.Session.close``."""
        self._closed = True
        self._worker.close()

    def __enter__(self) -> CpuSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _not_to_run(self, schedules: Sequence[Schedule]) -> dict[int, Failure]:
        """Those that are illegal, and those that have ended two processes in a row: each time costs a process's start, or its limit."""
        found: dict[int, Failure] = {}
        for place, schedule in enumerate(schedules):
            if problems := violations(self._program.graph, schedule):
                found[place] = Failure(FailureKind.ILLEGAL, "; ".join(problems[:3]))
            elif self._ended and (deaths := self._ended.get(self._key(schedule), ())) and len(deaths) >= _MOST_ENDED:
                found[place] = deaths[-1]
        return found

    def _blame(self, death: WorkerDied, schedules: Sequence[Schedule]) -> None:
        # Where memory runs out, the system ends whoever is at work, and that may be for what ran before.
        if 0 <= death.item < len(schedules) and not death.by_others:
            self._ended.setdefault(self._key(schedules[death.item]), []).append(death.failure)

    def _clear(self, schedules: Sequence[Schedule]) -> None:
        """They have come through."""
        if self._ended:
            for schedule in schedules:
                self._ended.pop(self._key(schedule), None)

    def _key(self, schedule: Schedule) -> str:
        # A GPU's graph of the same operators on other streams is the same graph.
        return canonical_key(self._program.graph, schedule, lanes_matter=self._kind == "cpu")

    def _batch(
        self,
        count: int,
        known: Mapping[int, Failure],
        request: Callable[[Sequence[int]], PairsRequest | GroupsRequest | SchedulesRequest],
        kind: type[_Indexed[_Record]],
        schedules: Sequence[Schedule] = (),
    ) -> list[_Record | Failure]:
        """``schedules``: what the items are, where they are any."""
        results: dict[int, _Record | Failure] = dict(known)
        while pending := [place for place in range(count) if place not in results]:
            try:
                for answer in self._ask(request(pending)):
                    if isinstance(answer, Broken):
                        results.update({place: answer.failure for place in pending if place not in results})
                    elif isinstance(answer, kind):
                        outcome = answer.record if answer.record is not None else answer.failure
                        results[pending[answer.index]] = outcome if outcome is not None else NO_ANSWER
                self._clear([schedules[place] for place in pending] if schedules else ())
                results.update({place: NO_ANSWER for place in pending if place not in results})
            except WorkerDied as death:
                self._blame(death, [schedules[place] for place in pending] if schedules else ())
                if 0 <= death.item < len(pending):
                    results.setdefault(pending[death.item], death.failure)
        return [results[place] for place in range(count)]

    def _single(self, request: LimitsRequest | PairedRequest | CompareRequest, schedules: Sequence[Schedule] = ()) -> Answer | Failure:
        """``schedules``: what it is about, in the order of its items."""
        failure = NO_ANSWER
        for _ in range(2):
            try:
                answers = list(self._ask(request))
            except WorkerDied as death:
                self._blame(death, schedules)
                failure = death.failure
                # Nobody can tell a candidate's crash from a kill by somebody else; only the former comes again.
                if failure.kind is FailureKind.CRASH:
                    continue
                return failure
            self._clear(schedules)
            return answers[-1] if answers else NO_ANSWER
        return failure

    def _ask(self, request: Measurement) -> Iterator[Answer]:
        self._prepare()
        return self._worker.ask(request)

    def _prepare(self) -> None:
        if self._closed:
            raise DeviceError("the session is closed; open the device again")
        if self._constants is not None:
            self._write_program(self._constants)
            self._constants = None

    def _write_program(self, constants: Mapping[int, torch.Tensor]) -> None:
        files = self._worker.write_program(self._program, constants)
        native = engine_here() is Engine.NATIVE
        self._worker.opens_with([OpenRequest(*files, self._seed, numerics_key("cpu"), native, self._widths)])

    def _next_seed(self) -> int:
        self._requests += 1
        return self._seed * 1_000_003 + self._requests


def _failure(answer: Answer | Failure) -> Failure:
    if isinstance(answer, Failure):
        return answer
    return answer.failure if isinstance(answer, Broken) else NO_ANSWER


def _reason(answer: Answer | Failure) -> str:
    return _failure(answer).detail
