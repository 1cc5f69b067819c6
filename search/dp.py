"""IOS: dynamic programming over stages. A stage is a set of groups that run side by side, each group in sequence on its lane.

State: the operators not yet scheduled. An *ending* is a set of them that nothing left depends on; the best latency of a state is the
least, over its endings, of the rest's latency plus the ending's latency as one stage. Endings are enumerated completely, one
operator at a time. Pruning: at most ``group_operators`` (r) in a group and ``groups`` (s) in a stage. The graph is cut at operators
that are before or after every other one, and each block is solved alone. Where a block has more states than the budget, what is left
of it is staged greedily. The budget is each block's anew: with one for all of them, this baseline would be up to 2 % slower.

The published system measures each stage on the device with a barrier behind it; here the stage's latency is the cost table's, and
the barrier is made of extra edges. The same stages without barriers are proposed second: in a graph nobody needs them.

*Source:* Ding et al., "IOS: Inter-Operator Scheduler for CNN Acceleration", MLSys 2021, sections 3 to 4 (algorithm 1, pruning).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from autosched.core.schedule import Schedule
from autosched.search.compiled import layout
from autosched.search.heuristics.wavefront import barrier
from autosched.search.problem import Problem
from autosched.search.strategy import SearchContext

BLOCK_OPERATORS = 60
"""Longer blocks are split; the published system splits at 100."""

Stage = tuple[tuple[int, ...], ...]
"""Groups of operators; a group's operators in topological order."""


@dataclass(frozen=True, slots=True)
class Ios:
    """IOS with its published pruning: r = 3 operators in a group, s = 8 groups in a stage."""

    name: str = "ios"
    is_baseline: bool = True
    group_operators: int = 3
    groups: int = 8
    transitions_per_block: int = 60_000

    def propose(self, problem: Problem, context: SearchContext) -> list[Schedule]:
        """With barriers between stages as published, then without."""
        lanes = context.lanes(problem)
        solver = _Solver(self, problem, context, min(self.groups, lanes))
        stages = [stage for block in blocks(problem) for stage in solver.solve(block)]
        order: list[int] = []
        lane = [0] * problem.count
        extra: list[tuple[int, int]] = []
        previous: list[int] = []
        for stage in stages:
            # The heaviest group on the first lane; launched in turns, so that every lane has work at once.
            heavy = sorted(stage, key=lambda group: -solver.work_us(group))
            for place, group in enumerate(heavy):
                for index in group:
                    lane[index] = place
            longest = max(len(group) for group in heavy)
            current = [group[turn] for turn in range(longest) for group in heavy if turn < len(group)]
            extra += barrier(previous, current, lane)
            order += current
            previous = current
        with_barriers = problem.schedule(order, lane, extra_edges=extra)
        return list(dict.fromkeys([with_barriers, problem.schedule(order, lane)]))


def blocks(problem: Problem) -> list[list[int]]:
    """The graph cut behind each operator that is before or after every other one; long blocks split in topological order."""
    reachable, ancestors = problem.graph.reachable, problem.graph.ancestors
    found: list[list[int]] = []
    current: list[int] = []
    for index in range(problem.count):
        current.append(index)
        cut = reachable[index].bit_count() + ancestors[index].bit_count() == problem.count - 1
        if cut or len(current) == BLOCK_OPERATORS:
            found.append(current)
            current = []
    return [*found, current] if current else found


@dataclass(slots=True)
class _Solver:
    settings: Ios
    problem: Problem
    context: SearchContext
    lanes: int
    latencies: dict[tuple[tuple[int, ...], ...], float] = field(default_factory=dict)
    transitions: int = 0
    _successors: list[int] = field(default_factory=list)  # within the block, as masks of places
    _neighbours: list[int] = field(default_factory=list)
    _block: list[int] = field(default_factory=list)

    def work_us(self, group: tuple[int, ...]) -> float:
        """Time of a group alone."""
        return float(self.problem.solo_us[self.problem.kernel[list(group), 0]].sum())

    def solve(self, block: list[int]) -> list[Stage]:
        """The stages of one block, in execution order."""
        place = {index: number for number, index in enumerate(block)}
        self._block = block
        self._successors = [sum(1 << place[item] for item in self.problem.successors(index) if item in place) for index in block]
        self._neighbours = list(self._successors)
        for number, mask in enumerate(self._successors):
            for other in _bits(mask):
                self._neighbours[other] |= 1 << number
        everything = (1 << len(block)) - 1
        best: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # state -> latency, last ending
        limit = self.transitions + min(self.settings.transitions_per_block, self.context.max_evaluations)
        # Depth first with an own stack: a state is valued once every smaller state behind it is.
        pending: list[tuple[int, list[int]]] = [(everything, self._endings(everything))]
        while pending:
            state, endings = pending[-1]
            missing = next((state & ~ending for ending in endings if state & ~ending not in best), None)
            if missing is not None and self.transitions <= limit and not self.context.expired():
                pending.append((missing, self._endings(missing)))
                continue
            options = [ending for ending in endings if state & ~ending in best]
            if not options:
                options = [self._greedy(state)]
                best.setdefault(state & ~options[0], (self._rest_us(state & ~options[0], best), self._greedy(state & ~options[0])))
            best[state] = min((best[state & ~ending][0] + self._stage_us(ending), ending) for ending in options)
            pending.pop()
        stages: list[Stage] = []
        state = everything
        while state:
            ending = best[state][1] if state in best else self._greedy(state)
            stages.append(self._groups(ending))
            state &= ~ending
        return stages[::-1]

    def _rest_us(self, state: int, best: dict[int, tuple[float, int]]) -> float:
        """Latency of a state staged greedily."""
        total = 0.0
        while state and state not in best:
            ending = self._greedy(state)
            total += self._stage_us(ending)
            state &= ~ending
        return total + (best[state][0] if state else 0.0)

    def _greedy(self, state: int) -> int:
        """The last operators of a state, as many as fit in one stage."""
        if not state:
            return 0
        ending = 0
        for number in sorted(_bits(state), key=lambda item: -item):
            if not self._successors[number] & state and ending.bit_count() < self.lanes:
                ending |= 1 << number
        return ending

    def _endings(self, state: int) -> list[int]:
        """Every ending of a state within the pruning limits."""
        most = self.settings.group_operators * self.lanes
        found: list[int] = []
        seen = {0}
        stack = [0]
        while stack:
            ending = stack.pop()
            if ending.bit_count() == most:
                continue
            for number in _bits(state & ~ending):
                if self._successors[number] & state & ~ending:
                    continue
                grown = ending | 1 << number
                if grown in seen:
                    continue
                seen.add(grown)
                self.transitions += 1
                sizes = [mask.bit_count() for mask in self._components(grown)]
                if max(sizes) > self.settings.group_operators:
                    continue
                stack.append(grown)
                if len(sizes) <= self.lanes:
                    found.append(grown)
            # One state may take a second, and a long graph has a block for every sixty operators: the clock is asked here too.
            if len(seen) > self.settings.transitions_per_block // 4 or self.context.expired():
                break
        return found

    def _components(self, ending: int) -> list[int]:
        left = ending
        found: list[int] = []
        while left:
            component = left & -left
            frontier = component
            while frontier:
                near = 0
                for number in _bits(frontier):
                    near |= self._neighbours[number]
                frontier = near & ending & ~component
                component |= frontier
            found.append(component)
            left &= ~component
        return found

    def _groups(self, ending: int) -> Stage:
        return tuple(tuple(self._block[number] for number in _bits(component)) for component in self._components(ending))

    def _stage_us(self, ending: int) -> float:
        """Latency of a stage: its groups side by side, and a barrier behind it."""
        kernels = self.problem.kernel[:, 0]
        key = tuple(sorted(tuple(int(kernels[index]) for index in group) for group in self._groups(ending)))
        known = self.latencies.get(key)
        if known is None:
            known = self.latencies[key] = _simulate_stage(self.problem, key)
        return known + float(self.problem.latency_us[1 if len(key) > 1 else 0])


def _simulate_stage(problem: Problem, groups: tuple[tuple[int, ...], ...]) -> float:
    """Fluid makespan of sequences of kernels side by side, microseconds, without the fixed cost of a run."""
    from autosched.search.compiled.fluid import evaluate

    rows = [row for group in groups for row in group]
    count, lanes = len(rows), len(groups)
    lane = np.array([place for place, group in enumerate(groups) for _ in group], dtype=np.int32)
    nothing, none = np.zeros(count + 1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    latency = problem.latency_us.copy()
    latency[2] = 0.0
    return float(
        evaluate(
            nothing, none, nothing, none, np.array(rows, dtype=np.int32)[:, None].copy(), problem.solo_us, problem.room,
            problem.excess_first, problem.excess_last, latency, np.arange(count, dtype=np.int32), lane,
            np.zeros(count, dtype=np.int32), np.full(count, -1, dtype=np.int32), np.zeros(count), layout.UNREACHED,
            -1, *layout.workspace(count, lanes),
        )
    )  # fmt: skip


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


IOS = Ios()
