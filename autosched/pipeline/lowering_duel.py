"""The winners of two lowerings against each other, their processes taking turns: the last word on which lowering is kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

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
    """The first outcome, unless another one's schedule is faster beyond noise; and what is to be said of each lowering that lost.

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
            why[names[1]] = f"it could not be compared ({fought.kind}: {fought.detail})"
            continue
        base, again, other = fought
        ledger.measurements += 3 * len(base)
        ratio, noise = paired_ratio(other, base), noise_floor_pct(base, again)
        wins = ratio.ratio < 1.0 and beyond_noise(ratio, noise)
        why[names[0] if wins else names[1]] = _sentence(ratio, names, noise)
        kept = rival if wins else kept
    return kept, why


def _fight(
    first: Outcome, second: Outcome, sessions: Mapping[str, Prepared], *, rounds: int, seconds: float
) -> tuple[list[float], list[float], list[float]] | Failure:
    """Times of the first schedule, of the first again, and of the second, round by round, in microseconds.

    The schedules take turns in their two processes, one waiting asleep while the other runs.
    """
    columns: tuple[list[float], list[float], list[float]] = ([], [], [])
    turns = [(sessions[outcome.report.lowering].session, outcome.schedule) for outcome in (first, first, second)]
    for session, schedule in turns[1:]:
        warm = session.paired([schedule], rounds=2)
        if isinstance(warm, Failure):
            return warm
    deadline = time.monotonic() + seconds
    while len(columns[0]) < rounds and (len(columns[0]) < _LEAST_ROUNDS or time.monotonic() < deadline):
        for column, (session, schedule) in zip(columns, turns, strict=True):
            answer = session.paired([schedule], rounds=1)
            if isinstance(answer, Failure):
                return answer
            column.extend(answer[0])
    return columns


def _sentence(ratio: Ratio, names: tuple[str, str], noise: float) -> str:
    interval = f"95 % interval {ratio.ci_low:.3f} to {ratio.ci_high:.3f}, noise {noise:.1f} %"
    return f"{names[1]}, tuned, takes {ratio.ratio:.3f} times as long as {names[0]}, tuned ({interval})"
