"""Compiling a whole model ahead, in processes that can be ended: whoever compiles it next finds what was done in Inductor's cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import msgspec
import torch

from autosched.core.decoding import decode_json
from autosched.core.errors import WorkerLost
from autosched.core.program import Program
from autosched.core.variants import Lowering
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_messages import Broken, ExtraAnswer, ExtraRequest
from autosched.runtime.host_key import numerics_key
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.inductor.unfinished import remove_unfinished
from autosched.runtime.regions.pool import worker_count

MODULE = "autosched.device.ahead_main"
AHEAD = "compile-ahead"
_GRACE_S = 60.0


class AheadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile the program in ``program_file`` for ``device`` in the mode of ``lowering``, once for each number of ``threads``.

    What is chosen by timing is chosen for the first of them, and taken for the others.
    """

    program_file: str
    constants_file: str
    device: str
    threads: tuple[int, ...]
    lowering: str
    numerics: tuple[tuple[str, str], ...]  # as ``host_key.numerics_key`` gives them: part of what Inductor's cache goes by


class AheadResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``reason``: why the code cannot be used; empty if it can."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """Why the code of a whole model is not to be had; ``timed_out`` where only time was missing."""

    reason: str
    timed_out: bool = False


def compile_ahead(
    source: Program,
    constants: Mapping[int, torch.Tensor],
    device: torch.device | str,
    threads: Sequence[int],
    limit_s: float,
    lowering: Lowering = Lowering.INDUCTOR,
) -> NotCompiled | None:
    """Compile ``source`` as a whole in processes of its own: one for each number of threads, at once, where there are cores and memory for
    that and nothing is chosen by timing; else one for all.

    Args:
        source: a program of ATen calls, as ``pipeline.inductor_capture.lower_inductor`` gets it.
        constants: tensor of each of its bindings, by value index.
        device: what it is compiled for.
        threads: the numbers of threads that code is wanted for, most first; on a GPU they mean nothing.
        limit_s: seconds after which the processes are ended.
        lowering: one of ``WHOLE``: Inductor's mode. In one that times kernels, nothing else should run on the device.

    Returns:
        Why the lowering is not to be had, or ``None``: then compiling it here takes little time.
    """
    at_once = len(threads) > 1 and not Mode(lowering).autotuned and worker_count(2 * len(threads)) >= len(threads)
    shares = [(count,) for count in threads] if at_once else [tuple(threads)]
    # Their own limit is only for a process that cannot be ended.
    workers = [Worker(MODULE, timeout_s=2 * limit_s + _GRACE_S) for _ in shares]
    end_s = time.monotonic() + limit_s
    try:
        files = workers[0].write_program(source, constants)
        home, numerics = str(torch.device(device)), numerics_key(torch.device(device).type)
        bodies = [AheadBody(*files, home, share, lowering.value, numerics) for share in shares]
        for worker in workers:
            # Before anybody asks: what has not started cannot be stopped.
            worker.start()
        return _first_reason(workers, bodies, end_s, limit_s)
    except (ValueError, WorkerLost) as error:
        return NotCompiled(f"the model cannot be compiled in another process: {error}")
    finally:
        for worker in workers:
            worker.close()


class _Reason(Exception):
    """Why a process cannot have the code."""


def _first_reason(workers: Sequence[Worker], bodies: Sequence[AheadBody], end_s: float, limit_s: float) -> NotCompiled | None:
    with ThreadPoolExecutor(len(workers)) as pool:
        asked = [pool.submit(_compile, worker, body) for worker, body in zip(workers, bodies, strict=True)]
        try:
            done, pending = wait(asked, timeout=max(0.0, end_s - time.monotonic()), return_when=FIRST_EXCEPTION)
            errors = [error for item in done if (error := item.exception()) is not None]
        finally:
            # Also at an interrupt. Each thread sees its process's end, and ends.
            for worker, item in zip(workers, asked, strict=True):
                if not item.done():
                    worker.stop()
    if pending or errors:
        remove_unfinished()
    for error in errors:
        if isinstance(error, _Reason):
            return NotCompiled(str(error))
        if isinstance(error, WorkerDied):
            return NotCompiled(f"the process that compiled the whole model ended: {error.failure.detail}")
        raise error
    return NotCompiled(f"Inductor had not compiled the whole model after {limit_s:.0f} s", timed_out=True) if pending else None


def _compile(worker: Worker, body: AheadBody) -> None:
    reason = "the compiling process gave no answer"
    for answer in worker.ask(ExtraRequest(AHEAD, msgspec.Raw(msgspec.json.encode(body)))):
        if isinstance(answer, Broken):
            reason = answer.failure.detail
        elif isinstance(answer, ExtraAnswer) and answer.name == AHEAD:
            reason = decode_json(answer.body, AheadResult).reason
    if reason:
        raise _Reason(reason)
