"""What a model may know about a kernel and about a device: plain numbers that are stored beside every measurement.

A *kernel* is an operator signature, or a variant of it, at a width. Everything a cost model uses as input is here, so that a stored run is
enough to train on: neither the graph nor the device is needed again. A zero means "unknown", never "none".
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autosched.core.graph import Operator, OpGraph
from autosched.core.records import Contamination, DeviceKey


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """How a CUDA kernel is launched; for an operator of several kernels, those of the longest one.

    Args:
        blocks: blocks in the grid.
        threads_per_block: threads in a block.
        registers_per_thread: registers of a thread.
        shared_bytes: static and dynamic shared memory of a block, bytes.
        blocks_per_sm: most blocks of it that one multiprocessor can hold at once.
        kernels: kernels the operator launches.
    """

    blocks: int
    threads_per_block: int
    registers_per_thread: int = 0
    shared_bytes: int = 0
    blocks_per_sm: int = 0
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel on one device.

    Args:
        signature: ``Operator.signature``, or of another variant than its calls, ``core.variants.variant_signature``.
        width: as in ``Schedule``: CPU threads, 1 on CUDA.
        kind: main call, for example ``aten::convolution``.
        flops: floating point operations, a multiply-add counted as two.
        bytes_read, bytes_written: bytes of its tensors.
        elements: elements of what it writes.
        solo_us: time alone, microseconds; finite and above zero.
        calls: calls fused into it.
        launch: CUDA launch facts, or None.
    """

    signature: str
    width: int
    kind: str
    flops: int
    bytes_read: int
    bytes_written: int
    elements: int
    solo_us: float
    calls: int = 1
    launch: LaunchFacts | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a prediction depends on besides the kernels.

    Args:
        name: for people and for splits by device.
        kind: ``cpu`` or ``cuda``; anything else is answered by roofline alone: what its units are is not known.
        units: CPU: cores that threads may run on. CUDA: multiprocessors.
        peak_gflops: highest rate of arithmetic, 1e9 operations a second; 0 if unknown.
        bandwidth_gb_s: highest rate of memory, 1e9 bytes a second; 0 if unknown.
        cache_bytes: last-level cache; 0 if unknown.
        threads_per_unit: threads a unit holds at once: 1 on a CPU core, 2048 on most multiprocessors.
    """

    name: str
    kind: str
    units: int
    peak_gflops: float = 0.0
    bandwidth_gb_s: float = 0.0
    cache_bytes: int = 0
    threads_per_unit: int = 1


_UNITS = ("cores", "physical_cores", "sm_count", "multiprocessors", "units", "threads", "logical_cores")
_CACHE = ("cache_bytes", "l3_bytes", "cache_l3", "l2_bytes", "cache_l2")
_SIZES = {"K": 1024.0, "M": 1024.0**2, "G": 1024.0**3}


def device_facts(key: DeviceKey) -> DeviceFacts:
    """Read the facts that a device's key states; what it does not state stays unknown (0), except at least one unit."""
    details = dict(key.details)
    units = _first_int(details, _UNITS)
    threads = _first_int(details, ("threads_per_sm", "max_threads_per_sm")) or (2048 if key.kind == "cuda" else 1)
    return DeviceFacts(
        name=key.name,
        kind=key.kind,
        units=max(1, units),
        peak_gflops=_first_float(details, ("peak_gflops",)),
        bandwidth_gb_s=_first_float(details, ("bandwidth_gb_s", "memory_bandwidth_gb_s")),
        cache_bytes=_first_int(details, _CACHE),
        threads_per_unit=threads,
    )


DISTURBED = 0.10
"""A CPU measurement that lost more than this share of the cores it needed says nothing about the operators.

*Source:* our own pair runs on two cores: with one of them taken the two lanes simply took turns, and the lane started last looked
stopped (slowdown at its cap, makespan ratio 0.97); undisturbed, the same kind of pair had ratio 0.6.
"""


def stolen_share(contamination: Contamination, device: DeviceFacts, threads: int) -> float:
    """Share (0 to 1) of the cores a measurement with ``threads`` threads needed that other processes had; 0 if unknown, 0 on CUDA."""
    if device.kind == "cuda" or contamination.foreign_load <= 0:
        return 0.0
    needed = min(device.units, max(1, threads))
    left = device.units * (1.0 - min(1.0, contamination.foreign_load))
    return max(0.0, 1.0 - left / needed)


def kernel_facts(operator: Operator, graph: OpGraph, width: int, solo_us: float, launch: LaunchFacts | None = None) -> KernelFacts:
    """Facts of one operator of a graph at ``width``, timed alone at ``solo_us`` microseconds.

    A clock that cannot resolve an operator reads 0; a nanosecond keeps rates finite.
    """
    return KernelFacts(
        signature=operator.signature,
        width=width,
        kind=operator.kind,
        flops=operator.flops,
        bytes_read=operator.bytes_read,
        bytes_written=operator.bytes_written,
        elements=sum(graph.values[value].spec.elements for value in operator.writes),
        solo_us=max(solo_us, 1e-3),
        calls=len(operator.calls),
        launch=launch,
    )


def with_observed_peaks(device: DeviceFacts, kernels: Iterable[KernelFacts]) -> DeviceFacts:
    """Fill unknown peaks with the highest rates that the kernels themselves reached, or the least a device of its kind has.

    A lower bound of the true peak: the widest kernels come near it, and a fraction of it is all that the features need. It is one peak for
    all dtypes, the fastest one's: where kernels of several are mixed, the others' fractions are too small. The analytic prior asks for them
    on a GPU, where kernels that fit beside each other have multiprocessors, and with them arithmetic, of their own, and on a device of
    which it knows nothing else.
    """
    rows = [row for row in kernels if row.solo_us > 0]
    least = _LEAST_GPU if device.kind == "cuda" else tuple(rate * device.units for rate in _LEAST_CORE)
    gflops = _robust_peak([row.flops / row.solo_us * 1e-3 for row in rows])
    bandwidth = _robust_peak([(row.bytes_read + row.bytes_written) / row.solo_us * 1e-3 for row in rows])
    return replace(
        device,
        peak_gflops=device.peak_gflops if device.peak_gflops > 0 else max(gflops, least[0]),
        bandwidth_gb_s=device.bandwidth_gb_s if device.bandwidth_gb_s > 0 else max(bandwidth, least[1]),
    )


# (1e9 operations a second, 1e9 bytes a second) that any core, or GPU, in use today reaches: below them, kernels that all run far
# from a limit would set the limit. Orders of magnitude, not measurements.
_LEAST_CORE = (8.0, 8.0)
_LEAST_GPU = (1000.0, 100.0)


def _robust_peak(rates: list[float]) -> float:
    if not rates:
        return 0.0
    # One mistimed kernel must not set the scale.
    return statistics.median(sorted(rates)[-5:])


def _first_int(details: dict[str, str], names: Sequence[str]) -> int:
    return int(_first_float(details, names))


def _first_float(details: dict[str, str], names: Sequence[str]) -> float:
    for name in names:
        if name in details:
            text = details[name].strip()
            scale = _SIZES.get(text[-1:], 1.0)
            try:
                return float(text.rstrip("KMG")) * scale
            except ValueError:
                continue
    return 0.0
