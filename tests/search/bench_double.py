"""A device that is the block simulator with noise: what it answers depends on the schedule and on how often it was asked, only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, canonical_key
from autosched.search import leftover
from autosched.search.correction import Trace
from autosched.search.leftover import BlockKernels
from autosched.search.problem import Problem


class Killed(Exception):
    """The run was interrupted."""


class FakeBench:
    def __init__(
        self, problem: Problem, kernels: BlockKernels, *, noise: float = 0.01, traces: bool = True, fail: frozenset[str] = frozenset(),
        die_after: int | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.kernels, self.noise, self.traces = problem, kernels, noise, traces
        self.fail, self.die_after = fail, die_after
        self.times: dict[str, list[float]] = {}
        self.known_traces: dict[str, Trace] = {}
        self.runs = 0

    def key(self, schedule: Schedule) -> str:
        return canonical_key(self.problem.graph, schedule, lanes_matter=False)

    def measure(self, schedules: Sequence[Schedule], rounds: int) -> list[list[float] | Failure]:
        keys = [self.key(schedule) for schedule in schedules]
        assert len(set(keys)) == len(keys), "a canonical duplicate is measured twice"
        answers: list[list[float] | Failure] = []
        for schedule, key in zip(schedules, keys, strict=True):
            if key in self.fail:
                answers.append(Failure(FailureKind.OOM, "made to fail"))
                continue
            truth = leftover.simulate_compiled(self.problem, self.kernels, schedule).makespan_us
            before = len(self.times.get(key, ()))
            answer = []
            for number in range(before, before + rounds):
                if self.die_after is not None and self.runs >= self.die_after:
                    raise Killed
                seed = int(hashlib.sha256(f"{key} {number}".encode()).hexdigest()[:12], 16)
                answer.append(truth * float(np.exp(self.noise * np.random.default_rng(seed).standard_normal())))
                self.runs += 1
            answers.append(answer)
        # Only now: what an interrupted call had measured is lost, as a diary loses it.
        for key, found in zip(keys, answers, strict=True):
            if not isinstance(found, Failure):
                self.times.setdefault(key, []).extend(found)
        return answers

    def trace(self, schedules: Sequence[Schedule]) -> list[Trace | Failure]:
        if not self.traces:
            return [Failure(FailureKind.UNAVAILABLE, "no tracer")] * len(schedules)
        found: list[Trace | Failure] = []
        for schedule in schedules:
            run = leftover.simulate_compiled(self.problem, self.kernels, schedule)
            self.known_traces[self.key(schedule)] = Trace(run.start_us, run.end_us)
            found.append(self.known_traces[self.key(schedule)])
        return found
