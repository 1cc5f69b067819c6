"""What a job must keep of its budget while compilers are at work: the least that it takes to measure, prove and judge."""

from __future__ import annotations

import time

from autosched.core.records import Failure
from autosched.core.schedule import sequential
from autosched.pipeline.preparing import Prepared
from autosched.pipeline.timetable import LEAST_ROWS, Timetable

# Turns of a schedule before the final comparison: a round of operators alone in two lowerings of some six columns each, three of their
# sequential orders, and what proofs and the model's own answers take.
_BEFORE_TURNS = 60


def reserve_s(prepared: Prepared) -> float:
    """Seconds for the least that follows compiling, by the pace at which ``prepared`` runs in order; 0 where that is a GPU's.

    A model that takes a tenth of a second has the better part of a minute of it. What is learnt here is not measured again: the orders are
    ready then for whoever times them next.
    """
    session, graph = prepared.session, prepared.captured.program.graph
    if not session.limits.lanes_matter:
        return 0.0
    widths = session.limits.widths
    orders = [sequential(graph, width=width) for width in dict.fromkeys((widths[0], widths[-1]))]
    if isinstance(session.paired(orders, rounds=1), Failure):
        return 0.0
    begin_s = time.monotonic()
    session.paired(orders, rounds=1)
    timetable = Timetable.starting(0.0)
    timetable.pace.timed(time.monotonic() - begin_s, len(orders))
    return timetable.verdict_s(LEAST_ROWS) + timetable.work_s(0, _BEFORE_TURNS)
