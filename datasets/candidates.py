"""What could be measured of a graph, and an order in which early ones differ most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autosched.core.graph import OpGraph
from autosched.datasets.choices import GroupChoice, PairChoice, contending
from autosched.datasets.facts import KernelFacts
from autosched.datasets.schema import content_key

CANDIDATES = 20_000
"""Pairs that the diverse choice looks at; more are thinned at random first."""


def pair_candidates(graph: OpGraph, times: dict[tuple[str, int], KernelFacts], widths: Sequence[int]) -> list[PairChoice]:
    """Every ordered pair of distinct kernels that the graph allows at the same time, once, in a fixed order."""
    free = contending(graph)
    found: dict[str, PairChoice] = {}
    for a, b in np.argwhere(free).tolist():
        first, last = graph.operators[a].signature, graph.operators[b].signature
        for first_width in widths:
            for last_width in widths:
                if first_width > 1 and last_width > 1:
                    continue  # schedules keep wide operators on one lane, so two never meet
                key = content_key(first, first_width, last, last_width)
                if key not in found and (first, first_width) in times and (last, last_width) in times:
                    found[key] = PairChoice(a, b, first_width, last_width)
    return list(found.values())


def group_candidates(graph: OpGraph, times: dict[tuple[str, int], KernelFacts], count: int, rng: np.random.Generator) -> list[GroupChoice]:
    """Random sets of three and four operators that may all run at once, alternating; fewer where the graph has no more."""
    free = contending(graph)
    timed = [operator.index for operator in graph.operators if (operator.signature, 1) in times]
    found: dict[tuple[int, ...], GroupChoice] = {}
    for attempt in range(20 * count):
        if len(found) >= count:
            break
        size = 3 + attempt % 2
        members: list[int] = []
        allowed = np.zeros(len(graph), dtype=np.bool_)
        allowed[timed] = True
        while len(members) < size and allowed.any():
            pick = int(rng.choice(np.flatnonzero(allowed)))
            members.append(pick)
            allowed &= free[pick]
        if len(members) == size:
            found.setdefault(tuple(members), GroupChoice(tuple(members), (1,) * size))
    return list(found.values())


def diverse_order(points: NDArray[np.float64], count: int, rng: np.random.Generator) -> list[int]:
    """Indices of at most ``count`` rows, each as far as possible from those before it.

    Args:
        points: float64 ``[n, d]``; columns are scaled to equal spread.

    *Source:* farthest-point sampling, Gonzalez, Clustering to minimize the maximum intercluster distance, 1985.
    """
    if not len(points) or count <= 0:
        return []
    candidates = np.arange(len(points))
    if len(points) > CANDIDATES:
        candidates = np.sort(rng.choice(len(points), CANDIDATES, replace=False))
    scaled = points[candidates]
    scaled = (scaled - scaled.mean(axis=0)) / np.maximum(scaled.std(axis=0), 1e-9)
    nearest = np.full(len(scaled), np.inf)
    pick = int(rng.integers(len(scaled)))
    order: list[int] = []
    for _ in range(min(count, len(scaled))):
        order.append(int(candidates[pick]))
        nearest = np.minimum(nearest, ((scaled - scaled[pick]) ** 2).sum(axis=1))
        nearest[pick] = -1.0
        pick = int(np.argmax(nearest))
    return order


def descriptor(kernel: KernelFacts) -> tuple[float, ...]:
    """Where a kernel lies for the diverse choice: logs of time, intensity, rates, grid and width."""
    moved = kernel.bytes_read + kernel.bytes_written
    blocks = kernel.launch.blocks if kernel.launch is not None else 0
    values = (
        kernel.solo_us,
        (kernel.flops + 1.0) / (moved + 1.0),
        (kernel.flops + 1.0) / kernel.solo_us,
        (moved + 1.0) / kernel.solo_us,
        1.0 + blocks,
        kernel.width,
    )
    return tuple(float(np.log(value)) for value in values)
