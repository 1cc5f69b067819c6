"""What perfect measurements of pairs and groups of kernels would say of a device that the block simulation knows.

A problem made of these has a truth to compare with: the fluid simulation reads the pairs, ``leftover`` runs the blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autosched.core.costs import CostTable
from autosched.core.records import MAX_SLOWDOWN
from autosched.search.leftover import BlockEvaluator, BlockKernels
from autosched.search.problem import Ints, Problem


def pair_costs(
    kernels: BlockKernels,
    operator_kernel: Ints,
    *,
    max_lanes: int = 4,
) -> CostTable:
    """The cost table that perfect pair measurements of these kernels would give, and their launches.

    Each pair starts together, in both launch orders. With ``a`` and ``b`` ending at ``ta`` and ``tb``: the one that ends first is slowed by
    its end over its time alone; the other by that same end over the work it had done by then.

    Args:
        kernels: the device's truth.
        operator_kernel: int32 ``[n_operators, 1]``, as ``CostTable.kernel``.
        max_lanes: as in ``CostTable``.
    """
    count = len(kernels.blocks)
    quiet = np.ones((count, count))
    alone = CostTable((1,), np.arange(count, dtype=np.int32)[:, None], np.zeros(count), quiet, quiet, 0.0, 0.0, 0.0, 2)
    problem = Problem.from_arrays([[] for _ in range(count)], alone)
    solo = np.array([_run_together(problem, kernels, (row,))[0] for row in range(count)])
    first, last = np.ones((count, count)), np.ones((count, count))
    for a in range(count):
        for b in range(count):
            first[a, b], last[b, a] = _pair_slowdowns(_run_together(problem, kernels, (a, b)), float(solo[a]), float(solo[b]))
    room = np.minimum(1.0, kernels.blocks / kernels.capacity)
    return CostTable((1,), operator_kernel, solo, first, last, 0.5, 1.0, 5.0, max_lanes, room=room)


def group_ends_us(kernels: BlockKernels, rows: Sequence[int]) -> list[float]:
    """When each of some kernels is done that start together, in the order given, on as many lanes: microseconds."""
    count = len(rows)
    quiet = np.ones((1, 1))
    nothing = CostTable((1,), np.zeros((count, 1), dtype=np.int32), np.zeros(1), quiet, quiet, 0.0, 0.0, 0.0, count)
    problem = Problem.from_arrays([[] for _ in range(count)], nothing)
    return _run_together(problem, kernels, tuple(rows))


def _run_together(problem: Problem, kernels: BlockKernels, rows: tuple[int, ...]) -> list[float]:
    count = len(rows)
    small = dataclasses.replace(
        problem,
        pred_ptr=np.zeros(count + 1, dtype=np.int32),
        succ_ptr=np.zeros(count + 1, dtype=np.int32),
        kernel=np.array(rows, dtype=np.int32)[:, None],
    )
    evaluator = BlockEvaluator(small, kernels, count)
    places = np.arange(count, dtype=np.int32)
    evaluator.makespan_us(places, places, np.zeros(count, dtype=np.int32))
    return [float(end) for end in evaluator.ends_us()]


def _pair_slowdowns(ends: list[float], solo_first: float, solo_last: float) -> tuple[float, float]:
    """Slowdown of each while both run, capped to what is believable."""
    solo = (solo_first, solo_last)
    early = 0 if ends[0] <= ends[1] else 1
    late = 1 - early
    result = [1.0, 1.0]
    if solo[early] > 0.0:
        result[early] = ends[early] / solo[early]
        done = solo[late] - (ends[late] - ends[early])
        result[late] = ends[early] / done if done > ends[early] / MAX_SLOWDOWN else MAX_SLOWDOWN
    return min(result[0], MAX_SLOWDOWN), min(result[1], MAX_SLOWDOWN)
