"""Every schedule is proved once, before its first timing: by whom it was proposed and how often makes no difference."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, canonical_key
from autosched.device.base import Comparison, Session
from autosched.pipeline.candidates import Candidate, by_key, prove
from autosched.pipeline.measuring import Ledger, took_a_process
from autosched.pipeline.references import References
from autosched.pipeline.timetable import Pace
from autosched.search.heuristics.sequential import SEQUENTIAL, SEQUENTIAL_WIDE

OUT_OF_TIME = Failure(FailureKind.TIMEOUT, "not proved: the budget is spent")
"""Says nothing about the schedule."""

STATIC = (SEQUENTIAL.name, SEQUENTIAL_WIDE.name)
"""Strategies whose schedules are measured whatever was asked for: without them no speed-up means anything."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A proved schedule, under the names of all that proposed it (one at least)."""

    candidates: tuple[Candidate, ...]
    proof: Comparison

    @property
    def name(self) -> str:
        """The first of its names: what its times stand under."""
        return self.candidates[0].name

    @property
    def key(self) -> str:
        """Canonical."""
        return self.candidates[0].key

    @property
    def schedule(self) -> Schedule:
        """As the first proposed it."""
        return self.candidates[0].schedule

    @property
    def is_static(self) -> bool:
        """Whether it is a sequential one, which may be kept without a duel."""
        return any(candidate.name in STATIC for candidate in self.candidates)


class Prover:
    """Proves schedules of one graph on one session and remembers each verdict, good or bad, by canonical key."""

    def __init__(self, session: Session, graph: OpGraph, references: References, ledger: Ledger, pace: Pace) -> None:
        self._session = session
        self._graph = graph
        self._references = references
        self._ledger = ledger
        self._pace = pace
        self._proofs: dict[str, Comparison] = {}
        self._refuted: dict[str, Failure] = {}

    def refutation(self, schedule: Schedule, *, until_s: float = math.inf) -> Failure | None:
        """Why the schedule must not run, or None once it is proved.

        Args:
            until_s: ``time.monotonic`` after which nothing more is proved; what is not known then is :data:`OUT_OF_TIME`.
        """
        key = canonical_key(self._graph, schedule, lanes_matter=self._session.limits.lanes_matter)
        if key in self._proofs:
            return None
        if key not in self._refuted:
            begin_s = time.monotonic()
            if begin_s + self._pace.proof_s > until_s:
                return OUT_OF_TIME
            answer = prove(self._session, self._graph, schedule, self._references)
            if not isinstance(answer, Failure) or not took_a_process(answer):
                # What a process took to be found dead and replaced says nothing of the proofs to come.
                self._pace.proved(time.monotonic() - begin_s)
            self._ledger.count(answer)
            if not isinstance(answer, Failure):
                self._proofs[key] = answer
                return None
            self._refuted[key] = answer
        return self._refuted[key]

    def entries(self, candidates: Sequence[Candidate]) -> list[Entry]:
        """Those of ``candidates`` that are proved; equal ones as one entry."""
        return [Entry(tuple(group), self._proofs[key]) for key, group in by_key(candidates).items() if key in self._proofs]
