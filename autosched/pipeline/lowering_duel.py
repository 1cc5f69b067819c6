"""The winners of two lowerings against each other, their processes taking turns: the last word on which lowering is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autosched.core.progress import Progress
from autosched.core.records import Failure
from autosched.device.timing import Ratio, beyond_noise, noise_floor_pct, paired_ratio
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.options import Options, Outcome
from autosched.pipeline.preparing import Prepared

DUEL_SHARE = 0.1
"""Of the budget, for one duel."""

_LEAST_ROUNDS = 15


def duels(
    outcomes: Sequence[Outcome], prepared: Sequence[Prepared], options: Options, ledger: Ledger, progress: Progress
) -> tuple[Outcome, dict[str, str]]:
    """The first outcome, unless another one's schedule is faster beyond noise, or the only one that still runs; and what is to be said of
    each lowering that lost.

    Args:
        outcomes: of one tuned lowering each, the fastest in order first.
        prepared: those lowerings, open on the device.
        ledger: counts the rounds.
    """
    sessions = {item.lowering: item for item in prepared}
    why: dict[str, str] = {}
    kept = outcomes[0]
    for rival in outcomes[1:]:
        names = kept.report.lowering, rival.report.lowering
        seconds = DUEL_SHARE * options.budget.total_s
        progress.stage(f"{names[0]} against {names[1]}")
        fought = _fight(kept, rival, sessions, rounds=2 * options.budget.final_rounds, seconds=seconds)
        if isinstance(fought, Failure):
            if (guilty := _only_first_fails(kept, rival, sessions)) is not None:
                why[names[0]] = f"its schedule failed in the last comparison ({guilty.kind}: {guilty.detail})"
                kept = rival
            else:
                why[names[1]] = f"it could not be compared ({fought.kind}: {fought.detail})"
            continue
        ledger.measurements += 3 * len(fought.once)
        ratio, noise = paired_ratio(fought.rival, fought.base), noise_floor_pct(fought.once, fought.again)
        wins = ratio.ratio < 1.0 and beyond_noise(ratio, noise)
        why[names[0] if wins else names[1]] = _sentence(ratio, names, noise)
        kept = rival if wins else kept
    return kept, why


@dataclass(frozen=True, slots=True)
class _Fought:
    """Times of two schedules, microseconds, a row of each for every round, and those of whichever ran twice in that round (A/A)."""

    base: list[float]
    rival: list[float]
    once: list[float]
    again: list[float]


def _fight(first: Outcome, second: Outcome, sessions: Mapping[str, Prepared], *, rounds: int, seconds: float) -> _Fought | Failure:
    """The two schedules in turn, each in its process, one waiting asleep while the other runs; three turns are a round.

    They alternate without a break, so that every turn follows one of the other process: a second turn in the same process finds its caches
    full and takes one or two percent less time, which would be in the A/A floor and in nothing that is compared.
    """
    turns = [(sessions[outcome.report.lowering].session, outcome.schedule) for outcome in (first, second)]
    for session, schedule in turns:
        warm = session.paired([schedule], rounds=2)
        if isinstance(warm, Failure):
            return warm
    fought = _Fought([], [], [], [])
    deadline = time.monotonic() + seconds
    while (done := len(fought.base)) < rounds and (done < _LEAST_ROUNDS or time.monotonic() < deadline):
        # Odd rounds begin, and end, with the second schedule.
        order = turns if done % 2 == 0 else turns[::-1]
        taken_us: list[float] = []
        for session, schedule in (*order, order[0]):
            answer = session.paired([schedule], rounds=1)
            if isinstance(answer, Failure):
                return answer
            taken_us.append(answer[0][0])
        once, other, again = taken_us
        base, rival = (once, other) if done % 2 == 0 else (other, once)
        for column, time_us in zip((fought.base, fought.rival, fought.once, fought.again), (base, rival, once, again), strict=True):
            column.append(time_us)
    return fought


def _only_first_fails(first: Outcome, second: Outcome, sessions: Mapping[str, Prepared]) -> Failure | None:
    """The failure of the first schedule, run by itself, if the second one runs; none where it is not the first alone that fails."""
    mine, theirs = (sessions[outcome.report.lowering].session.paired([outcome.schedule], rounds=1) for outcome in (first, second))
    return mine if isinstance(mine, Failure) and not isinstance(theirs, Failure) else None


def _sentence(ratio: Ratio, names: tuple[str, str], noise: float) -> str:
    interval = f"95 % interval {ratio.ci_low:.3f} to {ratio.ci_high:.3f}, noise {noise:.1f} %"
    return f"{names[1]}, tuned, takes {ratio.ratio:.3f} times as long as {names[0]}, tuned ({interval})"
