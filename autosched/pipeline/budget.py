"""Effort presets: what a tuning job may spend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from numbers import Real

from autosched.core.errors import UsageError
from autosched.search.effort import PROFILES, Effort, EffortProfile

SOLO_SHARE = 0.1
"""Share of a budget in which all rounds of operators alone are made; where they would take longer, there are fewer."""

MOST_SOLO_SHARE = 0.4
"""Share that they never have more of, however few there are."""

# More is a slip of the unit, and the job would never come to an end of its own.
_LONGEST_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a job may spend. Seconds are for measuring and searching together; the rest are shares and counts.

    Args:
        total_s: the whole job after capture.
        solo_rounds: rounds of timing every operator alone, at each width; fewer where they take more than ``SOLO_SHARE``.
        pair_share: share of ``total_s`` spent on pairs.
        search: simulated schedules, and the device loop's measurements.
        final_rounds: interleaved rounds of the final comparison, if time allows.
        compiled_baseline: whether ``torch.compile`` with freezing is measured too; it takes a minute or more to compile.
        compile_share: most of ``total_s`` that goes to compiling, where a job tries several lowerings. What a lowering costs or gains is
            larger than what lanes do, so a short job spends more than half of itself on it.
    """

    total_s: float
    solo_rounds: int
    pair_share: float
    search: EffortProfile
    final_rounds: int
    compiled_baseline: bool
    compile_share: float = 0.5


def budget_for(effort: str, total_s: float | None = None) -> Budget:
    """The preset ``effort``, with another total if one is given.

    Raises:
        UsageError: if there is no such preset, or the total is negative or longer than anybody waits.
    """
    presets = {
        Effort.QUICK: Budget(60.0, 12, 0.15, PROFILES[Effort.QUICK], 24, False, 0.6),
        Effort.BALANCED: Budget(150.0, 30, 0.25, PROFILES[Effort.BALANCED], 40, True, 0.4),
        Effort.FULL: Budget(1200.0, 60, 0.30, PROFILES[Effort.FULL], 80, True, 0.25),
    }
    if not isinstance(effort, str) or effort not in presets:
        raise UsageError(f"effort is {effort!r}; expected one of {', '.join(presets)}")
    preset = presets[Effort(effort)]
    if total_s is None:
        return preset
    given: object = total_s  # a caller in Python may give anything
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) < float("inf"):
        raise UsageError(f"the budget is {given!r}, in seconds; expected a finite number of seconds that is not negative")
    if float(given) > _LONGEST_S:
        raise UsageError(f"the budget is {given!r}, in seconds; expected at most 30 days, {_LONGEST_S:.0f}")
    return dataclasses.replace(preset, total_s=float(given))
