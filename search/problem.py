"""A scheduling problem as flat arrays: what every simulator and strategy of this room works on.

One value joins the operator graph (who waits for whom) and the cost table (how long, and how much they disturb each other).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.costs import UNATTRACTIVE, CostTable
from autosched.core.errors import InvalidGraph, UsageError
from autosched.core.graph import OpGraph
from autosched.core.schedule import Schedule, make_schedule
from autosched.core.topological import topological
from autosched.costmodel.composition import shares

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
KernelArrays = tuple[Ints, Ints, Ints, Ints, Ints, Floats, Floats, Floats, Floats, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A graph and its costs in the form the simulators read.

    Args:
        graph: what is scheduled.
        costs: the table it was made from.
        pred_ptr, pred_idx: CSR of predecessors, int32 ``[n + 1]`` and ``[n_edges]``.
        succ_ptr, succ_idx: CSR of successors, the same shapes.
        kernel: int32 ``[n, n_widths]``: row of the kernel matrices for each operator and width index; with one column more for the other
            variants of ``CostTable``, if there are any, which are *choices* like widths but as narrow as the first.
        solo_us: float64 ``[n_kernels]``, time alone in microseconds.
        room: float64 ``[n_kernels]``, as in ``CostTable``; length 0 where no kernels side by side could want more than there is.
        excess_first: float64 ``[n_kernels, n_kernels]``, ``slowdown_first - 1``, and 0 for kernels that run alone.
        excess_last: the same of ``slowdown_last``.
        latency_us: float64 ``[9]``: gap between operators of a lane, latency of a wait across lanes, once for each run, put-off of an
            operator that would start while another runs, ``polling_us`` and ``team_spin_us`` as in ``CostTable``; and last, no times, the
            room that one thread takes, 1 for ``one_team``, else 0, and how many widths there are.
        demand: float64 ``[n]``: share (0 to 1) of the device's scarcest resource that one block of the operator takes; used by
            ``opara`` only.
        memory_bound: bool ``[n]``: whether memory rather than arithmetic limits the operator; used by ``opara`` only.
    """

    graph: OpGraph
    costs: CostTable
    pred_ptr: Ints
    pred_idx: Ints
    succ_ptr: Ints
    succ_idx: Ints
    kernel: Ints
    solo_us: Floats
    room: Floats
    excess_first: Floats
    excess_last: Floats
    latency_us: Floats
    demand: Floats
    memory_bound: NDArray[np.bool_]

    @staticmethod
    def make(
        graph: OpGraph, costs: CostTable, *, demand: Sequence[float] | None = None, memory_bound: Sequence[bool] | None = None
    ) -> Problem:
        """Join a graph with the cost table of its device.

        Args:
            graph: what is scheduled.
            costs: one row of ``costs.kernel`` for each operator, in the graph's order.
            demand: measured resource demand of each operator, if known (see the class); else estimated from bytes.
            memory_bound: measured class of each operator, if known; else estimated from arithmetic intensity.

        Raises:
            UsageError: if the table was made for another number of operators.
        """
        count = len(graph)
        if costs.kernel.shape[0] != count:
            raise UsageError(f"the cost table has {costs.kernel.shape[0]} operators, the graph has {count}; make it for this graph")
        pred_ptr, pred_idx = _csr(graph.predecessors)
        succ_ptr, succ_idx = _csr(graph.successors)
        moved = np.array([operator.bytes_read + operator.bytes_written for operator in graph.operators], dtype=np.float64)
        flops = np.array([operator.flops for operator in graph.operators], dtype=np.float64)
        share = moved / max(float(moved.max(initial=0.0)), 1.0)
        # Ten operations a byte separates element-wise work from convolutions and matrix products on today's CPUs and GPUs.
        bound = flops < 10.0 * moved
        if demand is not None:
            share = np.ascontiguousarray(demand, dtype=np.float64)
        if memory_bound is not None:
            bound = np.ascontiguousarray(memory_bound, dtype=np.bool_)
        return Problem(
            graph=graph,
            costs=costs,
            pred_ptr=pred_ptr,
            pred_idx=pred_idx,
            succ_ptr=succ_ptr,
            succ_idx=succ_idx,
            kernel=np.ascontiguousarray(_choices(costs), dtype=np.int32),
            solo_us=np.ascontiguousarray(costs.solo_us, dtype=np.float64),
            room=_scarce_room(costs),
            excess_first=_excess(costs.slowdown_first, len(costs.solo_us)),
            excess_last=_excess(costs.slowdown_last, len(costs.solo_us)),
            latency_us=_latencies(costs),
            demand=share,
            memory_bound=bound,
        )

    def with_costs(self, costs: CostTable) -> Problem:
        """The same graph with what is known of its costs by now."""
        return Problem.make(self.graph, costs, demand=self.demand.tolist(), memory_bound=self.memory_bound.tolist())

    @staticmethod
    def from_arrays(predecessors: Sequence[Sequence[int]], costs: CostTable) -> Problem:
        """A problem without a model: for each operator, the operators it waits for, all numbered below it.

        Raises:
            InvalidGraph: on a cycle, or if an operator comes before one it waits for.
            UsageError: as :meth:`make`.
        """
        from autosched.search.synthetic import make_graph

        topological(len(predecessors), predecessors)
        for index, before in enumerate(predecessors):
            if any(item >= index for item in before):
                raise InvalidGraph(f"operator {index} waits for {sorted(before)}; expected numbers below its own (a topological order)")
        return Problem.make(make_graph(predecessors, costs.kernel[:, 0].tolist()), costs)

    @property
    def count(self) -> int:
        """Number of operators."""
        return int(self.kernel.shape[0])

    @property
    def arrays(self) -> KernelArrays:
        """The arrays the compiled simulators take, in their order."""
        return (
            self.pred_ptr,
            self.pred_idx,
            self.succ_ptr,
            self.succ_idx,
            self.kernel,
            self.solo_us,
            self.room,
            self.excess_first,
            self.excess_last,
            self.latency_us,
        )

    def shares(self, kernels: Iterable[int]) -> list[float]:
        """The part of its room that each of some kernels gets that run together, in order of start (``costmodel.composition.shares``)."""
        return shares([float(self.room[kernel]) for kernel in kernels]) if len(self.room) else [1.0 for _ in kernels]

    def predecessors(self, index: int) -> list[int]:
        """Operators that ``index`` waits for, ascending."""
        return [int(item) for item in self.pred_idx[self.pred_ptr[index] : self.pred_ptr[index + 1]]]

    def successors(self, index: int) -> list[int]:
        """Operators that wait for ``index``, ascending."""
        return [int(item) for item in self.succ_idx[self.succ_ptr[index] : self.succ_ptr[index + 1]]]

    def operator_us(self, width_index: int = 0) -> Floats:
        """Time alone of each operator: float64 ``[n]``, microseconds."""
        times: Floats = self.solo_us[self.kernel[:, width_index]]
        return times

    def bottom_levels_us(self, width_index: int = 0, *, edge_us: float = 0.0) -> Floats:
        """As :meth:`paths_to_end_us`, every operator at one width."""
        return self.paths_to_end_us(self.operator_us(width_index), edge_us=edge_us)

    def fastest_us(self, width_indices: Iterable[int]) -> Floats:
        """Time alone of each operator at whichever of these widths is its fastest: float64 ``[n]``, microseconds."""
        times: Floats = np.min([self.operator_us(int(place)) for place in width_indices], axis=0)
        return times

    def paths_to_end_us(self, times_us: Floats, *, edge_us: float = 0.0) -> Floats:
        """Longest path from each operator's start to the end of the graph: float64 ``[n]``, microseconds.

        Args:
            times_us: float64 ``[n]``, of each operator.
            edge_us: of each edge on the path.
        """
        levels = times_us.copy()
        for index in range(self.count - 1, -1, -1):
            after = self.succ_idx[self.succ_ptr[index] : self.succ_ptr[index + 1]]
            if len(after):
                levels[index] = times_us[index] + edge_us + levels[after].max()
        return levels

    def team_waits(self, order: Sequence[int] | Ints, width_index: Sequence[int] | Ints) -> list[list[int]]:
        """What each operator waits for because the lanes are one team (``CostTable.one_team``), by operator; nothing if they are not.

        A wide operator waits for those launched since the last wide one, and for that; a narrow one for the last wide one before it.
        """
        waits: list[list[int]] = [[] for _ in range(self.count)]
        if self.costs.one_team:
            last: list[int] = []  # the last wide operator, if there was one
            since: list[int] = []
            for operator in map(int, order):
                if 0 < width_index[operator] < len(self.costs.widths):
                    waits[operator] = last + since
                    last, since = [operator], []
                else:
                    waits[operator] = last
                    since.append(operator)
        return waits

    def width_indices(self, schedule: Schedule) -> Ints:
        """Each operator's column of ``kernel``: int32 ``[n]``. A variant that was not costed counts as the one that was.

        Raises:
            UsageError: if the schedule uses a width that was not costed.
        """
        places = {width: place for place, width in enumerate(self.costs.widths)}
        missing = set(schedule.width) - places.keys()
        if missing:
            raise UsageError(f"the schedule uses widths {sorted(missing)}; costs are known for {list(self.costs.widths)}")
        found: Ints = np.array([places[width] for width in schedule.width], dtype=np.int32)
        if self.costs.other_variant is not None and self.costs.variant is not None:
            variant = np.array(schedule.variant)
            other = (variant == self.costs.other_variant) & (variant != self.costs.variant[:, 0])
            found[other & (found == 0)] = len(self.costs.widths)
        return found

    def is_costed(self, schedule: Schedule) -> bool:
        """Whether every operator was costed at the width and in the variant that the schedule gives it."""
        if not set(schedule.width) <= set(self.costs.widths):
            return False
        columns = self.width_indices(schedule)
        times_us = self.solo_us[self.kernel[np.arange(self.count), columns]]
        # Of a width at which it has no time, half of what it costs is more than any real time.
        timed = bool((times_us < UNATTRACTIVE / 2 * self.operator_us().sum()).all())
        return timed and self._in_columns(columns.tolist())[1] == list(schedule.variant)

    def schedule(
        self,
        order: Sequence[int] | Ints,
        lane: Sequence[int] | Ints,
        *,
        width_index: Sequence[int] | Ints | None = None,
        wait: Sequence[int] | Ints | None = None,
        extra_edges: Sequence[tuple[int, int]] = (),
    ) -> Schedule:
        """A legal schedule, lanes renumbered by first use and needless extra edges dropped.

        Operators that are more than one thread wide go to one lane together: they need every core anyway, and on a CPU each thread that
        runs one gets a team of helper threads of its own, which from then on slow down every other team of the process.

        Args:
            order: operator indices in launch order, ``[n]``.
            lane: lane by operator index, ``[n]``.
            width_index: column of ``kernel`` by operator index, ``[n]``; default the first (narrow).
            wait: by operator index, one more operator to wait for, or -1, ``[n]``.
            extra_edges: more ``(before, after)`` pairs.

        Raises:
            IllegalSchedule: if it would not compute what the graph says.
        """
        if width_index is not None:
            lane = one_wide_lane(lane, width_index, len(self.costs.widths)).tolist()
        edges = {(int(before), int(after)) for before, after in extra_edges}
        if wait is not None:
            edges |= {(int(before), after) for after, before in enumerate(wait) if before >= 0}
        places = [int(place) for place in width_index] if width_index is not None else [0] * self.count
        chosen, variant = self._in_columns(places)
        kept = [(before, after) for before, after in edges if lane[before] != lane[after] and before not in self.predecessors(after)]
        launched, lanes = [int(index) for index in order], [int(item) for item in lane]
        return make_schedule(self.graph, launched, lanes, width=chosen, variant=variant, extra_edges=sorted(kept))

    def _in_columns(self, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Width and variant of each operator, by its column of ``kernel``: ``[n]`` each."""
        widths = (*self.costs.widths, self.costs.widths[0])
        table, other = self.costs.variant, self.costs.other_variant
        if table is not None and other is not None:
            table = np.column_stack([table, other])
        variants = [0 if table is None else int(table[operator, place]) for operator, place in enumerate(places)]
        return [widths[place] for place in places], variants


def one_wide_lane(lane: Sequence[int] | Ints, width_index: Sequence[int] | Ints, widths: int) -> Ints:
    """``lane`` with every operator wider than the narrowest of so many widths on lane 0: int32 ``[n]``."""
    places = np.asarray(width_index)
    return np.where((places > 0) & (places < widths), 0, np.asarray(lane)).astype(np.int32)


def _choices(costs: CostTable) -> Ints:
    if costs.other_kernel is None:
        return costs.kernel
    return np.column_stack([costs.kernel, costs.other_kernel])


def _excess(slowdown: Floats, kernels: int) -> Floats:
    """By how much slowdowns exceed 1, with zeros for the kernels that have none.

    Compiled code does not look at its indices, so the rows must be there; the system gives memory only to those that are written.
    """
    if len(slowdown) == kernels:
        return np.ascontiguousarray(slowdown - 1.0, dtype=np.float64)
    excess = np.zeros((kernels, kernels))
    np.subtract(slowdown, 1.0, out=excess[: len(slowdown), : len(slowdown)])
    return excess


def _latencies(costs: CostTable) -> Floats:
    # Without room nothing is known of who takes which core.
    has_room = len(_scarce_room(costs)) > 0 and len(costs.kernel) > 0
    thread = float(costs.room[costs.kernel[:, 0]].min()) if has_room and costs.room is not None else 0.0
    spin_us = costs.team_spin_us if thread > 0.0 else 0.0
    times_us = (costs.launch_gap_us, costs.cross_lane_us, costs.fixed_us, costs.concurrent_gap_us, costs.polling_us, spin_us)
    return np.array([*times_us, thread, float(costs.one_team), float(len(costs.widths))], dtype=np.float64)


def _scarce_room(costs: CostTable) -> Floats:
    """The kernels' room if those of all lanes could want more than there is; else length 0, which spares the simulators to look at it.

    Of two, their pair's slowdowns say what room would say, so three lanes are the fewest that count.
    """
    if costs.room is None or max(3, costs.max_lanes) * float(costs.room.max(initial=0.0)) <= 1.0:
        return np.zeros(0)
    return np.ascontiguousarray(costs.room, dtype=np.float64)


def _csr(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    pointers = np.zeros(len(lists) + 1, dtype=np.int32)
    pointers[1:] = np.cumsum([len(items) for items in lists])
    indices = np.array([item for items in lists for item in items], dtype=np.int32)
    return pointers, indices
