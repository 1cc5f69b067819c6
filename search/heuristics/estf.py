"""ESTF: of all operators that could start, the one with the earliest start goes next; two rules break ties and avoid contention.

Model inference as a resource-constrained project: time moves from event to event, at each event every operator that may start is a
candidate, and the candidate with the earliest start time starts. The published abstract names two heuristic rules without stating
them; ours are: (1) among equal starts the longest remaining path first, (2) among equal starts the operator that costs its neighbours
least. In both an operator does not start beside others where the contention would cost both together more than twice its own time: that is
the resource limit of the project. One schedule for each rule.

*Source:* "Operator scheduling with resource contention" (ICPADS 2022 and the thesis of the same group), abstract only; the rules are
this project's reading.
"""

from __future__ import annotations

from autosched.core.schedule import Schedule
from autosched.search.policies import Decoder, Policy
from autosched.search.problem import Problem
from autosched.search.strategy import Rule, SearchContext

# Two equal operators that share the device perfectly cost each other twice their time in all: that is where overlap stops to pay.
BREAK_EVEN = 2.0
LONGEST_PATH = Policy(bottom=1.0, gate=BREAK_EVEN)
LEAST_CONTENTION = Policy(bottom=1e-3, alpha=1.0, gate=BREAK_EVEN)


def _estf(problem: Problem, context: SearchContext) -> list[Schedule]:
    # The published scheduler knows no widths: narrow operators only.
    decoder = Decoder(problem, context.lanes(problem), context.width_indices(problem)[:1])
    return list(dict.fromkeys(decoder.decode(rule).schedule(problem) for rule in (LONGEST_PATH, LEAST_CONTENTION)))


ESTF = Rule("estf", _estf)
