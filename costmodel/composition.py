"""From pairs to three and more at once: room goes to who started first, and slowdowns add their excess over 1 for those that have room.

A device has room for so much at a time: a CPU its cores, a GPU its slots for thread blocks. Two operators that fit beside each other show
nothing of that, so of three or more it must be told. In order of start each takes what the earlier ones leave. With ``t`` the
part of its room that an operator gets, over the part that it would get beside the one earlier operator that leaves least (see
:func:`shares`), ``a`` takes ``(1 + sum over b of t(b) * (slowdown of a beside b - 1)) / t(a)`` times as long: who waits for room makes
no progress and disturbs nobody. Of two operators both parts are 1, and the pair's own slowdowns are what is left.

*Source:* room in order of start is the leftover policy of block schedulers, Amert et al., "GPU Scheduling on the NVIDIA TX2", RTSS 2017,
section III, and on a CPU a queue without preemption, since operators are shorter than a time slice. The sum is exact for processor
sharing: ``k`` equal kernels that each fill a resource then take ``k`` times as long, where a product of pair slowdowns would say
``2 ** (k - 1)`` and a maximum 2. Weighing it by room is this project's; ``experiments/costmodel/rules.py`` compares the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autosched.costmodel.features import kernel_columns
from autosched.costmodel.model import Floats, Indices
from autosched.datasets.facts import DeviceFacts, KernelFacts

LEAST_SHARE = 1e-3
"""What an operator without room still gets of it: so little that the others are done long before, and no time is infinite."""

ROOM_DUST = 1e-9
"""Rounding errors of free room that are overlooked."""


def shares(room: Sequence[float]) -> list[float]:
    """The part of its room that each operator gets beside all others, over the least that it gets beside one of them alone.

    Args:
        room: share (0 to 1) of the device that each of ``k`` operators takes, in order of start; 0 if that is not known.

    Returns:
        ``k`` values above 0 and at most 1; all 1 for two operators, or where all fit.

    >>> shares([0.5, 0.5, 0.5])
    [1.0, 1.0, 0.001]
    >>> shares([0.4, 0.4, 0.4])[2]
    0.4999999999999999
    """
    used = widest = 0.0
    found = []
    for own in room:
        part = _part(own, max(0.0, 1.0 - used))
        found.append(min(1.0, part / _part(own, max(0.0, 1.0 - widest))))
        used += own * part
        widest = max(widest, own)
    return found


def room_of(kernels: Sequence[KernelFacts], devices: Sequence[DeviceFacts], kernel_device: Indices) -> Floats:
    """Share (0 to 1) of its device's cores or block slots that each kernel takes, for :func:`shares`: float64 ``[n_kernels]``.

    0 for a CUDA kernel whose grid is not known, and on any device but a CPU or a CUDA device, so that nothing is concluded from a guess.
    ``kernel_device`` is as in ``PairQuery``.

    Raises:
        UsageError: as ``features.kernel_columns``.
    """
    known = [
        devices[place].kind == "cpu" or (devices[place].kind == "cuda" and kernel.launch is not None and kernel.launch.blocks > 0)
        for kernel, place in zip(kernels, kernel_device.tolist(), strict=True)
    ]
    return np.where(known, kernel_columns(kernels, devices, kernel_device).units, 0.0)


def finish_times(solo_us: Sequence[float], first: Floats, last: Floats, *, room: Sequence[float] | Floats | None = None) -> Floats:
    """When each of ``k`` operators is done that all start at once, in the order given: float64 ``[k]``, microseconds.

    The search's simulator computes the same (``search/fluid.py``).

    Args:
        solo_us: times alone.
        first: float64 ``[k, k]``; ``[i, j]`` is i's slowdown beside j when i started first (used for ``i < j``).
        last: float64 ``[k, k]``; ``[i, j]`` is i's slowdown beside j when i started last (used for ``i > j``).
        room: ``[k]``, as in :func:`shares`; not known by default.
    """
    count = len(solo_us)
    taken = np.zeros(count) if room is None else np.asarray(room, dtype=np.float64)
    excess = np.where(np.arange(count)[:, None] < np.arange(count)[None, :], first, last) - 1.0
    np.fill_diagonal(excess, 0.0)

    def slowdown_of(active: Indices) -> Floats:
        share = np.asarray(shares(taken[active].tolist()))
        slowdown: Floats = (1.0 + excess[np.ix_(active, active)] @ share) / share
        return slowdown

    return run_down(solo_us, slowdown_of)


def run_down(solo_us: Sequence[float] | Floats, slowdown_of: Callable[[Indices], Floats]) -> Floats:
    """When each of ``k`` operators is done that all start at once: float64 ``[k]``, microseconds.

    Args:
        solo_us: times alone.
        slowdown_of: from the operators that still run, in order of start, how many times as long each of them takes meanwhile.
    """
    left = np.asarray(solo_us, dtype=np.float64).copy()
    finish = np.zeros(len(left))
    active: Indices = np.arange(len(left))
    now = 0.0
    while len(active):
        slowdown = slowdown_of(active)
        waits = left[active] * slowdown
        step = float(waits.min())
        now += step
        left[active] -= step / slowdown
        ended = waits <= step * (1.0 + 1e-12)
        finish[active[ended]] = now
        active = active[~ended]
    return finish


def _part(own: float, free: float) -> float:
    """How much of ``own`` room fits into what is free."""
    return 1.0 if own <= free + ROOM_DUST else max(LEAST_SHARE, free / own)
