"""The final say: every candidate and every baseline timed in interleaved rounds, and what may be claimed from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autosched.core.progress import Progress
from autosched.core.records import Failure, Samples
from autosched.core.schedule import Schedule
from autosched.device.base import Session
from autosched.device.timing import Ratio, is_unstable, noise_floor_pct, paired_ratio, summarize

# Rounds between two looks at the clock; also how long the two processes of an external baseline stay apart.
_CHUNK = 4
_MIN_ROUNDS = 7


class External:
    """A baseline that is no schedule (the model as it came, or compiled): a name and one timed round at a time.

    ``round_us`` returns one time in microseconds, or a ``Failure`` after which it is not called again.
    """

    def __init__(self, name: str, round_us: Callable[[], float | Failure], max_abs_error: float | None = None) -> None:
        self.name = name
        self.round_us = round_us
        self.max_abs_error = max_abs_error


@dataclass(frozen=True, slots=True)
class Times:
    """Raw times of everything, in rounds: ``columns[name][round]`` microseconds, or why there are none."""

    columns: dict[str, list[float]]
    failures: dict[str, Failure]
    again: list[float]

    def samples(self, name: str) -> Samples | None:
        """Median and interval of one name, if it was timed."""
        column = self.columns.get(name)
        return summarize(column) if column else None


def interleave(
    session: Session,
    schedules: Sequence[tuple[str, Schedule]],
    externals: Sequence[External],
    *,
    rounds: int,
    deadline: float,
    progress: Progress,
    anchor: str,
) -> Times:
    """Time everything in rounds until ``rounds`` are done or ``deadline`` (``time.monotonic``) has passed, but at least seven.

    ``anchor`` names the schedule that is run twice in every round: its two columns are the A/A test.
    """
    alive = dict(schedules)
    columns: dict[str, list[float]] = {name: [] for name in [*alive, *(item.name for item in externals)]}
    failures: dict[str, Failure] = {}
    again: list[float] = []
    active = list(externals)
    done = 0
    while done < rounds and (done < _MIN_ROUNDS or time.monotonic() < deadline):
        chunk = min(_CHUNK, rounds - done)
        names = list(alive)
        answer = session.paired([*(alive[name] for name in names), alive[anchor]], rounds=chunk)
        if isinstance(answer, Failure):
            culprits = _find_culprits(session, alive, anchor, answer)
            failures.update(culprits)
            for name in culprits:
                alive.pop(name, None)
                columns.pop(name, None)
            if anchor not in alive:
                break
            continue
        *first, repeated = answer
        for name, column in zip(names, first, strict=True):
            columns[name].extend(column)
        again.extend(repeated)
        for item in list(active):
            for _ in range(chunk):
                taken = item.round_us()
                if isinstance(taken, Failure):
                    failures[item.name] = taken
                    columns.pop(item.name, None)
                    active.remove(item)
                    break
                columns[item.name].append(taken)
        done += chunk
        progress.update(done=done, total=rounds, left_s=max(deadline - time.monotonic(), 0.0))
    return Times(columns, failures, again)


def _find_culprits(session: Session, alive: dict[str, Schedule], anchor: str, whole: Failure) -> dict[str, Failure]:
    """Which schedules fail alone; all but the anchor if none does, because the failure then lies in running them together."""
    found: dict[str, Failure] = {}
    for name, schedule in alive.items():
        answer = session.paired([schedule], rounds=1)
        if isinstance(answer, Failure):
            found[name] = answer
    return found or {name: whole for name in alive if name != anchor} or {anchor: whole}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is kept, and the sentence that says why.

    ``ratio`` is kept over best static schedule, 1.0 with itself. ``noise_pct`` is the A/A floor.
    """

    chosen: str
    best_baseline: str
    verdict: str
    ratio: Ratio
    noise_pct: float
    unstable: bool


def judge(times: Times, candidates: Sequence[str], static: Sequence[str], externals: Sequence[str], anchor: str, seed: int) -> Judgement:
    """Keep the fastest candidate if it beats the fastest static schedule beyond noise; else keep that one.

    Args:
        candidates: names of schedules that a search found.
        static: names of sequential schedules, any of which may be kept instead.
        externals: names of baselines that are no schedules and cannot be kept.
        anchor: the name measured twice.

    A candidate must be faster by more than the A/A floor, with its 95 % interval below 1. The fastest of several
    candidates is partly the luckiest, so the decision uses the second half of the rounds and the choice the first.
    """
    rng = np.random.default_rng(seed)
    noise = noise_floor_pct(times.columns[anchor], times.again, rng)
    timed = [name for name in static if times.columns.get(name)]
    base = min(timed, key=lambda name: _median(times.columns[name]))
    outside = [name for name in externals if times.columns.get(name)]
    best_baseline = min([base, *outside], key=lambda name: _median(times.columns[name]))
    unstable = is_unstable(times.columns[base], limit_pct=25.0)
    same = Ratio(1.0, 1.0, 1.0, len(times.columns[base]))
    rivals = [name for name in candidates if times.columns.get(name)]
    chosen, ratio = base, same
    why = "no candidate could be measured" if candidates else "nothing else to choose from"
    if rivals:
        half = len(times.columns[base]) // 2
        best = min(rivals, key=lambda name: _median(times.columns[name][:half] or times.columns[name]))
        held_out = paired_ratio(times.columns[best][half:], times.columns[base][half:], rng)
        gain_pct = 100.0 * (1.0 - held_out.ratio)
        if unstable:
            why = f"the machine was too restless to tell (best candidate {best}: {gain_pct:+.1f} %)"
        elif held_out.ci_high < 1.0 and gain_pct > noise:
            chosen, ratio = best, held_out
        else:
            interval = f"95 % interval {100 * (held_out.ci_low - 1):+.1f} to {100 * (held_out.ci_high - 1):+.1f} % time"
            why = f"the best candidate, {best}, is {_faster(held_out.ratio)} ({interval})"
            if held_out.ratio < 1.0:
                why += f", which is not beyond the noise floor of {noise:.1f} %"
    return Judgement(chosen, best_baseline, _sentence(times, chosen, base, best_baseline, ratio, why, rng), ratio, noise, unstable)


def _sentence(times: Times, chosen: str, base: str, best_baseline: str, ratio: Ratio, why: str, rng: np.random.Generator) -> str:
    if chosen == base:
        said = f"sequential kept ({base}): {why}."
    else:
        said = (
            f"{chosen} kept: {100 * (1 - ratio.ratio):.1f} % less time than {base}, the best sequential schedule "
            f"(95 % interval {100 * (1 - ratio.ci_high):.1f} to {100 * (1 - ratio.ci_low):.1f} %)."
        )
    if best_baseline != base and best_baseline != chosen:
        against = paired_ratio(times.columns[chosen], times.columns[best_baseline], rng)
        if against.ci_low > 1.0:
            said += f" {best_baseline} is faster still: what was kept takes {against.ratio:.2f} times as long; use {best_baseline} here."
        elif against.ci_high >= 1.0:
            said += f" {best_baseline} is equally fast within noise."
    return said


def _faster(ratio: float) -> str:
    return f"{100 * (1 - ratio):.1f} % faster" if ratio < 1 else f"{100 * (ratio - 1):.1f} % slower"


def _median(times: Sequence[float]) -> float:
    return float(np.median(times))
