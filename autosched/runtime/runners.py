"""What runs a plan on a device, and where the compiled variants of its operators come from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from autosched.core.custom_operators import trusted
from autosched.core.errors import TooFewCores
from autosched.core.program import Program
from autosched.runtime.calling_threads import calling_threads
from autosched.runtime.calls import Kernel
from autosched.runtime.cores import cores_of_thread, usable_cores
from autosched.runtime.forking import outlive_forks
from autosched.runtime.host_key import compiler_key, cpu_device_key
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.plan import Plan
from autosched.runtime.prepared import Runner
from autosched.runtime.regions.library import RegionLibrary, region_library

RunnerFactory = Callable[[BoundProgram, Plan, Sequence[torch.Tensor]], Runner]
"""Makes a runner of a bound program and a plan; the tensors are an example input."""


def regions_of(program: Program, plan: Plan, device: torch.device, bound: Sequence[Kernel] = ()) -> RegionLibrary | None:
    """Where the variants of a plan come from; ``None`` if it has none, so that nothing of a compiler is imported for it.

    Args:
        bound: kernels of the program bound on ``device``; needed on a GPU.
    """
    if all(step.variant == 0 for step in plan.steps):
        return None
    if device.type == "cuda":
        from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key

        index = device.index or 0
        return region_library(program, device, cuda_device_key(index), cuda_software_key(index), bound)
    return region_library(program, device, cpu_device_key(), compiler_key())


def runner_factory(device: torch.device) -> RunnerFactory:
    """Of a CUDA device, or of a CPU, whose lanes all programs of one factory share."""
    if device.type == "cuda":
        from autosched.runtime.cuda.load import cuda_runner

        return cuda_runner
    from autosched.runtime.lane_pool import LanePool
    from autosched.runtime.lanes import LaneExecutor

    # A custom operator may call another schedule, from whichever thread it is on. Were one thread to run all, it would wait for itself.
    handed_over = not trusted()
    pool = LanePool(users_code=not handed_over)

    def runner(bound: BoundProgram, plan: Plan, inputs: Sequence[torch.Tensor]) -> Runner:
        executor = LaneExecutor(bound, plan, pool)
        run = partial(_with_cores, executor.run, executor.widest) if executor.widest > 1 else executor.run
        # Where there is room for two runs beside each other, each calling thread has its own.
        crowded = executor.team > 1 and 2 * executor.team > usable_cores()
        return partial(calling_threads.run, run, threads=executor.team) if crowded and handed_over else run

    return runner


class _Counted(threading.local):
    """How many cores this thread may run on; 0 if nobody has counted them."""

    cores = 0


class _Cores:
    """Those of calling threads, each counted once: before its first call, and again if it is forked."""

    def __init__(self) -> None:
        self._counted = _Counted()
        outlive_forks(self)

    def mine(self) -> int:
        """Of the calling thread."""
        counted = self._counted
        counted.cores = counted.cores or cores_of_thread()
        return counted.cores

    def after_fork(self) -> None:
        """Workers are pinned after they were forked."""
        self._counted = _Counted()


_cores = _Cores()


def _with_cores(run: Runner, threads: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``run(inputs)``, if the calling thread has as many cores as an operator has threads.

    Two that share a core spin on it in turn, each for as long as the system lets it, and a call takes a thousand times as long.

    Raises:
        TooFewCores: if it has not.
    """
    if threads > _cores.mine():
        raise TooFewCores(
            f"an operator has {threads} threads, and the thread that calls may run on {_cores.mine()} of the cores; pin processes to as "
            "many cores as the file was tuned for"
        )
    return run(inputs)
