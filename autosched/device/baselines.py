"""The model as it came, timed in this process: a baseline that is no schedule, one round at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autosched.core.records import Failure
from autosched.device.cpu_measure import TEAM_SPIN_S, no_collector, runs_lasting, warmed_us
from autosched.device.worker_child import describe
from autosched.runtime.thread_count import torch_threads
from autosched.runtime.trees import renewed_calls


class EagerBaseline:
    """The user's own model object, called in inference mode with a number of threads.

    Args:
        model, args, kwargs: the call that is timed.
        threads: intra-operator threads; this thread's own count is restored after each round.
        min_block_us: a round is the mean over as many calls as last at least this long, after one call that does not count
            (``cpu_measure.warmed_us``).
        restore: called after each call, untimed, where a call changes what the next one starts from.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        threads: int,
        min_block_us: float = 0.0,
        restore: Callable[[], None] | None = None,
    ) -> None:
        self.name = f"eager_{threads}"
        self._model = model
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._threads = threads
        self._min_block_us = min_block_us
        self._restore = restore
        self._failure: Failure | None = None

    def round_us(self) -> float | Failure:
        """One time in microseconds, so that the caller can interleave it with others'; after a ``Failure``, only failures come.

        An exception of the model is a failure, an interrupt is not.
        """
        if self._failure is not None:
            return self._failure
        try:
            with torch_threads(self._threads), torch.inference_mode(), no_collector():
                taken_us = warmed_us(self._calls_us, lambda once_us: runs_lasting(self._min_block_us, once_us))
        except Exception as error:
            self._failure = describe(error)
            return self._failure
        if self._threads > 1:
            # Our team's threads spin on for a moment, and would slow down whatever another process times next.
            time.sleep(TEAM_SPIN_S)
        return taken_us

    def _calls_us(self, calls: int) -> float:
        return calls_us(self._model, renewed_calls(self._args, self._kwargs, calls), self._restore)


def calls_us(
    run: Callable[..., Any], waiting: list[tuple[tuple[Any, ...], dict[str, Any]]], restore: Callable[[], None] | None = None
) -> float:
    """Mean time of a call, microseconds.

    Args:
        waiting: the calls; none is left.
        restore: called after each, untimed.
    """
    calls = len(waiting)
    if restore is None:
        return _together_us(run, waiting) / calls
    taken_us = 0.0
    while waiting:
        try:
            taken_us += _together_us(run, [waiting.pop()])
        finally:
            restore()
    return taken_us / calls


def _together_us(run: Callable[..., Any], waiting: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> float:
    start_ns = time.perf_counter_ns()
    while waiting:
        args, kwargs = waiting.pop()
        run(*args, **kwargs)
    return max(1, time.perf_counter_ns() - start_ns) / 1000.0
