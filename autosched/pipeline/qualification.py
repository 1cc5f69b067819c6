"""Which lowerings can still win: the sequential orders of all of them in interleaved rounds, and what lanes could make of each at best.

A lowering is worth tuning if it is the fastest in order, or if no proof says that its schedules must lose to that one: its bound (longest
path; on a CPU also work over cores) is below the other's time. Where the bound knows only the longest path, lanes are taken to gain at
most ``MOST_GAIN``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import AutoschedError
from autosched.core.progress import Progress
from autosched.core.records import Failure, FailureKind, Samples, SoloRecord
from autosched.core.schedule import Schedule
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Journal
from autosched.device.timing import summarize
from autosched.pipeline.bounds import bound_of_times
from autosched.pipeline.measuring import ANY_TIME, Ledger, SoloTime, measure_solo
from autosched.pipeline.preparing import Prepared
from autosched.pipeline.variants import measure_variants, orders_of

MOST_GAIN = 3.5
"""Sequential time over that of the best schedule, where only the longest path bounds it. Opara reports at most 1.68 over sequential CUDA
graphs (Chen et al., IEEE Transactions on Computers 2025); a mixture of experts, whose kernels fill little of an H200, gained 3.2 there."""

MOST_TUNED = 2
"""A third lowering would leave none of them the time to find anything."""

# Sequential times this close are level: a region that was not compiled in time is the same calls, only coarser.
_LEVEL = 1.02
_LEAST_ROUNDS = 7
_MOST_ROUNDS = 40
# Where the least take so many times as long as they should, so few are made: whoever wins here has yet to win the final comparison.
_OVER = 3.0
_FEWEST_ROUNDS = 3
# An order whose fastest round takes so many times as long as another order of the same lowering is not its best one. On many cores there
# is an order for each of eight widths, and those that are far off take most of the time.
_HOPELESS = 3.0
_TELLING_ROUNDS = 2


@dataclass(frozen=True, eq=False)
class Entrant:
    """A prepared lowering with what its operators take alone.

    Args:
        orders: its sequential schedules, one for each width, each operator in the variant that is fastest alone.
        alone_us: for each of those, the sum of its operators' times alone, microseconds; NaN if one has none.
        bound_us: no schedule is faster while operators take what they took alone, microseconds; ``None`` if unknown.
    """

    prepared: Prepared
    orders: tuple[Schedule, ...]
    alone_us: tuple[float, ...]
    bound_us: float | None


@dataclass(frozen=True, eq=False)
class Qualified:
    """An entrant with the times of its best sequential order: every round was taken beside one of each other entrant.

    ``alone_us`` is what that order takes by its operators' times alone, microseconds; NaN if unknown.
    """

    entrant: Entrant
    sequential: Samples
    alone_us: float = math.nan

    @property
    def bound_us(self) -> float | None:
        """No schedule is faster, microseconds, at the pace of the rounds; ``None`` if unknown.

        Where the operators in order took less than alone, the machine was slower then, and so high is the bound from those times.
        """
        bound = self.entrant.bound_us
        if bound is None or not self.alone_us > self.sequential.median_us:
            return bound
        return bound * self.sequential.median_us / self.alone_us

    @property
    def at_best_us(self) -> float:
        """What lanes could make of it at best, microseconds."""
        least = self.sequential.median_us / MOST_GAIN
        bound = self.bound_us
        if bound is None:
            return least
        # On a CPU the bound counts the cores as well, and stands for itself.
        return max(bound, least) if self.entrant.prepared.device.key.kind == "cuda" else bound

    @property
    def promise(self) -> tuple[float, float]:
        """For sorting: what lanes could make of it, then the bound alone; the least is the most promising."""
        bound = self.bound_us
        return self.at_best_us, bound if bound is not None else float("inf")


def enter(prepared: Prepared, journal: Journal, rounds: int, ledger: Ledger, time_s: SoloTime = ANY_TIME) -> Entrant:
    """Measure the operators alone, through the journal: tuning finds them there. ``rounds`` and ``time_s`` as for ``rounds_within``."""
    program, session = prepared.captured.program, prepared.session
    widths = session.limits.widths
    facts = device_facts(prepared.device.key)
    variants = measure_variants(session, program, facts, journal, rounds, ledger, prepared.refused, time_s)
    solo = variants.solo if variants is not None else measure_solo(session, program.graph, facts, journal, rounds, ledger, time_s)
    times: NDArray[np.float64] = np.array(
        [[item.samples.median_us if isinstance(item, SoloRecord) else np.nan for item in row] for row in solo], dtype=np.float64
    ).reshape(len(program.graph), len(widths))
    orders = orders_of(program.graph, widths, variants.best if variants is not None else None)
    return Entrant(prepared, orders, tuple(times.sum(axis=0).tolist()), bound_of_times(program.graph, times, widths, facts))


def qualify(
    entrants: Sequence[Entrant], *, seconds: float, seed: int, ledger: Ledger, progress: Progress
) -> tuple[list[Qualified], list[tuple[Entrant, Failure]]]:
    """Time the sequential orders of all entrants in rounds: those that could be timed in one at least, fastest first, and those that not.

    The orders take turns in their own processes, one at work while the others sleep, in another turn every round. Goes on for ``seconds``,
    but at least seven rounds, three where those take far longer, and at most forty; an order that is far behind another of its lowering
    is out after two.
    """
    progress.stage("sequential orders of all lowerings")
    failed: list[tuple[Entrant, Failure]] = []
    runners = [_Runner(entrant) for entrant in entrants]

    def lost(runner: _Runner) -> bool:
        if runner.failure is not None:
            failed.append((runner.entrant, runner.failure))
        return runner.failure is not None

    for runner in runners:
        runner.warm_up()
    alive = [runner for runner in runners if not lost(runner)]
    rng = np.random.default_rng(seed)
    begin_s = time.monotonic()
    done = 0
    while alive and done < _MOST_ROUNDS and done < _wanted_rounds(time.monotonic() - begin_s, seconds):
        for place in rng.permutation(len(alive)):
            ledger.measurements += alive[place].time()
        alive = [runner for runner in alive if not lost(runner)]
        done += 1
        progress.update(done=done, total=_MOST_ROUNDS, measured=ledger.measurements)
    ledger.failures += sum(len(runner.struck) for runner in runners)
    timed = [runner.best_order() for runner in alive]
    return sorted(timed, key=lambda item: item.sequential.median_us), failed


def _wanted_rounds(spent_s: float, seconds: float) -> int:
    """How many rounds to make at the least, where they have taken ``spent_s`` so far."""
    if spent_s < seconds:
        return _MOST_ROUNDS
    return _LEAST_ROUNDS if spent_s < _OVER * seconds else _FEWEST_ROUNDS


def contenders(qualified: Sequence[Qualified]) -> list[Qualified]:
    """Those worth tuning: the fastest in order, among equals the one with most to gain, and at most one more that could beat it.

    Args:
        qualified: fastest in order first.
    """
    level_us = _LEVEL * qualified[0].sequential.median_us
    leader = min((item for item in qualified if item.sequential.median_us <= level_us), key=lambda item: item.promise)
    able = [item for item in qualified if item is not leader and item.at_best_us < leader.sequential.median_us]
    return [leader, *able[: MOST_TUNED - 1]]


def why_dropped(item: Qualified, leader: Qualified) -> str:
    """The reason that ``item`` is not tuned, for the report."""
    best, name = leader.sequential.median_us, leader.entrant.prepared.lowering
    if item.at_best_us < best:
        return f"lanes could make it {item.at_best_us:,.0f} us at best, but only {MOST_TUNED} lowerings are tuned"
    return f"lanes could make it {item.at_best_us:,.0f} us at best, and {name} takes {best:,.0f} us in order"


class _Runner:
    """An entrant in the rounds: the orders of it that run, their times, and what became of the others.

    One order may fail where the other runs (code that was compiled for several threads, say): it is the order that is out then, and not
    the lowering.
    """

    def __init__(self, entrant: Entrant) -> None:
        self.entrant = entrant
        self.struck: list[Failure] = []
        self._columns: dict[int, list[float]] = {place: [] for place in range(len(entrant.orders))}

    @property
    def failure(self) -> Failure | None:
        """Why nothing is left of it, if so."""
        return None if self._columns else self.struck[0]

    def warm_up(self) -> None:
        """A round that does not count."""
        self._round()

    def time(self) -> int:
        """One round; how many times were taken."""
        taken = self._round()
        for place, time_us in taken.items():
            self._columns[place].append(time_us)
        self._leave_behind()
        return len(taken)

    def best_order(self) -> Qualified:
        """The fastest of the orders that came through all rounds."""
        alone_us = self.entrant.alone_us
        timed = [Qualified(self.entrant, summarize(column), alone_us[place]) for place, column in self._columns.items()]
        return min(timed, key=lambda item: item.sequential.median_us)

    def _leave_behind(self) -> None:
        if any(len(column) != _TELLING_ROUNDS for column in self._columns.values()):
            return
        best_us = min(max(column) for column in self._columns.values())
        self._columns = {place: column for place, column in self._columns.items() if min(column) <= _HOPELESS * best_us}

    def _round(self) -> dict[int, float]:
        """The time of each order that runs, by its place; those that do not are out."""
        answer = self._paired(list(self._columns))
        if isinstance(answer, Failure) and len(self._columns) > 1:
            # That of the first that fails: which others do, each says by itself.
            for place in list(self._columns):
                if isinstance(found := self._paired([place]), Failure):
                    self._strike(place, found)
            # Times that were not taken beside each other are none of this round's.
            answer = self._paired(list(self._columns)) if self._columns else answer
        if isinstance(answer, Failure):
            for place in list(self._columns):
                self._strike(place, answer)
            return {}
        return dict(zip(self._columns, answer, strict=True))

    def _strike(self, place: int, failure: Failure) -> None:
        del self._columns[place]
        self.struck.append(failure)

    def _paired(self, places: Sequence[int]) -> list[float] | Failure:
        try:
            answer = self.entrant.prepared.session.paired([self.entrant.orders[place] for place in places], rounds=1)
        except AutoschedError as error:
            # A process that is lost for one lowering's code says nothing about another's.
            return Failure(FailureKind.CRASH, str(error))
        return answer if isinstance(answer, Failure) else [row[0] for row in answer]
