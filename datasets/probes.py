"""Probe runs: each kernel beside a few stressors, in both start orders; enough to fit its demands, linear in the number of kernels.

Stressors are kernels of the same model that ask most of one resource, so that nothing foreign has to be built or warmed up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autosched.core.graph import OpGraph
from autosched.datasets.choices import PairChoice, contending
from autosched.datasets.facts import KernelFacts

PROBES = 6
"""Runs for each kernel: three stressors in two start orders."""

_DEMANDS: tuple[Callable[[KernelFacts], float], ...] = (
    lambda kernel: kernel.flops / kernel.solo_us,
    lambda kernel: (kernel.bytes_read + kernel.bytes_written) / kernel.solo_us,
    lambda kernel: kernel.launch.blocks if kernel.launch is not None else kernel.solo_us,
)
"""Rate of arithmetic, rate of memory, and room: blocks of the grid, or time where there is no grid."""


def probe_choices(graph: OpGraph, times: dict[tuple[str, int], KernelFacts], widths: Sequence[int]) -> list[PairChoice]:
    """At most ``PROBES`` ordered pairs for each kernel: beside the greediest kernel for each resource that may run with it.

    Args:
        times: facts of every timed kernel, by signature and width.
        widths: widths to probe; stressors run at width 1.

    Returns:
        Each ordered pair of kernels once; in the order of the graph. Kernels that may run beside nothing have none.
    """
    free = contending(graph)
    facts = [times.get((operator.signature, 1)) for operator in graph.operators]
    demands = np.asarray([[demand(kernel) if kernel else -1.0 for demand in _DEMANDS] for kernel in facts]).reshape(
        len(facts), len(_DEMANDS)
    )
    found: dict[tuple[str, int, str, int], PairChoice] = {}
    seen: set[tuple[str, int]] = set()
    for operator in graph.operators:
        partners = [index for index in np.flatnonzero(free[operator.index]).tolist() if facts[index] is not None]
        if not partners:
            continue
        greediest = dict.fromkeys(partners[int(np.argmax(demands[partners, column]))] for column in range(len(_DEMANDS)))
        for width in widths:
            if (operator.signature, width) not in times or (operator.signature, width) in seen:
                continue
            seen.add((operator.signature, width))
            for stressor in list(greediest)[: PROBES // 2]:
                for choice in (PairChoice(operator.index, stressor, width, 1), PairChoice(stressor, operator.index, 1, width)):
                    first, last = graph.operators[choice.first].signature, graph.operators[choice.last].signature
                    found.setdefault((first, choice.first_width, last, choice.last_width), choice)
    return list(found.values())
