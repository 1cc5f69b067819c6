"""What a job must keep of its budget while compilers are at work: the least that it takes to measure, prove and judge."""

from __future__ import annotations

import math

from autosched.core.records import Failure
from autosched.core.schedule import sequential
from autosched.device.cpu_measure import SHORTEST_BLOCK_US
from autosched.pipeline.preparing import Prepared
from autosched.pipeline.timetable import LEAST_ROWS, Timetable

# Turns of a schedule before the final comparison: a round of operators alone in two lowerings of some six columns each, three of their
# sequential orders, and what proofs and the model's own answers take.
_BEFORE_TURNS = 60


def reserve_s(prepared: Prepared, spare_s: float) -> float:
    """Seconds for the least that follows compiling, by the pace at which ``prepared`` runs in order; 0 where that is a GPU's.

    A model that takes a tenth of a second has the better part of a minute of it. The faster of two orders counts, on one thread and on
    all: the other may take many times as long on a busy machine, and is then out of most rounds. What is made ready for this is not made
    again for whoever times these orders next.

    Args:
        spare_s: what is not the compilers' anyway. If it is enough by the order on one thread, the other is not looked at.
    """
    session, graph = prepared.session, prepared.captured.program.graph
    if not session.limits.lanes_matter:
        return 0.0
    needed_s = math.inf
    for width in dict.fromkeys((session.limits.widths[0], session.limits.widths[-1])):
        answer = session.paired([sequential(graph, width=width)], rounds=1)
        if not isinstance(answer, Failure):
            needed_s = min(needed_s, _least_s(answer[0][0]))
        if needed_s <= spare_s:
            break
    return needed_s if needed_s < math.inf else 0.0


def _least_s(run_us: float) -> float:
    """What the least takes where a run takes so long."""
    timetable = Timetable.starting(0.0)
    # One run that does not count, and a block.
    timetable.pace.timed((run_us + max(run_us, SHORTEST_BLOCK_US)) / 1e6, 1)
    return timetable.verdict_s(LEAST_ROWS) + timetable.work_s(0, _BEFORE_TURNS)
