"""The one loop that runs a plan, whatever runs it: worker threads, CUDA streams, a graph capture, or a test double.

A host that launches for all lanes walks ``plan.steps``; a worker thread walks ``plan.of_lane(lane)``. Both see, for each
operator: the waits, the launch, the record, the frees - in this order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from autosched.runtime.plan import Step


class Executor(Protocol):
    """What a device must be able to do to run a plan.

    All four are called from the thread that walks. ``wait`` makes the *lane* wait (on a CUDA device the host goes on);
    ``free`` drops the executor's last reference to each value.
    """

    def wait(self, step: Step, producer: int) -> None:
        """Make ``step.lane`` wait until operator ``producer``, on another lane, has finished."""

    def launch(self, step: Step) -> None:
        """Run ``step.operator`` on ``step.lane``."""

    def record(self, step: Step) -> None:
        """Let other lanes wait for ``step.operator``."""

    def free(self, step: Step) -> None:
        """Drop ``step.frees``."""


def walk(steps: Iterable[Step], executor: Executor) -> None:
    """Run ``steps`` in order on ``executor``."""
    for step in steps:
        for producer in step.waits:
            executor.wait(step, producer)
        executor.launch(step)
        if step.records:
            executor.record(step)
        if step.frees:
            executor.free(step)
