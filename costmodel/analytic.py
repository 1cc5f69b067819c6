"""The prior that needs no data: how two kernels share a device, from first principles.

CPU lanes take cores in order of start, then share memory bandwidth; a CUDA device shares the slots for resident blocks, which the
kernel that started first takes first, then arithmetic and memory peaks; of any other kind of device only these two are known. What
none of it explains is a small constant.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autosched.core.records import MAX_SLOWDOWN
from autosched.costmodel.features import KernelColumns, kernel_columns
from autosched.costmodel.model import Floats, Indices, PairLabels, PairQuery, Prediction, point_prediction

CPU_BACKGROUND = 1.03
"""Two one-thread operators on separate cores still share clocks and last-level cache.

*Source:* our own pair runs on a 2-core server CPU: median slowdown 1.00, 95 % 1.21; the mean lies near 1.03.
"""

TIME_SLICE_US = 3000.0
"""How long a running thread keeps its core when others wait. *Source:* the Linux fair scheduler's default slice of about 3 ms."""

CUDA_BACKGROUND = 1.08
"""Two kernels on different branches of a CUDA graph slow each other down so much even where neither lacks anything known here.

*Source:* 1,083 pair runs of an H200 (``datasets/data/h200``): medians of 1.05 to 1.15 in four models, nearly none of which saturation or
slots explain; with 1.08 beside each other kernel, whole schedules on eight and nine lanes are predicted within 2 %.
"""

_IN_FEATURES = 1.01
"""What stands for it in what learned models read: an assumption from before there were runs, which models that are kept rest upon."""


class AnalyticModel:
    """Processor sharing, bandwidth saturation, and leftover block slots; saturation alone on what is neither a CPU nor a CUDA device.

    ``fit`` changes nothing.
    """

    name = "analytic"

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        """Nothing to learn."""

    def predict(self, query: PairQuery) -> Prediction:
        """Predict from the kernels' facts alone."""
        columns = kernel_columns(query.kernels, query.devices, query.kernel_device)
        first, last = analytic_slowdowns(query, columns)
        least = np.where(_devices(query)[0] == "cuda", CUDA_BACKGROUND, 1.0)
        return point_prediction(query, np.maximum(first, least), np.maximum(last, least))

    def save(self, directory: Path) -> None:
        """Nothing to write: its constants are code."""

    @classmethod
    def load(cls, directory: Path) -> AnalyticModel:
        """Always possible."""
        return cls()


def analytic_slowdowns(query: PairQuery, columns: KernelColumns) -> tuple[Floats, Floats]:
    """Slowdowns of first and last of every pair, as features: float64 ``[n_pairs]`` each, at least 1."""
    first, last = np.ones(len(query)), np.ones(len(query))
    if not len(query):
        return first, last
    kinds, units = _devices(query)
    is_cpu, is_cuda = kinds == "cpu", kinds == "cuda"
    for mask, rule in ((is_cpu, _cpu), (is_cuda, _cuda), (~is_cpu & ~is_cuda, _roofline)):
        if mask.any():
            first[mask], last[mask] = rule(columns, query.first[mask], query.last[mask], units[mask])
    return np.clip(first, 1.0, MAX_SLOWDOWN), np.clip(last, 1.0, MAX_SLOWDOWN)


def _cpu(columns: KernelColumns, first: Indices, last: Indices, cores: Floats) -> tuple[Floats, Floats]:
    """Cores in order of start or by processor sharing, memory by saturation.

    A kernel that lacks a core waits while the first is short (:func:`core_waiting`); beside a long one, threads beyond the cores present
    are served in turn, all at the rate ``cores / threads``. A kernel's threads spin at its barriers, so a wide kernel demands its full
    width whatever its efficiency. Memory is short only for what does not stay in the cache: kernels that fit into it together are
    read from there when they are run again. *Source:* processor sharing, Kleinrock, Queueing Systems II, chapter 4; saturation as in
    the roofline model (Williams, Waterman, Patterson, CACM 2009); the cache: our own pair runs, in which small linear operators
    that each reach the highest rate of all do not slow each other down.
    """
    sharing = core_sharing(columns, first, last, cores)
    waiting = core_waiting(columns, first, last, cores)
    # Slowed-down kernels also ask less of memory.
    demand = (columns.bandwidth[first] + columns.bandwidth[last]) / sharing
    footprint = columns.cache[first] + columns.cache[last]
    stays = (footprint > 0.0) & (footprint <= 1.0)
    saturation = np.where(stays, 0.0, np.maximum(1.0, demand) - 1.0)
    answers = []
    for own, held in ((first, np.where(waiting > 1.0, 1.0, sharing)), (last, np.maximum(sharing, waiting))):
        # A kernel on w of n cores that reaches w/n of the peak is bound by memory; one that reaches less is so in proportion.
        bound = np.minimum(1.0, columns.bandwidth[own] * cores / columns.width[own])
        answers.append(held * CPU_BACKGROUND * (1.0 + bound * saturation))
    return answers[0], answers[1]


def _cuda(columns: KernelColumns, first: Indices, last: Indices, units: Floats) -> tuple[Floats, Floats]:
    """Block slots by the leftover policy, then arithmetic and memory by saturation.

    The kernel started first fills the slots; the last gets what its last wave leaves. *Source:* the block scheduler's rules as
    observed by Amert et al., GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed, RTSS 2017.
    """
    return _saturated(columns, first, last, slot_rate(columns, first, last))


def _roofline(columns: KernelColumns, first: Indices, last: Indices, units: Floats) -> tuple[Floats, Floats]:
    """Any other kind of device: arithmetic and memory by saturation. What else it has too little of is its own; its lanes fit beside each
    other, or it would not offer them."""
    return _saturated(columns, first, last, np.ones(len(first)))


def _saturated(columns: KernelColumns, first: Indices, last: Indices, rate: Floats) -> tuple[Floats, Floats]:
    """Arithmetic and memory by saturation, where the last runs at ``rate`` (0 to 1) of its own for want of room: ``[n_pairs]``."""
    demand = np.maximum(columns.compute[first] + rate * columns.compute[last], columns.bandwidth[first] + rate * columns.bandwidth[last])
    saturation = np.maximum(1.0, demand) - 1.0
    answers = []
    for own, slots in ((first, np.ones_like(rate)), (last, 1.0 / rate)):
        bound = np.maximum(columns.compute[own], columns.bandwidth[own])
        answers.append(slots * _IN_FEATURES * (1.0 + bound * saturation))
    return answers[0], answers[1]


def core_sharing(columns: KernelColumns, first: Indices, last: Indices, cores: Floats) -> Floats:
    """CPU: threads of both over cores present, at least 1: float64 ``[n_pairs]``."""
    threads = columns.width[first] + columns.width[last]
    return np.maximum(1.0, threads / cores)


def core_waiting(columns: KernelColumns, first: Indices, last: Indices, cores: Floats) -> Floats:
    """CPU: ``MAX_SLOWDOWN`` where the last-started kernel lacks a core that a short first one holds, 1 elsewhere: ``[n_pairs]``.

    It gets the core only when the first kernel is done, since the system switches threads every few milliseconds; the threads of a wide
    one meet at a barrier, so all of them wait with the one that has none. *Source:* our own pair runs on two cores, a narrow first beside
    a wide last and the reverse: the first undisturbed, makespan ratio 0.95, where processor sharing says 0.75.
    """
    lacks = columns.width[last] > cores - columns.width[first]
    waits = lacks & (columns.solo_us[first] < TIME_SLICE_US)
    return np.where(waits, MAX_SLOWDOWN, 1.0)


def slot_rate(columns: KernelColumns, first: Indices, last: Indices) -> Floats:
    """CUDA: rate (0 to 1) of the last beside the first while both run, from block slots alone: float64 ``[n_pairs]``."""
    waves = columns.waves[first]
    tail = waves - np.floor(waves)
    # Share of the first's time in which slots are free, times how much of what the last wants fits into them.
    fits = np.minimum(1.0, (1.0 - tail) / columns.units[last])
    rate = np.where(tail > 0, fits / np.ceil(waves), 0.0)
    return np.maximum(rate, 1.0 / MAX_SLOWDOWN)


def structural(query: PairQuery, columns: KernelColumns) -> tuple[Floats, Floats]:
    """The part of the slowdowns that comes from sharing cores or block slots, without saturation: first and last, ``[n_pairs]``."""
    kinds, units = _devices(query)
    is_cpu, is_cuda = kinds == "cpu", kinds == "cuda"
    sharing = core_sharing(columns, query.first, query.last, units)
    slots = 1.0 / slot_rate(columns, query.first, query.last)
    waiting = core_waiting(columns, query.first, query.last, units)
    cpu_first, cpu_last = np.where(waiting > 1.0, 1.0, sharing), np.maximum(sharing, waiting)
    return np.where(is_cpu, cpu_first, 1.0), np.select([is_cpu, is_cuda], [cpu_last, slots], 1.0)


def _devices(query: PairQuery) -> tuple[NDArray[np.str_], Floats]:
    """Of the device of each pair: its kind, and its cores or multiprocessors; ``[n_pairs]`` each."""
    place = query.kernel_device[query.first]
    kinds = np.asarray([device.kind for device in query.devices])[place]
    return kinds, np.asarray([float(device.units) for device in query.devices])[place]
