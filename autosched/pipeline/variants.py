"""Which variant of each operator is used: all are timed alone, the fastest stands for its width, the next is known to the
search, which may find it the better neighbour, and a few more get a chance on the device, in the schedule they would be part of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.costs import CostTable
from autosched.core.graph import OpGraph
from autosched.core.program import Program
from autosched.core.records import Failure, FailureKind, PairRecord, SoloRecord
from autosched.core.schedule import Schedule, sequential
from autosched.core.variants import Lowering, Variant, variant_signature
from autosched.costmodel.table import OTHER
from autosched.datasets.facts import DeviceFacts, LaunchFacts
from autosched.datasets.journal import Journal
from autosched.device.base import Session
from autosched.device.variants import VariantSession
from autosched.pipeline.graph_proofs import launch_facts
from autosched.pipeline.measuring import ANY_TIME, Ledger, SoloTime, enough_rounds, known_solo, rounds_within, would_again
from autosched.search.loop import Bench

# A variant this much slower alone is not tried beside others: no lesser slowdown makes up for it.
_WORTH_TRYING = 1.5
MOST_TRIED = 6
"""Changes of variants that are tried in one schedule."""
_ROUNDS = 8
# The median of so few rounds must differ by more than this to mean anything.
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class VariantTimes:
    """What was measured of the variants of one graph.

    Args:
        widths: as in ``CostTable``.
        best: int32 ``[n_operators, n_widths]``: the fastest variant alone.
        solo: ``[n_operators][n_widths]``: its record, under the name of the variant.
        others: by operator and place of the width, the variants worth trying beside others, with their times over the best's.
        next: ``[n_operators]``: the fastest of ``others`` at the first width, if the same engine ran it, and its record.
        answers: for each operator everything that was measured of it alone, whichever variant.
    """

    widths: tuple[int, ...]
    best: NDArray[np.int32]
    solo: list[list[SoloRecord | Failure]]
    others: dict[tuple[int, int], tuple[tuple[int, float], ...]]
    next: tuple[tuple[int, SoloRecord] | None, ...]
    answers: Sequence[Sequence[SoloRecord | Failure]]

    def of(self, operator: int, width: int) -> int:
        """The variant that stands for an operator at a width."""
        return int(self.best[operator, self.widths.index(width)])

    def other(self, operator: int) -> int | None:
        """The other variant that the search may choose for an operator at the first width."""
        found = self.next[operator]
        return None if found is None else found[0]

    @property
    def other_solo(self) -> list[SoloRecord | None]:
        """The record of each operator's other variant."""
        return [None if found is None else found[1] for found in self.next]

    def in_table(self, table: CostTable) -> CostTable:
        """A table made from these times, with which variants they are of."""
        if table.other_kernel is None:
            return dataclasses.replace(table, variant=self.best)
        other = np.array([self.best[index, 0] if found is None else found[0] for index, found in enumerate(self.next)], dtype=np.int32)
        return dataclasses.replace(table, variant=self.best, other_variant=other)

    def launches(self, session: Session, graph: OpGraph) -> dict[str, LaunchFacts]:
        """How each kernel is launched, by the names that ``make_cost_table`` knows; empty where the device cannot tell."""
        best = self.best[:, 0].tolist()
        found = launch_facts(session, graph, best)
        if found and any(self.next):
            others = [variant if item is None else item[0] for variant, item in zip(best, self.next, strict=True)]
            found |= {signature + OTHER: facts for signature, facts in launch_facts(session, graph, others).items()}
        return found

    def own_names(self, graph: OpGraph, launches: Mapping[str, LaunchFacts]) -> dict[str, LaunchFacts]:
        """``launches`` as :meth:`launches` gives them, under the names that measurements of those variants are kept by."""
        return {own: launches[name] for (own, width), name in self._names(graph).items() if width == self.widths[0] and name in launches}

    def operator_names(self, graph: OpGraph, launches: Mapping[str, LaunchFacts]) -> dict[str, LaunchFacts]:
        """The inverse of :meth:`own_names`."""
        return {name: launches[own] for (own, width), name in self._names(graph).items() if width == self.widths[0] and own in launches}

    def to_operators(self, graph: OpGraph, pairs: Sequence[PairRecord]) -> list[PairRecord]:
        """Pairs under the names that ``make_cost_table`` knows, of the variants that the search may choose; others are left out."""
        names = self._names(graph)
        found: list[PairRecord] = []
        for pair in pairs:
            first, last = names.get((pair.first, pair.first_width)), names.get((pair.last, pair.last_width))
            if first is not None and last is not None:
                found.append(dataclasses.replace(pair, first=first, last=last))
        return found

    def _names(self, graph: OpGraph) -> dict[tuple[str, int], str]:
        """What ``make_cost_table`` calls the kernels of these variants, by what measurements of them are called, and their width."""
        names = {
            (variant_signature(operator.signature, other), 1): operator.signature + OTHER
            for operator in graph.operators
            if (other := self.other(operator.index)) is not None
        }
        names |= {
            (variant_signature(operator.signature, self.of(operator.index, width)), width): operator.signature
            for operator in graph.operators
            for width in self.widths
        }
        return names


def orders_of(graph: OpGraph, widths: Sequence[int], best: NDArray[np.int32] | None) -> tuple[Schedule, ...]:
    """The operators one after another, at each width; each in the variant of ``best`` (as in :class:`VariantTimes`), if it has several."""
    orders = [sequential(graph, width=width) for width in widths]
    if best is not None:
        orders = [dataclasses.replace(order, variant=tuple(best[:, place].tolist())) for place, order in enumerate(orders)]
    return tuple(orders)


Refusals = frozenset[tuple[int, int, int]]
"""Operator, width and variant of what cannot be had in this run; operator -1 for all."""


def measure_variants(
    session: Session,
    program: Program,
    device: DeviceFacts,
    journal: Journal,
    rounds: int,
    ledger: Ledger,
    refused: Refusals = frozenset(),
    time_s: SoloTime = ANY_TIME,
) -> VariantTimes | None:
    """Every operator alone at every width in every variant; ``None`` where operators have but one.

    Args:
        refused: as ``compiling.compile_variants`` returned it, and what else is not to be used. That something could not be compiled in one
            run says nothing about the next, so it is not kept in the journal.
        rounds, time_s: as for ``measuring.rounds_within``.
    """
    offered = offered_of(session, program)
    if offered is None or not isinstance(session, VariantSession):
        return None
    graph, widths = program.graph, session.limits.widths
    columns = [(width, variant) for variant in all_of(offered) for width in widths]

    def out(operator: int, width: int, variant: int) -> bool:
        return (operator, width, variant) in refused or (-1, width, variant) in refused

    answers = _known(journal, graph, device, offered, columns, rounds, out, again=time_s.again)
    if answers is None:
        repeats = rounds_within(session, graph, len(columns), rounds, time_s)
        if repeats < rounds // 2:
            answers = _known(journal, graph, device, offered, columns, 2 * enough_rounds(repeats), out, again=time_s.again)
    if answers is None:
        answers = session.solo_variants(columns, repeats=repeats)
        added: set[tuple[str, int]] = set()
        for operator, row in zip(graph.operators, answers, strict=True):
            for (width, variant), answer in zip(columns, row, strict=True):
                name = variant_signature(operator.signature, variant)
                if variant in offered[operator.index] and (name, width) not in added and not out(operator.index, width, variant):
                    added.add((name, width))
                    ledger.count(answer)
                    journal.add_solo(name, width, answer)
        journal.flush()
        # What cannot be had fails by itself; what is not wanted does not.
        left_out = Failure(FailureKind.UNAVAILABLE, "this variant is left out")
        answers = [
            [left_out if out(place, width, variant) else answer for (width, variant), answer in zip(columns, row, strict=True)]
            for place, row in enumerate(answers)
        ]
    return _chosen(graph, widths, columns, answers)


def try_variants(bench: Bench, schedule: Schedule, graph: OpGraph, times: VariantTimes, *, most: int = MOST_TRIED) -> Schedule:
    """The schedule with those operators in another variant that make it faster on the device, if any do.

    The fastest variant alone may be the worse neighbour. Operators of one kernel change together; the kernels with the most time, or
    the least to lose, are tried one by one against the schedule as it is, ``most`` of them, and those that helped then all together.
    """
    changes = _changes(schedule, graph, times)[:most]
    if not changes:
        return schedule
    tried = [schedule, *(_with(schedule, change) for change in changes)]
    medians = _medians(bench.measure(tried, _ROUNDS))
    helped = [change for change, median in zip(changes, medians[1:], strict=True) if median < medians[0] * (1.0 - _LEAST_GAIN)]
    if not helped:
        return schedule
    merged: dict[int, int] = {}
    for change in helped:
        merged.update(change)
    finalists = [schedule, _with(schedule, merged), tried[1 + int(np.argmin(medians[1:]))]]
    last = _medians(bench.measure(finalists, 2 * _ROUNDS))
    best = int(np.argmin(last))
    return finalists[best] if last[best] < last[0] * (1.0 - _LEAST_GAIN) else schedule


def offered_of(session: Session, program: Program) -> tuple[tuple[int, ...], ...] | None:
    """The variants of each operator; ``None`` where they are measured by their calls alone: regions have a choice always, others where one
    has a second.
    """
    if not isinstance(session, VariantSession):
        return None
    found = session.offered()
    return found if program.lowering == Lowering.FUSED or any(len(row) > 1 for row in found) else None


def all_of(offered: Sequence[Sequence[int]]) -> list[int]:
    """Every variant that some operator has."""
    return sorted({variant for row in offered for variant in row})


def _known(
    journal: Journal,
    graph: OpGraph,
    device: DeviceFacts,
    offered: Sequence[Sequence[int]],
    columns: Sequence[tuple[int, int]],
    rounds: int,
    out: Callable[[int, int, int], bool],
    *,
    again: bool,
) -> list[list[SoloRecord | Failure]] | None:
    """What the journal holds, if that is everything: an answer in each column, and a time at the first width."""
    missing = Failure(FailureKind.UNAVAILABLE, "the operator has no such variant")
    found: list[list[SoloRecord | Failure]] = []
    for operator in graph.operators:
        row: list[SoloRecord | Failure] = []
        for width, variant in columns:
            answer = known_solo(journal, variant_signature(operator.signature, variant), width, rounds, device, again=again)
            if variant not in offered[operator.index] or out(operator.index, width, variant):
                answer = missing
            elif answer is None or (isinstance(answer, Failure) and not _stands(answer, variant)):
                return None
            row.append(answer)
        if not any(isinstance(answer, SoloRecord) for (width, _), answer in zip(columns, row, strict=True) if width == columns[0][0]):
            return None
        found.append(row)
    return found


def _stands(failure: Failure, variant: int) -> bool:
    """Whether a variant that failed is not tried again by the next job; calls are, unless they would end a process."""
    return would_again(failure) or (variant != Variant.CALLS and failure.kind is not FailureKind.UNAVAILABLE)


def recorded_variants(
    graph: OpGraph,
    widths: tuple[int, ...],
    offered: Sequence[Sequence[int]],
    record: Callable[[str, int], SoloRecord | None],
) -> VariantTimes | None:
    """The same of what was recorded, by the name of a kernel and its width; ``None`` where no operator has a second variant."""
    if all(len(row) == 1 for row in offered):
        return None
    missing = Failure(FailureKind.UNAVAILABLE, "this variant was not recorded")
    columns = [(width, variant) for variant in all_of(offered) for width in widths]
    answers = [
        [
            (record(variant_signature(operator.signature, variant), width) if variant in offered[operator.index] else None) or missing
            for width, variant in columns
        ]
        for operator in graph.operators
    ]
    return _chosen(graph, widths, columns, answers)


def _chosen(
    graph: OpGraph, widths: tuple[int, ...], columns: Sequence[tuple[int, int]], answers: Sequence[Sequence[SoloRecord | Failure]]
) -> VariantTimes:
    best = np.zeros((len(graph), len(widths)), dtype=np.int32)
    solo: list[list[SoloRecord | Failure]] = []
    others: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}
    following: list[tuple[int, SoloRecord] | None] = []
    # Operators of one kernel share a choice: their records are equal, but for failures of single ones.
    for operator in graph.operators:
        row: list[SoloRecord | Failure] = []
        for place, width in enumerate(widths):
            column = [(variant, answers[operator.index][at]) for at, (wide, variant) in enumerate(columns) if wide == width]
            timed = sorted((item.samples.median_us, variant) for variant, item in column if isinstance(item, SoloRecord))
            if not timed:
                row.append(column[0][1])
                continue
            fastest_us, chosen = timed[0]
            best[operator.index, place] = chosen
            row.append(next(item for variant, item in column if variant == chosen))
            ratios = [(variant, time_us / max(fastest_us, 1e-9)) for time_us, variant in timed[1:]]
            others[operator.index, place] = tuple(item for item in ratios if item[1] <= _WORTH_TRYING)
        solo.append(row)
        column = [(variant, answers[operator.index][at]) for at, (wide, variant) in enumerate(columns) if wide == widths[0]]
        following.append(_next(column, row[0], [variant for variant, _ in others.get((operator.index, 0), ())]))
    return VariantTimes(widths, best, solo, others, tuple(following), answers)


def _next(
    column: Sequence[tuple[int, SoloRecord | Failure]], best: SoloRecord | Failure, worth: Sequence[int]
) -> tuple[int, SoloRecord] | None:
    """The first variant ``worth`` trying that ran on the engine of the ``best``: on a CPU a plan of two engines runs on the slower one."""
    records = {variant: item for variant, item in column if isinstance(item, SoloRecord)}
    for variant in worth:
        if isinstance(best, SoloRecord) and records[variant].engine == best.engine:
            return variant, records[variant]
    return None


def _changes(schedule: Schedule, graph: OpGraph, times: VariantTimes) -> list[dict[int, int]]:
    """Changes worth measuring, best first: operator -> variant, all operators of one kernel at one width together."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for operator in graph.operators:
        width = schedule.width[operator.index]
        place = times.widths.index(width)
        others = [variant for variant, _ in times.others.get((operator.index, place), ())]
        # The search may have chosen one of them.
        for variant in [int(times.best[operator.index, place]), *others] if others else []:
            if variant != schedule.variant[operator.index]:
                groups.setdefault((operator.signature, width, variant), []).append(operator.index)
    ranked: list[tuple[float, dict[int, int]]] = []
    for (_, width, variant), operators in groups.items():
        place = times.widths.index(width)
        record = times.solo[operators[0]][place]
        if isinstance(record, SoloRecord):
            ratio = dict(times.others.get((operators[0], place), ())).get(variant, 1.0)
            worth = record.samples.median_us * len(operators) * (_WORTH_TRYING - ratio)
            ranked.append((worth, dict.fromkeys(operators, variant)))
    ranked.sort(key=lambda item: (-item[0], min(item[1])))
    return [change for _, change in ranked[:MOST_TRIED]]


def _with(schedule: Schedule, change: dict[int, int]) -> Schedule:
    return dataclasses.replace(schedule, variant=tuple(change.get(index, variant) for index, variant in enumerate(schedule.variant)))


def _medians(columns: Sequence[Sequence[float] | Failure]) -> list[float]:
    return [float("inf") if isinstance(column, Failure) or not column else float(np.median(column)) for column in columns]
