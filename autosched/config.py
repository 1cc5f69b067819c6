"""Settings and effort presets. The only file that reads environment variables."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autosched.core.errors import UsageError

if TYPE_CHECKING:
    from autosched.search.effort import EffortProfile


@dataclass(frozen=True, slots=True)
class Budget:
    """What a job may spend. Seconds are for measuring and searching together; the rest are shares and counts.

    Args:
        total_s: the whole job after capture.
        solo_rounds: rounds of timing every operator alone, at each width.
        pair_share: share of ``total_s`` spent on pairs.
        search: simulated schedules, and the device loop's measurements.
        final_rounds: interleaved rounds of the final comparison, if time allows.
        compiled_baseline: whether ``torch.compile`` with freezing is measured too; it takes a minute or more to compile.
    """

    total_s: float
    solo_rounds: int
    pair_share: float
    search: EffortProfile
    final_rounds: int
    compiled_baseline: bool


def budget_for(effort: str, total_s: float | None = None) -> Budget:
    """The preset ``effort``, with another total if one is given.

    Raises:
        UsageError: if there is no such preset, or the total is not positive.
    """
    from autosched.search.effort import PROFILES, Effort

    presets = {
        Effort.QUICK: Budget(40.0, 12, 0.15, PROFILES[Effort.QUICK], 24, False),
        Effort.BALANCED: Budget(150.0, 30, 0.25, PROFILES[Effort.BALANCED], 40, True),
        Effort.FULL: Budget(1200.0, 60, 0.30, PROFILES[Effort.FULL], 80, True),
    }
    if effort not in presets:
        raise UsageError(f"effort is {effort!r}; expected one of {', '.join(presets)}")
    preset = presets[Effort(effort)]
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


def compile_limit_s(default_s: float) -> float:
    """How long a ``torch.compile`` baseline may take to compile: ``AUTOSCHED_COMPILE_LIMIT_S`` (seconds), else the default.

    Raises:
        UsageError: if the variable holds no positive number.
    """
    given = os.environ.get("AUTOSCHED_COMPILE_LIMIT_S")
    if not given:
        return default_s
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < float("inf"):
        raise UsageError(f"AUTOSCHED_COMPILE_LIMIT_S is {given!r}; expected seconds, such as 120")
    return limit_s


def cache_dir() -> Path:
    """Where finished measurements and tuned schedules are kept: ``AUTOSCHED_CACHE``, else the platform's cache folder."""
    chosen = os.environ.get("AUTOSCHED_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("autosched", appauthor=False))


def schedules_dir() -> Path:
    """The cache of tuned schedules."""
    return cache_dir() / "schedules"


def runs_dir() -> Path:
    """What tuning jobs measured, by device: stores that ``autosched train`` learns from."""
    return cache_dir() / "runs"


def cost_models_dir() -> Path:
    """Cost models trained on this machine, by device."""
    return cache_dir() / "costmodel"
