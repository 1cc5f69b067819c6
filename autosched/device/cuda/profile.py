"""What each operator launches: its kernels with grid, block, registers, shared memory and residency; time warm and cold.

First source: the kernel nodes of a small captured graph, read through cuda-bindings. Second, where those are missing: PyTorch's
profiler around one run. Neither looks at kernel names: a graph, or a profile, of one operator holds that operator's kernels only.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from autosched.core.records import Failure
from autosched.core.scratch import Scratch
from autosched.core.variants import variant_signature
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.calls import Kernel
from autosched.runtime.cuda.bindings import GraphBindings, KernelNode
from autosched.runtime.cuda.captured import NodeKind

_COLD_COPIES = 5


class ProfileSource(enum.StrEnum):
    """Where the kernels were read."""

    GRAPH = "graph"
    PROFILER = "profiler"


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """One operator signature on one device.

    Args:
        signature: ``core.variants.variant_signature`` of the variant profiled.
        operator: index of the operator profiled; others of the same signature are alike.
        kernels: in launch order.
        other_nodes: copies and fills among its nodes.
        flops, bytes_read, bytes_written: as in ``Operator``.
        warm_us, cold_us: time alone with its data in the L2 cache where it fits, and after other data has displaced it; 0 if not measured.
    """

    signature: str
    operator: int
    kernels: tuple[KernelNode, ...]
    other_nodes: int
    flops: int
    bytes_read: int
    bytes_written: int
    warm_us: float
    cold_us: float
    source: ProfileSource

    @property
    def longest(self) -> KernelNode | None:
        """The kernel with most threads: the one that decides how the operator shares the device."""
        return max(self.kernels, key=lambda kernel: kernel.blocks * kernel.threads, default=None)


def profile_operator(
    measurer: CudaMeasurer, operator: int, variant: int = 0, *, bindings: GraphBindings | None, flush: Callable[[], object] | None
) -> OperatorProfile | Failure:
    """Profile one operator in one variant.

    Args:
        bindings: the first source; None for the second.
        flush: launches something that displaces the L2 cache; None to skip the cold time.
    """
    kernel = measurer.variants.kernel(operator, variant)
    if isinstance(kernel, Failure):
        return kernel
    read = (
        _kernels_of_graph(measurer, operator, variant, bindings)
        if bindings is not None
        else _kernels_of_profiler(measurer, operator, kernel)
    )
    if isinstance(read, Failure):
        return read
    warm = measurer.solo_us(operator, variant)
    if isinstance(warm, Failure):
        return warm
    cold = cold_us(measurer, operator, kernel, flush) if flush is not None else 0.0
    if isinstance(cold, Failure):
        return cold
    kernels, others = read
    item = measurer.graph.operators[operator]
    source = ProfileSource.GRAPH if bindings is not None else ProfileSource.PROFILER
    name = variant_signature(item.signature, variant)
    return OperatorProfile(name, operator, kernels, others, item.flops, item.bytes_read, item.bytes_written, warm, cold, source)


def cold_us(measurer: CudaMeasurer, operator: int, kernel: Kernel, flush: Callable[[], object]) -> float | Failure:
    """Time of one operator right after ``flush``: the median over a few, less what two adjacent time stamps are apart."""
    backend = measurer.backend
    stream = measurer.capturer.streams.lane(0)
    stamps: list[tuple[Any, Any]] = []

    def body() -> None:
        stamps.clear()
        slots = held.copy()
        with backend.on(stream):
            for turn in range(2 * _COLD_COPIES):
                flush()
                start, end = (backend.new_event(timing=True, in_graph=True) for _ in range(2))
                backend.record(start, stream)
                if turn % 2:
                    kernel(slots)
                backend.record(end, stream)
                stamps.append((start, end))

    held = measurer.values([operator])
    made = measurer.capturer.capture_script([stream], body)
    if isinstance(made, Failure):
        return made
    for _ in range(2):
        measurer.replay(made[0])
    times = [backend.elapsed_us(start, end) for start, end in stamps]
    backend.reset(made[0])
    return max(0.0, median(times[1::2]) - median(times[0::2]))


def _kernels_of_graph(
    measurer: CudaMeasurer, operator: int, variant: int, bindings: GraphBindings
) -> tuple[tuple[KernelNode, ...], int] | Failure:
    chain = measurer.chain([(operator, 1)], [variant])
    if isinstance(chain, Failure):
        return chain
    kernels = bindings.kernels(chain.graph)
    nodes, _ = bindings.read(chain.graph)
    others = sum(kind in (NodeKind.MEMCPY, NodeKind.MEMSET, NodeKind.OTHER) for _, kind in nodes)
    measurer.release(chain)
    return kernels, others


def _kernels_of_profiler(measurer: CudaMeasurer, operator: int, kernel: Kernel) -> tuple[tuple[KernelNode, ...], int]:
    slots = measurer.values([operator])
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as profiler:
        with measurer.backend.on(measurer.capturer.streams.named("warm-up")):
            kernel(slots)
        measurer.backend.synchronize()
    with Scratch() as folder:
        path = folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return read_trace(events)


def read_trace(events: list[dict[str, Any]]) -> tuple[tuple[KernelNode, ...], int]:
    """Kernels and the number of copies and fills in a Chrome trace of PyTorch's profiler.

    The trace gives static and dynamic shared memory as one sum, and neither local memory nor clusters; what it calls blocks per SM
    is the grid over the multiprocessors, so residency is known only where a newer profiler tells it, else 0.
    """
    kernels: list[KernelNode] = []
    others = 0
    for event in sorted((item for item in events if item.get("ph") == "X"), key=lambda item: float(item.get("ts", 0))):
        category = str(event.get("cat", ""))
        if category in ("gpu_memcpy", "gpu_memset"):
            others += 1
        if category != "kernel":
            continue
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
    return tuple(kernels), others


def _resident(arguments: dict[str, Any]) -> int:
    occupancy = arguments.get("occupancy")
    if isinstance(occupancy, dict) and "activeBlocksPerMultiprocessor" in occupancy:
        return int(occupancy["activeBlocksPerMultiprocessor"])
    return 0
