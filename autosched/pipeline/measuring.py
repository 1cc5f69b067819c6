"""Solo and pair runs for one graph, through the journal, so that nothing is measured twice and an interrupted job goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autosched.core.costs import CostTable
from autosched.core.graph import OpGraph
from autosched.core.progress import Progress
from autosched.core.records import BY_OTHERS, DeviceKey, Failure, FailureKind, PairRecord, SoloRecord
from autosched.core.schedule import sequential
from autosched.core.variants import variant_signature
from autosched.costmodel.model import PairModel
from autosched.costmodel.select_pairs import PairChoice, select_pairs
from autosched.costmodel.table import OTHER, make_cost_table
from autosched.datasets.facts import DISTURBED, DeviceFacts, LaunchFacts, device_facts, stolen_share
from autosched.datasets.journal import Journal
from autosched.device.base import Limits, Pair, Session
from autosched.pipeline.budget import MOST_SOLO_SHARE, SOLO_SHARE
from autosched.pipeline.left_out import LeftOut

# Pairs go to the device in small lots, so that a kill or the end of the budget loses little; the first one tells how long they take.
_LOT = 8
_FIRST_LOT = 2
_PAIR_REPEATS = 9
LEAST_ROUNDS = 3
"""Rounds of operators alone are fewer only where there is no time at all for them: a median needs three."""
# Half of the rounds are made though they take longer than they should, up to so many times as long.
_OVER = 4.0
# Pairs with another variant of one of the two follow after so many of the others, and are made from so many of those most worth knowing.
_VARIANTS_AFTER = 64
_VARIANTS_OF = 24


def took_a_process(failure: Failure) -> bool:
    """Whether a failure may have cost a measuring process, and so its start or its time limit."""
    return failure.kind in (FailureKind.CRASH, FailureKind.TIMEOUT)


def would_again(failure: Failure) -> bool:
    """Whether it took one, and would again in another job: what memory ran out for, or somebody ended, would not."""
    return took_a_process(failure) and BY_OTHERS not in failure.detail


class ChosenVariants(Protocol):
    """Which variant stands for each operator at each width, and which other one it has; see ``variants.VariantTimes``."""

    def of(self, operator: int, width: int) -> int:
        """The variant."""

    def other(self, operator: int) -> int | None:
        """The other variant that it has at the first width, or ``None``."""

    def to_operators(self, graph: OpGraph, pairs: Sequence[PairRecord]) -> list[PairRecord]:
        """Pairs of these variants, under the names that ``make_cost_table`` knows them by."""


@dataclass
class Ledger:
    """What a job has spent and what went wrong."""

    measurements: int = 0
    failures: int = 0
    notes: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def count(self, answer: object) -> None:
        """Count one answer of the device."""
        self.measurements += 1
        self.failures += isinstance(answer, Failure)


@dataclass(frozen=True, slots=True)
class SoloTime:
    """What rounds of operators alone may take, seconds.

    Args:
        wished_s: for all of them; half of them may take several times as long.
        most_s: beyond it nothing is measured but what must be.
        again: whether this job has measured them before: what it took beside other processes stands then, which are no fewer now.
    """

    wished_s: float = math.inf
    most_s: float = math.inf
    again: bool = False


ANY_TIME = SoloTime()
"""However long all rounds take."""


def solo_time(total_s: float, free_s: float = math.inf, entrants: int = 1, *, again: bool = False) -> SoloTime:
    """What a budget of ``total_s`` has for the operators of each of so many lowerings, where ``free_s`` of it is not set aside for others;
    ``again`` as in :class:`SoloTime`.
    """
    return SoloTime(SOLO_SHARE * total_s / entrants, max(0.0, min(free_s, MOST_SOLO_SHARE * total_s)), again)


def measure_solo(
    session: Session, graph: OpGraph, device: DeviceFacts, journal: Journal, rounds: int, ledger: Ledger, time_s: SoloTime = ANY_TIME
) -> list[list[SoloRecord | Failure]]:
    """Every operator alone at every width: ``[n_operators][n_widths]``; ``rounds`` and ``time_s`` as for :func:`rounds_within`."""
    widths = session.limits.widths
    if (known := _all_known(journal, graph, widths, rounds, device, time_s)) is not None:
        return known
    repeats = rounds_within(session, graph, len(widths), rounds, time_s)
    enough = enough_rounds(repeats)
    if repeats < rounds // 2 and (known := _all_known(journal, graph, widths, 2 * enough, device, time_s)) is not None:
        return known
    answers = session.solo(widths, repeats=repeats)
    added: set[tuple[str, int]] = set()
    for operator, row in zip(graph.operators, answers, strict=True):
        for width, answer in zip(widths, row, strict=True):
            if (operator.signature, width) not in added:
                added.add((operator.signature, width))
                ledger.count(answer)
                journal.add_solo(operator.signature, width, answer)
    journal.flush()
    return answers


def _all_known(
    journal: Journal, graph: OpGraph, widths: Sequence[int], rounds: int, device: DeviceFacts, time_s: SoloTime
) -> list[list[SoloRecord | Failure]] | None:
    """What the journal holds of every operator at every width (:func:`known_solo`), if those are times; or, beside one, a process's end."""
    again = time_s.again
    found = [[known_solo(journal, item.signature, width, rounds, device, again=again) for width in widths] for item in graph.operators]
    known = [[item for item in row if isinstance(item, SoloRecord) or (item is not None and would_again(item))] for row in found]
    return known if all(len(row) == len(widths) and isinstance(row[0], SoloRecord) for row in known) else None


def rounds_within(session: Session, graph: OpGraph, columns: int, rounds: int, time_s: SoloTime) -> int:
    """How many rounds of all operators alone to make, in so many ``columns`` (widths, variants).

    As many as are wished for by the time of runs in order, but no fewer than half of ``rounds``: what was measured in fewer is not
    taken for known the next time. Where even those would take several times as long (a slow model at eight widths, each in three
    variants), there are fewer, and the next time may measure again. Fewer than three are made only where three take more than the job
    has, and one always: an operator of which nothing is known cannot be scheduled. On a GPU most of that time is not the rounds', so that
    fewer would save little.
    """
    if not session.limits.lanes_matter or min(time_s.wished_s, time_s.most_s) == math.inf:
        return rounds
    if time_s.most_s <= 0.0:
        return 1
    asked_s = time.monotonic()
    widths = session.limits.widths
    # Beside other processes the widest may take many times as long as the narrowest, and is the faster one else.
    orders = [sequential(graph, width=width) for width in dict.fromkeys((widths[0], widths[-1]))]
    answer = session.paired(orders, rounds=1)
    # What hangs would hang again, for as long as a process may.
    if isinstance(answer, Failure) and answer.kind is not FailureKind.TIMEOUT:
        orders = orders[:1]
        answer = session.paired(orders, rounds=1)
    if isinstance(answer, Failure):
        return rounds
    begin_s = time.monotonic()
    session.paired(orders, rounds=1)
    round_s = (time.monotonic() - begin_s) / len(orders) * max(columns, 1)

    most_s = time_s.most_s - (time.monotonic() - asked_s)

    def fitting(seconds: float) -> int:
        # The first round is not counted, unless it is the only one.
        return max(0, int(min(seconds / round_s, rounds + 1)) - 1) if round_s > 0.0 else rounds

    wished, over, most = (fitting(seconds) for seconds in (time_s.wished_s, min(_OVER * time_s.wished_s, most_s), most_s))
    half = (rounds + 1) // 2
    return max(1, min(most, max(min(rounds, wished), min(half, max(over, LEAST_ROUNDS)))))


def enough_rounds(repeats: int) -> int:
    """Rounds that what is known must have been measured in, where there is only time for so many anew: half of them is worth as much."""
    return min(LEAST_ROUNDS, (repeats + 1) // 2)


def known_solo(
    journal: Journal, signature: str, width: int, rounds: int, device: DeviceFacts, *, again: bool = False
) -> SoloRecord | Failure | None:
    """What the journal holds of a kernel alone, if it was taken in enough of ``rounds`` and nobody else had the cores, or by this job
    (``again``).

    A busy hour must not decide what later jobs believe: what was measured in it is measured again.
    """
    found = journal.solo(signature, width, min_count=rounds // 2)
    disturbed = isinstance(found, SoloRecord) and not again and stolen_share(found.contamination, device, width) > DISTURBED
    return None if disturbed else found


def measure_pairs(
    session: Session,
    graph: OpGraph,
    device: DeviceFacts,
    solo: Sequence[Sequence[SoloRecord | Failure]],
    journal: Journal,
    budget_s: float,
    ledger: Ledger,
    progress: Progress,
    variants: ChosenVariants | None = None,
) -> list[PairRecord]:
    """The pairs most worth knowing, as many as ``budget_s`` allows; returns all that the journal holds for this device.

    With ``variants`` the pairs are of those, and some have another variant of one of the two. What is returned then stands under the names
    that ``make_cost_table`` knows.
    """
    limits = session.limits

    def held() -> list[PairRecord]:
        return journal.pairs() if variants is None else variants.to_operators(graph, journal.pairs())

    if limits.max_lanes > 1 and budget_s > 0:
        # What was measured while others had the cores says nothing; it is measured again.
        known = {(pair.first, pair.first_width, pair.last, pair.last_width) for pair in held() if undisturbed(pair, device)}
        worth = select_pairs(graph, solo, widths=limits.pair_widths, max_pairs=400, known=known)
        choices = [_Asked.of(choice, variants) for choice in worth]
        if variants is not None:
            likely = select_pairs(graph, solo, widths=limits.pair_widths, max_pairs=_VARIANTS_OF)
            choices[_VARIANTS_AFTER:_VARIANTS_AFTER] = _with_other_variants(graph, likely, variants, known)
        choices = [choice for choice in choices if not _ended_before(graph, choice, journal)]
        begin_s = time.monotonic()
        done, lot = 0, _FIRST_LOT
        while done < len(choices) and lot > 0:
            _measure_lot(session, graph, choices[done : done + lot], journal, ledger)
            done = min(done + lot, len(choices))
            progress.update(done=done, total=len(choices), measured=ledger.measurements, failed=ledger.failures)
            spent_s = time.monotonic() - begin_s
            lot = _LOT if spent_s <= 0.0 else min(_LOT, int((budget_s - spent_s) / (spent_s / done)))
        if done < len(choices):
            ledger.notes.append(f"{done} of {len(choices)} pairs worth measuring fitted in the budget; the rest is predicted")
    return held()


def undisturbed(pair: PairRecord, device: DeviceFacts) -> bool:
    """Whether a pair was timed while nobody else had the cores: others are no part of a cost table."""
    return stolen_share(pair.contamination, device, pair.first_width + pair.last_width) <= DISTURBED


@dataclass(frozen=True)
class _Asked:
    """A pair to measure, and in which variants."""

    choice: PairChoice
    first_variant: int
    last_variant: int

    @staticmethod
    def of(choice: PairChoice, variants: ChosenVariants | None) -> _Asked:
        """In the variants that stand for the two."""
        if variants is None:
            return _Asked(choice, 0, 0)
        return _Asked(choice, variants.of(choice.first, choice.first_width), variants.of(choice.last, choice.last_width))


def _with_other_variants(
    graph: OpGraph, likely: Sequence[PairChoice], variants: ChosenVariants, known: Collection[tuple[str, int, str, int]]
) -> list[_Asked]:
    """Each of the ``likely`` pairs with the other variant of its first operator, and of its last, where that is not ``known``."""
    found: list[_Asked] = []
    for choice in likely:
        usual = _Asked.of(choice, variants)
        first, last = graph.operators[choice.first].signature, graph.operators[choice.last].signature
        of_first, of_last = variants.other(choice.first), variants.other(choice.last)
        if of_first is not None and choice.first_width == 1 and (first + OTHER, 1, last, choice.last_width) not in known:
            found.append(replace(usual, first_variant=of_first))
        if of_last is not None and choice.last_width == 1 and (first, choice.first_width, last + OTHER, 1) not in known:
            found.append(replace(usual, last_variant=of_last))
    return found


def _ended_before(graph: OpGraph, asked: _Asked, journal: Journal) -> bool:
    """Whether an earlier job, or this one before it was interrupted, lost its process to this pair: it is predicted."""
    found = journal.pair(*_names(graph, asked))
    return isinstance(found, Failure) and would_again(found)


def _names(graph: OpGraph, asked: _Asked) -> tuple[str, int, str, int]:
    """What a pair stands under in the journal."""
    choice, operators = asked.choice, graph.operators
    first = variant_signature(operators[choice.first].signature, asked.first_variant)
    last = variant_signature(operators[choice.last].signature, asked.last_variant)
    return first, choice.first_width, last, choice.last_width


def _measure_lot(session: Session, graph: OpGraph, lot: Sequence[_Asked], journal: Journal, ledger: Ledger) -> None:
    asked = [
        Pair(
            item.choice.first,
            item.choice.last,
            item.choice.first_width,
            item.choice.last_width,
            item.first_variant,
            item.last_variant,
        )
        for item in lot
    ]
    for item, answer in zip(lot, session.pairs(asked, repeats=_PAIR_REPEATS), strict=True):
        ledger.count(answer)
        journal.add_pair(*_names(graph, item), answer)
    journal.flush()


def cost_table(
    session: Session,
    graph: OpGraph,
    key: DeviceKey,
    solo: Sequence[Sequence[SoloRecord | Failure]],
    pairs: Sequence[PairRecord],
    launches: Mapping[str, LaunchFacts],
    model: PairModel | None = None,
    others: Sequence[SoloRecord | None] = (),
) -> CostTable:
    """What the search reads; ``launches`` are as ``graph_proofs.launch_facts`` gives them, ``model`` predicts what was not measured.

    ``others`` as for ``make_cost_table``.
    """
    return table_within(session.limits, graph, solo, pairs, device=device_facts(key), model=model, launches=launches, others=others)


def table_within(
    limits: Limits,
    graph: OpGraph,
    solo: Sequence[Sequence[SoloRecord | Failure]],
    pairs: Sequence[PairRecord],
    *,
    device: DeviceFacts,
    launches: Mapping[str, LaunchFacts],
    model: PairModel | None,
    others: Sequence[SoloRecord | None] = (),
) -> CostTable:
    """The same, from what a session or a recording says of the device: everything in ``limits`` that costs time is in it."""
    table = make_cost_table(
        graph,
        solo,
        pairs,
        widths=limits.widths,
        launch_gap_us=limits.launch_gap_us,
        cross_lane_us=limits.cross_lane_us,
        fixed_us=limits.fixed_us,
        max_lanes=limits.max_lanes,
        device=device,
        model=model,
        launches=launches,
        one_team=limits.one_team,
        others=others,
    )
    # A lane that polls takes the interpreter's lock from the others, or nothing.
    polling_us = 0.0 if limits.native_lanes else table.polling_us
    return replace(table, concurrent_gap_us=limits.concurrent_gap_us, polling_us=polling_us)
