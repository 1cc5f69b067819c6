"""Settings and effort presets. The only file that reads environment variables."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path

from autosched.core.errors import UsageError


class Effort(enum.StrEnum):
    """How long a tuning job may take, in one word."""

    QUICK = "quick"
    BALANCED = "balanced"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a job may spend. Seconds are for measuring and searching together; the rest are shares and counts.

    Args:
        total_s: the whole job after capture.
        solo_rounds: rounds of timing every operator alone, at each width.
        pair_share: share of ``total_s`` spent on pairs.
        evaluations: simulator evaluations for one search.
        loop_rounds: rounds of the device loop (search, measure, correct).
        candidates: schedules that reach the device in each of them.
        first_rounds, finalists: of successive halving among those candidates.
        final_rounds: interleaved rounds of the final comparison, if time allows.
        compiled_baseline: whether ``torch.compile`` with freezing is measured too; it takes a minute or more to compile.
    """

    total_s: float
    solo_rounds: int
    pair_share: float
    evaluations: int
    loop_rounds: int
    candidates: int
    first_rounds: int
    finalists: int
    final_rounds: int
    compiled_baseline: bool


_PRESETS = {
    Effort.QUICK: Budget(40.0, 12, 0.15, 20_000, 1, 12, 2, 4, 24, False),
    Effort.BALANCED: Budget(150.0, 30, 0.25, 100_000, 3, 32, 2, 4, 40, True),
    Effort.FULL: Budget(1200.0, 60, 0.30, 400_000, 6, 48, 4, 6, 80, True),
}


def budget_for(effort: str, total_s: float | None = None) -> Budget:
    """The preset ``effort``, with another total if one is given.

    Raises:
        UsageError: if there is no such preset, or the total is not positive.
    """
    import dataclasses

    try:
        preset = _PRESETS[Effort(effort)]
    except ValueError:
        raise UsageError(f"effort is {effort!r}; expected one of {', '.join(Effort)}") from None
    if total_s is None:
        return preset
    if not 0 <= total_s < float("inf"):
        raise UsageError(f"the budget is {total_s} s; expected a finite number of seconds that is not negative")
    return dataclasses.replace(preset, total_s=total_s)


def parse_seconds(text: str) -> float:
    """``90``, ``90s``, ``2m`` or ``1h`` as seconds.

    Raises:
        UsageError: for anything else.

    >>> parse_seconds("2m")
    120.0
    """
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    body, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(body) * unit
    except ValueError:
        raise UsageError(f"the budget is {text!r}; expected seconds, or a number with s, m or h, such as 90s") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"the budget is {text!r}; expected a finite number that is not negative")
    return seconds


def cache_dir() -> Path:
    """Where finished measurements and tuned schedules are kept: ``AUTOSCHED_CACHE``, else the platform's cache folder."""
    chosen = os.environ.get("AUTOSCHED_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("autosched", appauthor=False))
