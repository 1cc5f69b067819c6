"""What operators are given when they run alone: the values of one run, all of them or few, as there is memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import torch

from autosched.core.frames import empty_frames
from autosched.core.graph import OpGraph
from autosched.core.schedule import sequential
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import Launchable, Slots
from autosched.runtime.cuda.streams import Tensor
from autosched.runtime.no_memory import lacks_memory
from autosched.runtime.plan import make_plan


class RunValues:
    """Every value of one run, held until :meth:`drop`; where there is no memory for that, what was asked for last.

    Args:
        static: the program's inputs.
        beat: called before each operator.
    """

    def __init__(
        self, capturer: GraphCapturer, program: Launchable, graph: OpGraph, static: Sequence[Tensor], beat: Callable[[], None]
    ) -> None:
        self._capturer = capturer
        self._program = program
        self._graph = graph
        self._static = static
        self._beat = beat
        self._slots: Slots | None = None
        self._few = False

    def drop(self) -> None:
        """Hold nothing: the next who asks has the program run once more."""
        self._slots = None

    def read_by(self, operators: Collection[int]) -> Slots:
        """Slots with what ``operators`` read. Not to be asked for in a capture. Who captures with them holds them."""
        asked = [self._graph.operators[operator] for operator in operators]
        read = {value for operator in asked for value in (*operator.reads, *operator.mutates)}
        if self._slots is None or any(self._slots[value] is None for value in read):
            self._slots = None
            self._slots = self._run_for(read)
        return self._slots.copy()

    def _run_for(self, read: Collection[int]) -> Slots:
        if not self._few:
            try:
                return self._run(None)
            except Exception as error:
                if not lacks_memory(error):
                    raise
                empty_frames(error)
            self._few = True
            self._capturer.backend.release_cached()
        return self._run(read)

    def _run(self, keep: Collection[int] | None) -> Slots:
        slots = self._program.new_slots(self._static)
        backend = self._capturer.backend
        with torch.inference_mode(), backend.on(self._capturer.streams.named("warm-up")):
            for place, kernel in enumerate(self._program.kernels):
                self._beat()
                kernel(slots)
                for value in self._frees[place] if keep is not None else ():
                    if keep is not None and value not in keep:
                        slots[value] = None
        backend.synchronize()
        return slots

    @cached_property
    def _frees(self) -> Sequence[Sequence[int]]:
        return [step.frees for step in make_plan(self._graph, sequential(self._graph)).steps]
