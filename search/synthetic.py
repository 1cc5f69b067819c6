"""Seeded problems that come from no model: for tests, and for experiments that need many graphs.

Figures computed on these are simulated and must be labelled so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autosched.core.costs import CostTable
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.search.block_pairs import pair_costs
from autosched.search.leftover import BlockKernels
from autosched.search.problem import Floats, Ints, Problem


def make_graph(predecessors: Sequence[Sequence[int]], kernels: Sequence[int] | None = None) -> OpGraph:
    """An operator graph with these data edges; operators of equal ``kernels`` number get equal signatures.

    Args:
        predecessors: for each operator the operators it reads from, all numbered below it.
        kernels: kernel number of each operator; default all different.
    """
    spec = TensorSpec((256,), "float32", (1,))
    values = [Value(0, spec, ValueRole.INPUT, 0)]
    values += [Value(index + 1, spec, ValueRole.INTERMEDIATE, index + 1) for index in range(len(predecessors))]
    numbers = list(kernels) if kernels is not None else list(range(len(predecessors)))
    read_by_somebody = {item for before in predecessors for item in before}
    operators: list[Operator] = []
    for index, before in enumerate(predecessors):
        reads = tuple(item + 1 for item in sorted(set(before))) or (0,)
        call = Call(f"synthetic::kernel{numbers[index]}", tuple(Ref(item) for item in reads), (), (index + 1,))
        operators.append(
            Operator(
                index, f"op{index}", (call,), reads, (index + 1,), (), 1024 * (1 + numbers[index] % 40), 1024 * len(reads), 1024,
                f"k{numbers[index]}", "",
            )
        )  # fmt: skip
    outputs = tuple(index + 1 for index in range(len(predecessors)) if index not in read_by_somebody)
    return OpGraph(tuple(operators), tuple(values), (0,), outputs)


def layered(rng: np.random.Generator, count: int, *, width: int = 6, edge_share: float = 0.35) -> list[list[int]]:
    """Predecessors of a random layered graph: layers of 1 to ``width`` operators, edges to the layer before, some further back."""
    predecessors: list[list[int]] = []
    layers: list[list[int]] = []
    while len(predecessors) < count:
        size = min(int(rng.integers(1, width + 1)), count - len(predecessors))
        layer = list(range(len(predecessors), len(predecessors) + size))
        for _ in layer:
            before: set[int] = set()
            if layers:
                before = {item for item in layers[-1] if rng.random() < edge_share}
                before.add(int(rng.choice(layers[-1])))
                if len(layers) > 1 and rng.random() < 0.2:
                    before.add(int(rng.choice(layers[int(rng.integers(0, len(layers) - 1))])))
            predecessors.append(sorted(before))
        layers.append(layer)
    return predecessors


def series_parallel(rng: np.random.Generator, count: int, *, branches: int = 4) -> list[list[int]]:
    """Predecessors of an Inception-like graph: blocks of parallel chains between a fork and a join."""
    predecessors: list[list[int]] = [[]]
    while len(predecessors) < count:
        fork = len(predecessors) - 1
        ends: list[int] = []
        for _ in range(int(rng.integers(2, branches + 1))):
            last = fork
            for _ in range(int(rng.integers(1, 4))):
                if len(predecessors) >= count - 1:
                    break
                predecessors.append([last])
                last = len(predecessors) - 1
            if last != fork:
                ends.append(last)
        if len(predecessors) < count:
            predecessors.append(sorted(set(ends)) or [fork])
    return predecessors


def wide(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Predecessors of a recommender-like graph: many short independent chains that meet in one operator."""
    predecessors: list[list[int]] = []
    ends: list[int] = []
    while len(predecessors) < count - 1:
        length = min(int(rng.integers(1, 4)), count - 1 - len(predecessors))
        for step in range(length):
            predecessors.append([len(predecessors) - 1] if step else [])
        ends.append(len(predecessors) - 1)
    predecessors.append(ends)
    return predecessors


def random_order(problem: Problem, rng: np.random.Generator) -> Ints:
    """A topological order that draws each next operator from all that are ready: int32 ``[n]``."""
    waiting = (problem.pred_ptr[1:] - problem.pred_ptr[:-1]).tolist()
    ready = [index for index, left in enumerate(waiting) if left == 0]
    order: list[int] = []
    draws = rng.random(problem.count)
    while ready:
        place = int(draws[len(order)] * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        index = ready.pop()
        order.append(index)
        for after in problem.successors(index):
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    return np.array(order, dtype=np.int32)


def cells(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Predecessors of a NASNet-like graph: cells of five sums of two branches, each cell reading the two cells before it."""
    predecessors: list[list[int]] = [[]]
    outputs = [0, 0]
    while len(predecessors) < count:
        sums: list[int] = []
        for _ in range(5):
            ends: list[int] = []
            for source in (outputs[-1], outputs[-2]) if rng.random() < 0.7 else (outputs[-1], outputs[-1]):
                last = source
                for _ in range(int(rng.integers(1, 7))):
                    if len(predecessors) < count - 1:
                        predecessors.append([last])
                        last = len(predecessors) - 1
                ends.append(last)
            if len(predecessors) < count - 1:
                predecessors.append(sorted(set(ends)))
                sums.append(len(predecessors) - 1)
        if len(predecessors) < count:
            predecessors.append(sorted(set(sums)) or [outputs[-1]])
        outputs = [outputs[-1], len(predecessors) - 1]
    return predecessors


def random_costs(
    rng: np.random.Generator,
    count: int,
    *,
    kernels: int | None = None,
    widths: tuple[int, ...] = (1,),
    max_lanes: int = 4,
) -> CostTable:
    """A cost table with directional slowdowns: the operator that starts last suffers most.

    Args:
        rng: the only source of chance.
        count: operators.
        kernels: different operators (default: a third of ``count``).
        widths: a width ``w`` takes ``w ** -0.7`` of the narrow time and contends with everything, as threads on shared cores do.
        max_lanes: as in ``CostTable``.
    """
    distinct = kernels if kernels is not None else max(1, count // 3)
    base = rng.lognormal(mean=2.3, sigma=0.7, size=distinct)
    intensity = rng.random(distinct)
    solo: Floats = np.concatenate([base * width**-0.7 for width in widths])
    load: Floats = np.concatenate([np.minimum(1.0, intensity * (1.0 + 0.5 * place)) for place in range(len(widths))])
    threads = np.repeat(np.array(widths, dtype=np.float64), distinct)
    pressure = load[:, None] * load[None, :] * rng.uniform(0.5, 1.5, size=(len(solo), len(solo)))
    last = 1.0 + 2.4 * pressure
    first = 1.0 + 0.3 * pressure
    crowded = threads[:, None] + threads[None, :] > max(*widths, 2) + 0.5
    last = np.where(crowded, np.maximum(last, 1.9), last)
    first = np.where(crowded, np.maximum(first, 1.9), first)
    chosen = rng.integers(0, distinct, size=count)
    kernel = np.stack([chosen + place * distinct for place in range(len(widths))], axis=1).astype(np.int32)
    return CostTable(widths, kernel, solo, first, last, 0.5, 1.0, 5.0, max_lanes)


SHAPES: dict[str, Callable[[np.random.Generator, int], list[list[int]]]] = {
    "layered": layered,
    "series_parallel": series_parallel,
    "wide": wide,
    "cells": cells,
}


def random_problem(seed: int, count: int, *, shape: str = "layered", max_lanes: int = 4, widths: tuple[int, ...] = (1,)) -> Problem:
    """A seeded problem of the named shape (``layered``, ``series_parallel``, ``wide`` or ``cells``)."""
    rng = np.random.default_rng(seed)
    predecessors = SHAPES[shape](rng, count)
    return Problem.from_arrays(predecessors, random_costs(rng, count, widths=widths, max_lanes=max_lanes))


def random_block_kernels(rng: np.random.Generator, count: int) -> BlockKernels:
    """Kernels of a made-up GPU: from a tenth of the device to three waves, compute- and memory-hungry ones."""
    capacity = rng.choice(np.array([132, 264, 528, 1056]), size=count).astype(np.int32)
    filled = rng.lognormal(mean=-0.9, sigma=1.0, size=count).clip(0.05, 3.0)
    memory_bound = rng.random(count) < 0.5
    hungry = rng.uniform(0.6, 1.8, size=count) / capacity
    modest = rng.uniform(0.1, 0.6, size=count) / capacity
    feels = rng.uniform(0.5, 1.0, size=count)
    return BlockKernels(
        blocks=np.maximum(1, filled * capacity).astype(np.int32),
        capacity=capacity,
        block_us=rng.lognormal(mean=1.6, sigma=0.5, size=count),
        compute=np.where(memory_bound, modest, hungry),
        bandwidth=np.where(memory_bound, hungry, modest),
        stall_compute=np.where(memory_bound, 0.3, feels),
        stall_bandwidth=np.where(memory_bound, feels, 0.3),
    )


def random_block_problem(seed: int, count: int, *, shape: str = "layered", max_lanes: int = 4) -> tuple[Problem, BlockKernels]:
    """A seeded problem whose costs are perfect pair measurements of a made-up GPU, and that GPU's truth."""
    rng = np.random.default_rng(seed)
    kernels = random_block_kernels(rng, max(1, count // 3))
    predecessors = SHAPES[shape](rng, count)
    chosen = rng.integers(0, len(kernels.blocks), size=(count, 1)).astype(np.int32)
    return Problem.from_arrays(predecessors, pair_costs(kernels, chosen, max_lanes=max_lanes)), kernels
