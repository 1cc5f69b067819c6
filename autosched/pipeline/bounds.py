"""How fast any schedule of the measured operators could be at best: two bounds that a reader can hold a result against.

*Source:* R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17 (1969): no schedule is shorter
than its longest path, nor than its work divided by what can do work at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.graph import OpGraph
from autosched.costmodel.table import OTHER
from autosched.datasets.facts import DeviceFacts, LaunchFacts
from autosched.search.bounds import critical_path_bound_us
from autosched.search.problem import Problem


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Microseconds. Both rest on the operators' measured times alone, and on no operator being faster beside another than alone.

    Args:
        critical_path_us: the longest path through the graph, every operator at its fastest width.
        work_us: all operators' shares of the device times their time alone; ``None`` where the shares are not known.
    """

    critical_path_us: float
    work_us: float | None


def lower_bounds(problem: Problem, device: DeviceFacts, launches: Mapping[str, LaunchFacts]) -> LowerBounds:
    """Bounds for one graph on one device.

    On a CPU an operator of width ``w`` takes ``w`` of the cores. On a GPU it takes the share of the multiprocessors' resident blocks that
    its longest kernel fills, at most all of them: an estimate, since two kernels may want different parts of a multiprocessor. Where the
    search may choose another variant, the one that takes less counts.

    Args:
        problem: with the operators' measured times.
        device: its ``units`` are what can work at once.
        launches: by operator signature, those of the other variant with ``costmodel.table.OTHER`` behind it; empty where the device
            cannot tell.
    """
    return LowerBounds(critical_path_bound_us(problem), _work_us(problem, device, launches))


def bound_of_times(graph: OpGraph, solo_us: NDArray[np.float64], widths: Sequence[int], device: DeviceFacts) -> float | None:
    """The higher of the two bounds, from times alone and nothing else.

    Args:
        graph: the operators.
        solo_us: float64 ``[n_operators, n_widths]``, times alone in microseconds; NaN where there is none.
        widths: as in ``CostTable``.
        device: its kind and ``units``.

    Returns:
        Microseconds; only the longest path where a launch's share of the device is not known (a GPU); ``None`` if an operator has no time.
    """
    if np.isnan(solo_us).all(axis=1).any():
        return None
    fastest = np.nanmin(solo_us, axis=1)
    levels = np.zeros(len(graph))
    for index in range(len(graph) - 1, -1, -1):
        levels[index] = fastest[index] + max((levels[after] for after in graph.successors[index]), default=0.0)
    longest = float(levels.max(initial=0.0))
    if device.kind == "cuda":
        return longest
    taken = solo_us * np.minimum(np.asarray(widths, dtype=np.float64), device.units)
    return max(longest, float(np.nanmin(taken, axis=1).sum()) / device.units)


def _work_us(problem: Problem, device: DeviceFacts, launches: Mapping[str, LaunchFacts]) -> float | None:
    if device.kind != "cuda":
        widths = problem.costs.widths
        least = np.min([min(width, device.units) * problem.operator_us(place) for place, width in enumerate(widths)], axis=0)
        return float(least.sum()) / device.units
    if not launches:
        return None
    names = [operator.signature for operator in problem.graph.operators]
    least = problem.operator_us(0) * [_share(launches.get(name), device) for name in names]
    kernel, other = problem.costs.kernel[:, 0], problem.costs.other_kernel
    if other is not None:
        beside = problem.solo_us[other] * [_share(launches.get(name + OTHER), device) for name in names]
        least = np.where(other == kernel, least, np.minimum(least, beside))
    return float(least.sum())


def _share(launch: LaunchFacts | None, device: DeviceFacts) -> float:
    """Share (0 to 1) of the device that a kernel fills; 0 if unknown, so that the bound stays below the truth."""
    if launch is None or launch.blocks_per_sm <= 0:
        return 0.0
    return min(1.0, launch.blocks / (launch.blocks_per_sm * device.units))
