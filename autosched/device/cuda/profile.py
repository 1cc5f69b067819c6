"""What each operator launches: its kernels with grid, block, registers, shared memory and residency.

First source: the kernel nodes of a small captured graph, read through cuda-bindings. Second, where those are missing: PyTorch's
profiler around one run. Neither looks at kernel names: a graph, or a profile, of one operator holds that operator's kernels only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from autosched.core.records import Failure
from autosched.core.scratch import Scratch
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.bindings import GraphBindings, KernelNode


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """What one operator launches on one device: its kernels, in launch order."""

    kernels: tuple[KernelNode, ...]

    @property
    def longest(self) -> KernelNode | None:
        """The kernel with most threads: the one that decides how the operator shares the device."""
        return max(self.kernels, key=lambda kernel: kernel.blocks * kernel.threads, default=None)


def profile_operator(measurer: CudaMeasurer, operator: int, *, bindings: GraphBindings | None) -> OperatorProfile | Failure:
    """Profile one operator.

    Args:
        bindings: the first source; None for the second.
    """
    read = _kernels_of_graph(measurer, operator, bindings) if bindings is not None else _kernels_of_profiler(measurer, operator)
    return read if isinstance(read, Failure) else OperatorProfile(read)


def _kernels_of_graph(measurer: CudaMeasurer, operator: int, bindings: GraphBindings) -> tuple[KernelNode, ...] | Failure:
    chain = measurer.chain([(operator, 1)])
    if isinstance(chain, Failure):
        return chain
    kernels = bindings.kernels(chain.graph)
    measurer.release(chain)
    return kernels


def _kernels_of_profiler(measurer: CudaMeasurer, operator: int) -> tuple[KernelNode, ...]:
    slots = measurer.values()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as profiler:
        with measurer.backend.on(measurer.capturer.streams.named("warm-up")):
            measurer.program.kernels[operator](slots)
        measurer.backend.synchronize()
    with Scratch() as folder:
        path = folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return read_trace(events)


def read_trace(events: list[dict[str, Any]]) -> tuple[KernelNode, ...]:
    """The kernels in a Chrome trace of PyTorch's profiler, in order.

    The trace gives static and dynamic shared memory as one sum, and neither local memory nor clusters; what it calls blocks per SM
    is the grid over the multiprocessors, so residency is known only where a newer profiler tells it, else 0.
    """
    kernels: list[KernelNode] = []
    launched = (item for item in events if item.get("ph") == "X" and item.get("cat") == "kernel")
    for event in sorted(launched, key=lambda item: float(item.get("ts", 0))):
        arguments = event.get("args", {})
        grid, block = (tuple(int(size) for size in arguments.get(name, (1, 1, 1))) for name in ("grid", "block"))
        kernels.append(
            KernelNode(
                grid=(grid[0], grid[1], grid[2]),
                block=(block[0], block[1], block[2]),
                registers=int(arguments.get("registers per thread", 0)),
                static_shared_bytes=0,
                dynamic_shared_bytes=int(arguments.get("shared memory", 0)),
                local_bytes=0,
                resident_blocks=_resident(arguments),
                cluster=1,
                priority=0,
            )
        )
    return tuple(kernels)


def _resident(arguments: dict[str, Any]) -> int:
    occupancy = arguments.get("occupancy")
    if isinstance(occupancy, dict) and "activeBlocksPerMultiprocessor" in occupancy:
        return int(occupancy["activeBlocksPerMultiprocessor"])
    return 0
