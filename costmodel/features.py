"""Features of kernels and of ordered pairs: one named, versioned vector that every learned model reads.

The set is versioned as a whole: a model stores :data:`FEATURE_SET` and :data:`PAIR_FEATURES` and refuses any other that means
something else on its devices (:func:`readable`).
Rates are fractions of the device's peak, so that a model carries over to a device it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.custom_operators import known_kind
from autosched.core.errors import UsageError
from autosched.datasets.facts import DeviceFacts, KernelFacts

FEATURE_SET = 3
"""Raised whenever the meaning, order or number of features changes. 2: what the analytic prior says of pairs on a CPU. 3: what it says of
pairs on a device that is neither a CPU nor a CUDA device."""

_SAME_SINCE = {"cuda": 1, "cpu": 2}
"""By kind of device: the oldest set whose rows are those of today; others than these have changed with the last one."""

_KERNEL = (
    "log_solo_us",
    "log_flops",
    "log_bytes",
    "log_intensity",
    "log_elements",
    "compute_fraction",
    "bandwidth_fraction",
    "cache_fraction",
    "unit_fraction",
    "waves",
    "tail_fraction",
    "log_calls",
    "is_convolution",
    "is_matmul",
    "is_memory",
    "log_threads_per_block",
    "registers_fraction",
    "shared_fraction",
)
_PAIR = (
    "log_solo_ratio",
    "sum_units",
    "sum_compute",
    "sum_bandwidth",
    "sum_cache",
    "max_saturation",
    "same_kernel",
)
_DEVICE = ("device_is_cuda", "log_units", "log_peak_gflops", "log_bandwidth", "log_cache_bytes")

PAIR_FEATURES: tuple[str, ...] = (
    *(f"own_{name}" for name in _KERNEL),
    *(f"other_{name}" for name in _KERNEL),
    *_PAIR,
    *_DEVICE,
    "own_first",
    "analytic_log_slowdown",
)
"""Ordered names of a directional row: the kernel whose slowdown is asked (own), the one beside it (other), and who started first."""

_MATMUL = ("mm", "linear", "attention", "einsum", "lstm", "rnn", "gru")
_MEMORY = ("cat", "copy", "clone", "view", "reshape", "slice", "gather", "index", "embedding", "pool", "pad", "transpose", "permute")


@dataclass(frozen=True, slots=True)
class KernelColumns:
    """What the formulas need of every kernel, one array each, length ``n_kernels``; fractions are of the kernel's device.

    Args:
        solo_us: time alone, microseconds.
        width: CPU threads it occupies; 1 on CUDA.
        compute: achieved share (0 to 1) of the device's arithmetic peak.
        bandwidth: achieved share (0 to 1) of the device's memory peak.
        cache: bytes it moves over the device's last-level cache, at most 4; 0 if unknown.
        units: share (0 to 1) of the device that one run of it occupies while it runs.
        waves: CUDA: grid over resident capacity, may exceed 1. CPU: width over cores.
        matrix: float64 ``[n_kernels, len(kernel features)]``.
    """

    solo_us: NDArray[np.float64]
    width: NDArray[np.float64]
    compute: NDArray[np.float64]
    bandwidth: NDArray[np.float64]
    cache: NDArray[np.float64]
    units: NDArray[np.float64]
    waves: NDArray[np.float64]
    matrix: NDArray[np.float64]


def kernel_columns(kernels: Sequence[KernelFacts], devices: Sequence[DeviceFacts], kernel_device: NDArray[np.int64]) -> KernelColumns:
    """Compute every kernel's columns; ``kernel_device`` (``[n_kernels]``) says on which device each was timed.

    Raises:
        UsageError: a kernel whose solo time is not finite and above zero, naming it.
    """
    for kernel in kernels:
        if not np.isfinite(kernel.solo_us) or kernel.solo_us <= 0:
            raise UsageError(
                f"kernel {kernel.signature} at width {kernel.width} is timed at {kernel.solo_us} us; expected above 0: measure it again"
            )
    solo = _column([k.solo_us for k in kernels])
    width = _column([k.width for k in kernels])
    flops = _column([k.flops for k in kernels])
    moved = _column([k.bytes_read + k.bytes_written for k in kernels])
    elements = _column([k.elements for k in kernels])
    peak = _column([d.peak_gflops for d in devices])[kernel_device] * 1e3
    bandwidth_peak = _column([d.bandwidth_gb_s for d in devices])[kernel_device] * 1e3
    cache = _column([d.cache_bytes for d in devices])[kernel_device]
    compute = np.minimum(1.0, _share(flops / solo, peak))
    bandwidth = np.minimum(1.0, _share(moved / solo, bandwidth_peak))
    cached = np.minimum(4.0, _share(moved, cache))
    waves = _waves(kernels, devices, kernel_device)
    units = np.minimum(1.0, waves)
    launches = [k.launch for k in kernels]
    kinds = [known_kind(k.kind) for k in kernels]
    matrix = np.stack(
        [
            np.log(solo),
            np.log1p(flops),
            np.log1p(moved),
            np.log((flops + 1.0) / (moved + 1.0)),
            np.log1p(elements),
            compute,
            bandwidth,
            cached,
            units,
            np.log1p(waves),
            np.where(waves >= 1.0, np.ceil(waves) - waves, 0.0),
            np.log1p(_column([k.calls for k in kernels])),
            _column(["conv" in kind for kind in kinds]),
            _column([any(word in kind for word in _MATMUL) for kind in kinds]),
            _column([any(word in kind for word in _MEMORY) for kind in kinds]),
            np.log1p(_column([launch.threads_per_block if launch else 0 for launch in launches])),
            # 65,536 registers and about 228 KiB of shared memory are what one multiprocessor has since compute capability 3.0 and 9.0.
            _column([launch.registers_per_thread * launch.threads_per_block / 65536 if launch else 0.0 for launch in launches]),
            _column([launch.shared_bytes / (228 * 1024) if launch else 0.0 for launch in launches]),
        ],
        axis=1,
    )
    return KernelColumns(solo, width, compute, bandwidth, cached, units, waves, matrix)


def readable(feature_set: int, kinds: Iterable[str]) -> bool:
    """Whether a model of ``feature_set`` that was trained on devices of these kinds still gets the rows it was trained on."""
    return feature_set == FEATURE_SET or all(_SAME_SINCE.get(kind, FEATURE_SET) <= feature_set < FEATURE_SET for kind in kinds)


def pair_rows(
    columns: KernelColumns,
    devices: Sequence[DeviceFacts],
    kernel_device: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    analytic_first: NDArray[np.float64],
    analytic_last: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Two directional rows for each ordered pair: all rows of the first-started kernels, then all of the last-started.

    Args:
        first, last: kernel indices, ``[n_pairs]``.
        analytic_first, analytic_last: slowdowns the analytic prior predicts, ``[n_pairs]``.

    Returns:
        float32 ``[2 * n_pairs, len(PAIR_FEATURES)]``.
    """
    count = len(first)
    rows = np.empty((2 * count, len(PAIR_FEATURES)), dtype=np.float32)
    block = columns.matrix.shape[1]
    matrix = columns.matrix.astype(np.float32)
    for start, own, other in ((0, first, last), (count, last, first)):
        part = rows[start : start + count]
        part[:, :block] = matrix[own]
        part[:, block : 2 * block] = matrix[other]
        part[:, 2 * block] = (np.log(columns.solo_us[own]) - np.log(columns.solo_us[other])).astype(np.float32)
    shared = 2 * block + 1
    units = np.minimum(4.0, columns.waves[first] + columns.waves[last])
    compute = columns.compute[first] + columns.compute[last]
    bandwidth = columns.bandwidth[first] + columns.bandwidth[last]
    cache = columns.cache[first] + columns.cache[last]
    symmetric = [units, compute, bandwidth, cache, np.maximum(compute, bandwidth), first == last]
    device = kernel_device[first]
    facts = [
        [
            float(item.kind == "cuda"),
            np.log(item.units),
            np.log1p(item.peak_gflops),
            np.log1p(item.bandwidth_gb_s),
            np.log1p(item.cache_bytes),
        ]
        for item in devices
    ]
    device_matrix = np.asarray(facts, dtype=np.float32).reshape(len(devices), len(_DEVICE))
    for start, is_first, analytic in ((0, 1.0, analytic_first), (count, 0.0, analytic_last)):
        part = rows[start : start + count]
        for offset, values in enumerate(symmetric):
            part[:, shared + offset] = values
        part[:, shared + len(symmetric) : -2] = device_matrix[device]
        part[:, -2] = is_first
        part[:, -1] = np.log(analytic)
    return rows


def _waves(kernels: Sequence[KernelFacts], devices: Sequence[DeviceFacts], kernel_device: NDArray[np.int64]) -> NDArray[np.float64]:
    values = np.empty(len(kernels))
    for row, (kernel, place) in enumerate(zip(kernels, kernel_device, strict=True)):
        device = devices[place]
        if device.kind != "cuda":
            values[row] = kernel.width / device.units
        elif kernel.launch is not None and kernel.launch.blocks > 0:
            per_unit = kernel.launch.blocks_per_sm or max(1, device.threads_per_unit // max(1, kernel.launch.threads_per_block))
            values[row] = kernel.launch.blocks / (per_unit * device.units)
        else:
            # The grid is unknown: one thread for each element written is what pointwise kernels launch; most others launch fewer.
            values[row] = kernel.elements / (device.units * device.threads_per_unit)
    return np.maximum(values, 1e-4)


def _column(values: Sequence[float | int | bool]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64).reshape(len(values))


def _share(amount: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(amount, whole, out=np.zeros_like(amount), where=whole > 0)
