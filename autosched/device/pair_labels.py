"""From when two operators started and ended beside each other to how much each slowed the other down: the labels of a pair."""

from __future__ import annotations

from dataclasses import dataclass

from autosched.core.records import MAX_SLOWDOWN


@dataclass(frozen=True, slots=True)
class Overlap:
    """One run of two loops together: when each started and ended, in microseconds from one origin."""

    first_start_us: float
    first_end_us: float
    last_start_us: float
    last_end_us: float


def directional_slowdowns(run: Overlap, solo_first_us: float, solo_last_us: float) -> tuple[float, float]:
    """Slowdown of the first-started and of the last-started, each over the time both were running.

    Work done outside the overlap was done at full speed, so what a loop achieved inside it is its solo time less its time alone; its
    slowdown is the overlap over that, capped at ``MAX_SLOWDOWN``. If they never overlapped although started together, the last one got
    nothing done beside the first: it has the cap.

    Args:
        run: with starts and ends of both.
        solo_first_us, solo_last_us: times of the same loops alone.

    *Source:* the pair labels of this project; with simultaneous starts they are t'_a / t_a for the one that ends first and
    t'_a / (t_b - (t'_b - t'_a)) for the other.

    >>> directional_slowdowns(Overlap(0.0, 20.0, 0.0, 30.0), 10.0, 20.0)
    (2.0, 2.0)
    """
    begin = max(run.first_start_us, run.last_start_us)
    end = min(run.first_end_us, run.last_end_us)
    both_us = end - begin
    if both_us <= 0:
        return (run.first_end_us - run.first_start_us) / solo_first_us, MAX_SLOWDOWN
    slowdowns = []
    for start_us, end_us, solo_us in (
        (run.first_start_us, run.first_end_us, solo_first_us),
        (run.last_start_us, run.last_end_us, solo_last_us),
    ):
        achieved_us = solo_us - ((end_us - start_us) - both_us)
        slowdowns.append(MAX_SLOWDOWN if achieved_us <= both_us / MAX_SLOWDOWN else both_us / achieved_us)
    return slowdowns[0], slowdowns[1]
