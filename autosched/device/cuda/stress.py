"""Replaying one plan under conditions that make a race visible: delays put into it, unused memory poisoned, inputs changing.

A graph that passes proves nothing by itself; the delays decide what can be seen. Which to inject is
``autosched.verify.race_stress``'s business; here they are captured and replayed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autosched.core.graph import ValueRole
from autosched.core.records import Failure
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.cuda.streams import Tensor
from autosched.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class DelaySet:
    """Operators to delay in one capture: ``(operator, microseconds)`` pairs; empty for none."""

    delays: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StressOutcome:
    """Replays of one capture, and how many gave other outputs (to the bit) than the same operators on one stream."""

    replays: int
    mismatches: int


def stress_plan(
    measurer: CudaMeasurer,
    plan: Plan,
    delay_sets: Sequence[DelaySet],
    input_sets: Sequence[Sequence[Tensor]],
    *,
    replays: int,
    seed: int,
) -> Iterator[StressOutcome | Failure]:
    """For each delay set, capture the plan with it and replay it ``replays`` times on changing inputs.

    A plan and no schedule: tests have one that is wrong on purpose.
    """
    rng = random.Random(seed)
    references = [measurer.reference(inputs, plan) for inputs in input_sets]
    for delay_set in delay_sets:
        measurer.beat(-1)
        # A pool of its own: whatever in it no tensor holds is this graph's to poison.
        pool = measurer.backend.new_pool()
        options = CaptureOptions(delays=dict(delay_set.delays))
        program = measurer.variants.program(plan)
        runner = measurer.capturer.capture(program, plan, measurer.static, graph=measurer.graph, pool=pool, options=options)
        if isinstance(runner, Failure):
            yield runner
            continue
        mismatches = 0
        for _ in range(replays):
            measurer.beat(-1)
            chosen = rng.randrange(len(input_sets))
            poison(measurer, runner)
            made = measurer.outputs(runner, input_sets[chosen])
            mismatches += not measurer.backend.same(made, references[chosen])
        runner.close()
        yield StressOutcome(replays, mismatches)
    measurer.backend.release_cached()


def poison(measurer: CudaMeasurer, runner: GraphRunner) -> None:
    """Fill the runner's pool and outputs with NaN patterns, so that a value read before it is written shows.

    Without it a replay would find the right values of the replay before.
    """
    backend = measurer.backend
    spans = list(backend.pool_spans(runner.pool, unused=True))
    values = measurer.graph.values
    for value, tensor in zip(measurer.graph.outputs, runner.outputs, strict=True):
        if values[values[value].storage].role in (ValueRole.INTERMEDIATE, ValueRole.INTERNAL):
            spans.append(backend.span(tensor))
    with backend.on(measurer.replay_stream):
        backend.poison(spans)
    backend.synchronize()
