"""The final say: every candidate and every baseline timed in interleaved rounds, and what may be claimed from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autosched.core.progress import Progress
from autosched.core.records import Failure, Samples
from autosched.core.report import TimedRounds
from autosched.core.schedule import Schedule
from autosched.device.base import Session
from autosched.device.timing import RESTLESS_PCT, Ratio, beyond_noise, is_unstable, noise_floor_pct, paired_ratio, summarize

# Rounds between two looks at the clock; also how many of the schedules' are between two turns of the externals.
_CHUNK = 4
_FIRST_LATE = 3
LEAST_ROUNDS = 7
"""Rounds of a final comparison, however little time is left."""
LEAST_DUEL = 15
"""The same of the duel of the two best."""
# Its fastest time is so many times the anchor's slowest.
_HOPELESS = 2.0
_HARDLY_PCT = 1.0  # a difference that nobody would choose by, where the noise floor is lower still
CHANGED_PACE = "The machine changed its pace meanwhile; what is said of ratios is of single rounds, in which that cancels."
"""What to say where ratios are claimed and times by themselves say nothing."""


class External:
    """A baseline that is no schedule (the model as it came, or compiled): a name and one timed round at a time.

    ``round_us`` returns one time in microseconds, or a ``Failure`` after which it is not called again. ``note`` is what a reader of its
    figures should know, or empty.
    """

    def __init__(
        self,
        name: str,
        round_us: Callable[[], float | Failure],
        max_abs_error: float | None = None,
        *,
        peak_memory_bytes: int | None = None,
        note: str = "",
    ) -> None:
        self.name = name
        self.round_us = round_us
        self.max_abs_error = max_abs_error
        self.peak_memory_bytes = peak_memory_bytes
        self.note = note


@dataclass(frozen=True, slots=True)
class Times:
    """Raw times of everything, in rounds: ``columns[name][round]`` microseconds, or why there are none; ``again`` is a second
    column of ``anchor``."""

    columns: dict[str, list[float]]
    failures: dict[str, Failure]
    anchor: str
    again: list[float]

    def samples(self, name: str) -> Samples | None:
        """Median and interval of one name, if it was timed."""
        column = self.columns.get(name)
        return summarize(column) if column else None

    def ratio(self, name: str, other: str) -> Ratio:
        """What ``name`` takes of what ``other`` takes in the same rounds, as far as both were in them."""
        above, below = self.columns[name], self.columns[other]
        count = min(len(above), len(below))
        return paired_ratio(above[:count], below[:count])

    def rounds(self) -> tuple[TimedRounds, ...]:
        """For a report, to a hundredth of a microsecond: no clock here is finer."""
        columns = [*self.columns.items(), (self.anchor, self.again)]
        return tuple(
            TimedRounds(name, tuple(round(time_us, 2) for time_us in column), again=place == len(self.columns))
            for place, (name, column) in enumerate(columns)
            if column
        )


def interleave(
    session: Session,
    schedules: Sequence[tuple[str, Schedule]],
    externals: Sequence[External],
    *,
    rounds: int,
    deadline: float,
    progress: Progress,
    anchor: str,
    stand_ins: Sequence[str] = (),
) -> Times:
    """Time everything in rounds until ``rounds`` are done or ``deadline`` (``time.monotonic``) has passed, but at least seven.

    ``anchor`` names the schedule that is run twice in every round: its two columns are the A/A test. Between two looks at the clock are
    four rounds, or fewer where not so many are left until ``deadline``. Half of the externals' times for these are taken before the
    schedules', half after them: all on one side, each would be the slower or the faster one of four pairs in a row wherever the machine
    changes its pace, and no interval allows for that. Where ``schedules`` fail together and none of them does alone, the first ones go on.
    Where the anchor itself fails, the first of ``stand_ins`` that is left takes its place, and the rounds begin anew: the A/A test must be
    of the rounds that the times are of. Where none is left, that is the end. Whoever takes twice as long at its best as
    the anchor at its worst is out once ``deadline`` has passed, with the times that it has: it may take most of a round, and is no rival.
    """
    alive = dict(schedules)
    active = {item.name: item for item in externals}
    columns: dict[str, list[float]] = {name: [] for name in [*alive, *active]}
    failures: dict[str, Failure] = {}
    again: list[float] = []
    done = uneven = 0
    begin_s = time.monotonic()
    while chunk := _chunk(done, rounds, LEAST_ROUNDS, begin_s, deadline):
        names = list(alive)
        # Of an odd number, the larger half comes after, then before.
        ahead = (chunk + uneven) // 2
        before = _outside(active, ahead, failures, backwards=True)
        answer = session.paired([*(alive[name] for name in names), alive[anchor]], rounds=chunk)
        if isinstance(answer, Failure):
            culprits = _find_culprits(session, alive, anchor, answer)
            failures.update(culprits)
            for name in culprits:
                alive.pop(name, None)
            if anchor not in alive:
                left = [name for name in stand_ins if name in alive]
                if not left:
                    break
                anchor, again, done, begin_s = left[0], [], 0, time.monotonic()
                columns = {name: [] for name in columns}
            continue
        after = _outside(active, chunk - ahead, failures)
        *first, repeated = answer
        for name, column in [*zip(names, first, strict=True), *before.items(), *after.items()]:
            columns[name].extend(column)
        again.extend(repeated)
        done += chunk
        uneven ^= chunk % 2
        if time.monotonic() >= deadline:
            most_us = _HOPELESS * max(columns[anchor])
            active = {name: item for name, item in active.items() if min(columns[name], default=0.0) <= most_us}
            alive = {name: item for name, item in alive.items() if min(columns[name]) <= most_us or name == anchor}
        progress.update(done=done, total=rounds)
    return Times({name: columns[name] for name in columns if name not in failures}, failures, anchor, again)


def _outside(active: dict[str, External], chunk: int, failures: dict[str, Failure], *, backwards: bool = False) -> dict[str, list[float]]:
    """So many times of each of ``active``, one after another; what fails moves from there to ``failures``."""
    found: dict[str, list[float]] = {}
    for name, item in reversed(list(active.items())) if backwards else list(active.items()):
        column: list[float] = []
        while name in active and len(column) < chunk:
            taken = item.round_us()
            if isinstance(taken, Failure):
                failures[name] = taken
                del active[name]
            else:
                column.append(taken)
        found[name] = column
    return found


def _chunk(done: int, rounds: int, least: int, begin_s: float, deadline: float) -> int:
    """How many rounds to make before the next look at the clock; 0 if no more fits after ``least`` of them, or none is wanted."""
    now_s = time.monotonic()
    fitting = rounds - done
    if not done and now_s >= deadline:
        # The first look tells who is no rival.
        return min(_FIRST_LATE, rounds)
    if done and now_s > begin_s:
        fitting = min(fitting, int((deadline - now_s) / ((now_s - begin_s) / done)))
    return max(0, min(_CHUNK, max(fitting, least - done), rounds - done))


def _find_culprits(session: Session, alive: dict[str, Schedule], anchor: str, whole: Failure) -> dict[str, Failure]:
    """Which schedules fail alone; if none does, the failure lies in running so many together, and the later half has to go."""
    found: dict[str, Failure] = {}
    for name, schedule in alive.items():
        answer = session.paired([schedule], rounds=1)
        if isinstance(answer, Failure):
            found[name] = answer
    others = [name for name in alive if name != anchor]
    return found or {name: whole for name in others[len(others) // 2 :] or [anchor]}


def claimable(ratio: Ratio, noise_pct: float, *, restless: bool) -> bool:
    """Whether a difference may be claimed of paired rounds: it is beyond their A/A floor, and where the machine changed its pace
    (``restless``), so that times by themselves say nothing, that floor is narrow.

    >>> claimable(Ratio(0.6, 0.5, 0.7, 40), 20.0, restless=True), claimable(Ratio(0.6, 0.5, 0.7, 40), 30.0, restless=True)
    (True, False)
    """
    return beyond_noise(ratio, noise_pct) and not (restless and noise_pct > RESTLESS_PCT)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is kept, and the sentence that says why.

    ``ratio`` is kept over best static schedule, 1.0 with itself. ``noise_pct`` is the A/A floor. ``restless``: whether times by themselves
    say nothing, since the machine changed its pace; ``unstable``: whether ratios within a round say nothing either.
    """

    chosen: str
    verdict: str
    ratio: Ratio
    noise_pct: float
    restless: bool
    unstable: bool


@dataclass(frozen=True, slots=True)
class Duel:
    """Fresh times of two finalists, and of the second one again (A/A), microseconds, round by round."""

    candidate_us: tuple[float, ...]
    base_us: tuple[float, ...]
    again_us: tuple[float, ...]

    @property
    def hopeless(self) -> bool:
        """Whether the candidate takes twice as long at its best as the other at its worst."""
        return min(self.candidate_us) > _HOPELESS * max(*self.base_us, *self.again_us)


def finalists(times: Times, candidates: Sequence[str], static: Sequence[str]) -> tuple[str | None, str]:
    """The fastest candidate (``None`` if none was timed) and the fastest static schedule, by pairs with the anchor.

    Where the machine goes at two paces, medians would often choose wrongly. A candidate that is chosen wrongly loses the duel, or a better
    one is not kept. A static schedule chosen wrongly loses it too, and then the better one has not been beaten.
    """
    rivals = [name for name in candidates if times.columns.get(name)]
    return _fastest(times, rivals) if rivals else None, _fastest(times, [name for name in static if times.columns.get(name)])


def _fastest(times: Times, names: Sequence[str]) -> str:
    """Of these, all timed, the one that takes the least of what the anchor takes in the same round."""
    return min(names, key=lambda name: times.ratio(name, times.anchor).ratio)


def duel(session: Session, candidate: Schedule, base: Schedule, *, rounds: int, seconds: float) -> Duel | Failure:
    """Time two finalists alone: the fastest of many is partly the luckiest, so it must win again on times it was not chosen by.

    Two schedules cost little, so there are twice as many rounds as in the comparison, within ``seconds`` but at least fifteen, or seven
    where the candidate takes twice as long at its best as the other at its worst: on a machine whose cores others have, all of those that
    use several threads may, and each round would take seconds.
    """
    columns: tuple[list[float], list[float], list[float]] = ([], [], [])
    fought = Duel((), (), ())
    begin_s = time.monotonic()
    while chunk := _chunk(len(columns[0]), max(2 * rounds, LEAST_DUEL), LEAST_DUEL, begin_s, begin_s + seconds):
        answer = session.paired([candidate, base, base], rounds=chunk)
        if isinstance(answer, Failure):
            return answer
        for column, taken in zip(columns, answer, strict=True):
            column.extend(taken)
        fought = Duel(tuple(columns[0]), tuple(columns[1]), tuple(columns[2]))
        if len(fought.base_us) >= LEAST_ROUNDS and time.monotonic() - begin_s >= seconds and fought.hopeless:
            break
    return fought


def judge(
    times: Times, candidates: Sequence[str], static: Sequence[str], externals: Sequence[str], fought: Duel | Failure | None
) -> Judgement:
    """Keep the fastest candidate if it beats the fastest static schedule beyond noise; else keep that one.

    Args:
        candidates: names of schedules that a search found.
        static: names of sequential schedules, any of which may be kept instead.
        externals: names of baselines that are no schedules and cannot be kept.
        fought: the duel of the :func:`finalists`; ``None`` if there was no candidate.

    A candidate must be faster in the duel by more than its A/A floor, with its 95 % interval below 1. On a machine that changes its pace
    both are of rounds, in which that cancels, and one that is slower by as much has lost as surely; where not even the A/A floor is narrow,
    nothing is said of it, unless its interval lies above twice the other's time, or it takes that at its best, of the other's longest.
    """
    best, base = finalists(times, candidates, static)
    outside = [name for name in externals if times.columns.get(name)]
    not_searched = _fastest(times, [base, *outside])
    chosen, ratio = base, Ratio(1.0, 1.0, 1.0, len(times.columns[base]))
    restless = unstable = False
    floor = noise = noise_floor_pct(times.columns[times.anchor], times.again)
    if best is None or fought is None:
        restless = unstable = is_unstable(times.columns[base])
        why = "no candidate could be measured" if candidates else "nothing else to choose from"
    elif isinstance(fought, Failure):
        why = f"the best candidate, {best}, failed in the final measurement ({fought.kind}: {fought.detail})"
    else:
        noise = noise_floor_pct(fought.base_us, fought.again_us)
        restless = is_unstable(fought.base_us)
        result = paired_ratio(fought.candidate_us, fought.base_us)
        certain = claimable(result, noise, restless=restless)
        wins = certain and result.ratio < 1.0
        lost = fought.hopeless or (beyond_noise(result, noise) and result.ci_low > _HOPELESS)
        unstable = restless and not certain and not lost
        if unstable:
            why = f"the machine was too noisy to tell (best candidate {best}: {_faster(result.ratio)})"
        elif wins:
            chosen, ratio, why = best, result, ""
        else:
            interval = f"95 % interval {100 * (result.ci_low - 1):+.1f} to {100 * (result.ci_high - 1):+.1f} % time"
            why = f"the best candidate, {best}, is {_faster(result.ratio)} ({interval})"
            if result.ratio < 1.0:
                within = 100.0 * (1.0 - result.ratio) <= noise
                why += f", which is not beyond the noise floor of {noise:.1f} %" if within else ", which is not certain"
    said = _sentence(chosen, base, ratio, why)
    if not_searched not in (base, chosen):
        said += _against(times, chosen, not_searched, floor)
    if restless and not unstable:
        said += f" {CHANGED_PACE}"
    return Judgement(chosen, said, ratio, noise, restless, unstable)


def _sentence(chosen: str, base: str, ratio: Ratio, why: str) -> str:
    if chosen == base:
        return f"sequential kept ({base}): {why}."
    return (
        f"{chosen} kept: {100 * (1 - ratio.ratio):.1f} % less time than {base}, the best sequential schedule "
        f"(95 % interval {100 * (1 - ratio.ci_high):.1f} to {100 * (1 - ratio.ci_low):.1f} %)."
    )


def _against(times: Times, chosen: str, outside: str, floor_pct: float) -> str:
    """What is to be said of a baseline that cannot be kept, if it was the fastest of all; ``floor_pct`` is that of the comparison."""
    ratio = times.ratio(chosen, outside)
    if not beyond_noise(ratio, floor_pct):
        if 100.0 * abs(ratio.ratio - 1.0) <= max(floor_pct, _HARDLY_PCT):
            return f" {outside} is equally fast within noise."
        interval = f"95 % interval {ratio.ci_low:.2f} to {ratio.ci_high:.2f}"
        return f" Whether {outside} is faster is not certain: what was kept takes {ratio.ratio:.2f} times as long ({interval})."
    if ratio.ratio > 1.0:
        return f" {outside} is faster still: what was kept takes {ratio.ratio:.2f} times as long; use {outside} here."
    return ""


def _faster(ratio: float) -> str:
    return f"{100 * (1 - ratio):.1f} % faster" if ratio < 1 else f"{100 * (ratio - 1):.1f} % slower"
