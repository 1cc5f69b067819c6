"""A program opened on the CUDA device. The measuring process owns the context; this one never creates any."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from autosched.core.program import Program
from autosched.core.records import Failure
from autosched.core.schedule import Schedule
from autosched.core.variants import variant_signature
from autosched.device.base import Limits
from autosched.device.cpu_session import NO_ANSWER, CpuSession
from autosched.device.cuda.limits import MOST_LANES
from autosched.device.cuda.messages import (
    CapturedBody,
    CapturedResult,
    FailedResult,
    MemoryBody,
    MemoryResult,
    ProfileResult,
    ProfilesBody,
    SettingsBody,
    StressedBody,
    StressedResult,
    TaintedResult,
    unwrap,
    wrap_request,
)
from autosched.device.cuda.profile import OperatorProfile
from autosched.device.cuda.stress import DelaySet, StressOutcome
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_messages import (
    Answer,
    Broken,
    ExtraAnswer,
    LimitsAnswer,
    Measurement,
    OpenRequest,
)
from autosched.runtime.cuda.captured import CapturedGraph
from autosched.runtime.plan import FreeRule

if TYPE_CHECKING:
    import torch

MODULE = "autosched.device.cuda.worker_main"
_GRACE_S = 5.0

_T = TypeVar("_T", bound=msgspec.Struct)


class _Refused(Exception):
    """The process is fine and answered that it cannot."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def new_cuda_worker(timeout_s: float, *, module: str = MODULE, plugin: Path | None = None) -> Worker:
    """A measuring process, not yet started. Starting CUDA and loading a large model's modules takes longer than anything measured."""
    return Worker(module, timeout_s=timeout_s, start_timeout_s=max(300.0, timeout_s), plugin=plugin)


class CudaSession(CpuSession):
    """See ``base.Session``: the same conversation with another measuring process, and questions that only a GPU has answers to.

    A process that a failed capture or a device error has left unusable says so after its answer, and is replaced before the next
    request: one ``Failure``, and the job goes on.

    Args:
        program, constants: as in ``Device.open``.
        timeout_s: how long the process may show no progress.
        settings: what the process sets before it binds the program.
        module, plugin: for tests.
        worker: a process that was started early, in the place of a new one.
    """

    _kind = "cuda"

    def __init__(
        self,
        program: Program,
        constants: Mapping[int, torch.Tensor],
        *,
        timeout_s: float,
        settings: SettingsBody,
        seed: int = 0,
        module: str = MODULE,
        plugin: Path | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._settings = settings
        lanes = max(1, min(program.graph.width, MOST_LANES))
        early = worker if worker is not None else new_cuda_worker(timeout_s, module=module, plugin=plugin)
        super().__init__(program, constants, timeout_s=timeout_s, max_lanes=lanes, widths=(1,), seed=seed, worker=early)
        self._profiled: dict[tuple[str, bool], OperatorProfile] = {}  # by name and whether cold

    def _limits_with(self, costs: LimitsAnswer) -> Limits:
        return Limits(
            max_lanes=self._max_lanes,
            widths=self._widths,
            priorities=(0, 1, 2, 3),
            lanes_matter=False,
            launch_gap_us=costs.launch_gap_us,
            cross_lane_us=costs.cross_lane_us,
            fixed_us=costs.fixed_us,
        )

    def replay_us(self, schedule: Schedule) -> float | Failure:
        """Time of one undisturbed replay, microseconds."""
        times = self.paired([schedule], rounds=5)
        return times if isinstance(times, Failure) else min(times[0])

    def captured(self, schedule: Schedule, rule: FreeRule = FreeRule.VECTOR_CLOCK) -> CapturedGraph | Failure:
        """Capture ``schedule`` and describe its nodes, edges and memory, for ``runtime.cuda.audit``."""
        for failure in self._not_to_run([schedule]).values():
            return failure
        found = self._extra(CapturedBody(schedule, rule), CapturedResult)
        if isinstance(found, Failure):
            return found
        result = found[-1] if found else CapturedResult()
        return result.graph if result.graph is not None else result.failure or NO_ANSWER

    def stressed(self, schedule: Schedule, delay_sets: Sequence[DelaySet], *, replays: int) -> list[StressOutcome | Failure]:
        """Replay ``schedule`` under each delay set, see ``verify.race_stress``."""
        for failure in self._not_to_run([schedule]).values():
            return [failure] * len(delay_sets)
        answers = self._extra(StressedBody(schedule, tuple(delay_sets), replays, self._next_seed()), StressedResult)
        if isinstance(answers, Failure):
            return [answers] * len(delay_sets)
        found: dict[int, StressOutcome | Failure] = {}
        for item in answers:
            found[item.index] = item.outcome if item.outcome is not None else item.failure or NO_ANSWER
        return [found.get(place, NO_ANSWER) for place in range(len(delay_sets))]

    def profiles(self, *, cold: bool = True, variants: Sequence[int] = ()) -> list[OperatorProfile | Failure]:
        """What every operator launches, by operator, in its variant of ``variants`` (``[n]``; default its calls).

        Operators of one signature in one variant share a profile, and what has one is not profiled again.
        """
        operators = self._program.graph.operators
        chosen = tuple(variants) or (0,) * len(operators)
        names = [variant_signature(operator.signature, variant) for operator, variant in zip(operators, chosen, strict=True)]
        first: dict[str, int] = {}
        for operator, name in zip(operators, names, strict=True):
            first.setdefault(name, operator.index)
        found: dict[int, OperatorProfile | Failure] = {
            index: self._profiled[name, cold] for name, index in first.items() if (name, cold) in self._profiled
        }
        while pending := tuple(index for index in first.values() if index not in found):
            try:
                asked = ProfilesBody(pending, cold, tuple(chosen[index] for index in pending))
                for item in self._extra_answers(asked, ProfileResult):
                    found[item.operator] = item.profile if item.profile is not None else item.failure or NO_ANSWER
                found.update({index: NO_ANSWER for index in pending if index not in found})
            except WorkerDied as death:
                if death.item in pending:
                    found.setdefault(death.item, death.failure)
            except _Refused as refused:
                found.update({index: refused.failure for index in pending if index not in found})
        fresh = ((name, found[index]) for name, index in first.items())
        self._profiled.update({(name, cold): profile for name, profile in fresh if isinstance(profile, OperatorProfile)})
        return [found[first[name]] for name in names]

    def memory(self, schedule: Schedule) -> MemoryResult | Failure:
        """Peak memory with vector-clock frees, with none, and of the eager program; bytes."""
        found = self._extra(MemoryBody(schedule), MemoryResult)
        if isinstance(found, Failure):
            return found
        return found[-1] if found else NO_ANSWER

    def _extra(self, body: msgspec.Struct, kind: type[_T]) -> list[_T] | Failure:
        try:
            return list(self._extra_answers(body, kind))
        except (WorkerDied, _Refused) as error:
            return error.failure

    def _extra_answers(self, body: msgspec.Struct, kind: type[_T]) -> Iterator[_T]:
        self._prepare()
        for answer in self._filtered(self._worker.ask(wrap_request(body))):
            if isinstance(answer, Broken):
                raise _Refused(answer.failure)
            if isinstance(answer, ExtraAnswer) and (found := unwrap(answer, kind)) is not None:
                yield found

    def _ask(self, request: Measurement) -> Iterator[Answer]:
        self._prepare()
        return self._filtered(self._worker.ask(request))

    def _filtered(self, answers: Iterator[Answer]) -> Iterator[Answer]:
        tainted = False
        for answer in answers:
            if isinstance(answer, ExtraAnswer):
                if unwrap(answer, TaintedResult) is not None:
                    tainted = True
                    continue
                if (failed := unwrap(answer, FailedResult)) is not None:
                    answer = Broken(failed.failure)
            yield answer
        if tainted:
            self._replace_worker()

    def _replace_worker(self) -> None:
        """End the process; the next request starts a fresh one, with the same files."""
        pid = self._worker.pid
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _GRACE_S
        while self._worker.pid is not None and time.monotonic() < deadline:
            time.sleep(0.01)

    def _write_program(self, constants: Mapping[int, torch.Tensor]) -> None:
        files = self._worker.write_program(self._program, constants)
        self._worker.opens_with([wrap_request(self._settings), OpenRequest(*files, self._seed)])
