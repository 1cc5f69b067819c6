"""What runs a plan on a device, and where the compiled variants of its operators come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from autosched.core.custom_operators import trusted
from autosched.core.program import Program
from autosched.runtime.calling_threads import calling_threads
from autosched.runtime.calls import Kernel
from autosched.runtime.host_key import compiler_key, cpu_device_key, usable_cores
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

    pool = LanePool()
    # A custom operator may call another schedule, from whichever thread it is on. Were one thread to run all, it would wait for itself.
    handed_over = not trusted()

    def runner(bound: BoundProgram, plan: Plan, inputs: Sequence[torch.Tensor]) -> Runner:
        executor = LaneExecutor(bound, plan, pool)
        # Where there is room for two runs beside each other, each calling thread has its own.
        crowded = executor.team > 1 and 2 * executor.team > usable_cores()
        return partial(calling_threads.run, executor.run) if crowded and handed_over else executor.run

    return runner
