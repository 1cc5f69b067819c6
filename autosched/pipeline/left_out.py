"""What a job had no time for, and the budget that would have had it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_STEP_S = 10


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One thing that was left out.

    Args:
        what: for a sentence, for example ``the device loop``.
        more_s: seconds that the job's budget is too small by for this and all before it, as far as this run could tell.
        told: whether it could; if not, ``more_s`` is not believed.
    """

    what: str
    more_s: float
    told: bool = True


def after(first: Sequence[LeftOut], rest: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
    """Both, where what ``rest`` lacks comes on top of what ``first`` would take."""
    taken_s = max((item.more_s for item in first if item.told), default=0.0)
    return (*first, *(replace(item, more_s=item.more_s + taken_s) for item in rest))


def left_out_sentence(items: Sequence[LeftOut], budget_s: float) -> str:
    """What was left out, and the least round budget that has the time for all of it; empty if nothing was.

    Args:
        budget_s: that of the whole job.

    >>> left_out_sentence([LeftOut("the device loop", 12.0), LeftOut("tuning fused as well", 31.0)], 60.0)
    'left out for want of time: the device loop and tuning fused as well; --budget 100s should include all of it'
    >>> left_out_sentence([LeftOut("the lowering fused", 0.0, told=False)], 60.0)
    'left out for want of time: the lowering fused; it takes a --budget above 60s, and this run cannot tell how far above'
    """
    if not items:
        return ""
    names = list(dict.fromkeys(item.what for item in items))
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    wanted_s = _STEP_S * math.ceil((budget_s + max((item.more_s for item in items if item.told), default=0.0)) / _STEP_S)
    if not all(item.told for item in items):
        return f"left out for want of time: {listed}; it takes a --budget above {wanted_s}s, and this run cannot tell how far above"
    return f"left out for want of time: {listed}; --budget {wanted_s}s should include all of it"
