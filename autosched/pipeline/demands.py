"""What each operator demands of a GPU, from how its kernels are launched: what Opara's launch order goes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosched.core.graph import OpGraph
from autosched.datasets.facts import DeviceFacts, LaunchFacts


@dataclass(frozen=True, slots=True)
class Demands:
    """By operator, as ``Problem.make`` takes them; None where the device does not tell, and the problem estimates.

    ``demand`` is the share of a multiprocessor that one block takes (threads, registers or shared memory, whichever is scarcest).
    """

    demand: tuple[float, ...] | None
    memory_bound: tuple[bool, ...] | None


def demands(graph: OpGraph, launches: Mapping[str, LaunchFacts], device: DeviceFacts) -> Demands:
    """Demands from launch facts (by signature), memory-boundness from the roofline. An operator without kernels demands nothing."""
    shares: tuple[float, ...] | None = None
    if launches:
        shares = tuple(_share(launches.get(operator.signature), device) for operator in graph.operators)
    bound: tuple[bool, ...] | None = None
    if device.peak_gflops > 0 and device.bandwidth_gb_s > 0:
        balance = device.peak_gflops / device.bandwidth_gb_s  # operations for each byte at which both limits meet
        bound = tuple(operator.flops < balance * (operator.bytes_read + operator.bytes_written) for operator in graph.operators)
    return Demands(shares, bound)


def _share(launch: LaunchFacts | None, device: DeviceFacts) -> float:
    if launch is None:
        return 0.0
    if launch.blocks_per_sm > 0:
        return 1.0 / launch.blocks_per_sm
    return min(1.0, launch.threads_per_block / max(1, device.threads_per_unit))
