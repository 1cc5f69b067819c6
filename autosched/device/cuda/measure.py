"""What is timed on CUDA streams, inside the measuring process: operators alone, whole schedules, and their numbers.

Everything goes through :class:`~autosched.runtime.cuda.streams.StreamBackend`, so the same code runs on the test double. Times come from
events: around back-to-back replays for schedules, inside the graph for operators, where a launch would drown a short kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, Failure, Samples, ScheduleRecord, SoloRecord
from autosched.core.schedule import Schedule, canonical_key
from autosched.core.variants import variant_signature
from autosched.device.cuda.launches import launched_us
from autosched.device.cuda.values import RunValues
from autosched.device.cuda.variants import CapturedVariants
from autosched.device.cuda.waking import Waker
from autosched.device.timing import summarize
from autosched.device.worker_child import describe
from autosched.runtime.calls import Kernel
from autosched.runtime.cuda.failures import failure_of
from autosched.runtime.cuda.graph import GraphCapturer
from autosched.runtime.cuda.lanes import CaptureOptions, Launchable, Slots
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.cuda.streams import Event, Graph, Stream, StreamBackend, Tensor
from autosched.runtime.plan import FreeRule, Plan, make_plan
from autosched.runtime.regions.library import RegionLibrary

# Copies of an operator in one graph: enough that the two time stamps around them do not matter, few enough to capture quickly.
_FIRST_COPIES = 20
_MOST_COPIES = 200
_CHAIN_US = 400.0
# Shortest block of back-to-back replays between two events, unless asked otherwise: events resolve about half a microsecond.
_BLOCK_US = 1000.0
# Two stamps can be closer than the clock resolves (a view launches nothing); no record may hold a time of zero.
_RESOLUTION_US = 1e-3
_TRACE_REPLAYS = 5
_IDLE_S = 1.0

Contaminated = Callable[[], Contamination]


@dataclass(frozen=True, slots=True)
class Chain:
    """An instantiated graph of copies of operators, with the stamps around each lane's copies, and the values that it reads."""

    graph: Graph
    stamps: tuple[tuple[Event, Event], ...]
    values: Slots


class CudaMeasurer:
    """One program on one device.

    Args:
        program: what to launch; its constants are on the device.
        inputs: example inputs on the device; every measurement uses them.
        beat: told the item worked on, at least once a second.
        contamination: what else the machine is doing.
        regions: where variants other than the operators' calls come from.
    """

    def __init__(
        self,
        capturer: GraphCapturer,
        program: Launchable,
        graph: OpGraph,
        inputs: Sequence[Tensor],
        *,
        beat: Callable[[int], None] = lambda item: None,
        contamination: Contaminated = Contamination,
        regions: RegionLibrary | None = None,
    ) -> None:
        self.capturer = capturer
        self.backend: StreamBackend = capturer.backend
        self.program = program
        self.graph = graph
        self._beat, self._item = beat, -1
        self.contamination = contamination
        self.variants = CapturedVariants(capturer, program, graph, regions, self.values)
        self.static = [self.backend.static_like(tensor) for tensor in inputs]
        self.load_inputs(inputs)
        self._values = RunValues(capturer, program, graph, self.static, lambda: self.beat(-1))
        self._solo: dict[str, float] = {}
        self._runners: dict[tuple[str, int], GraphRunner] = {}
        self._waker = Waker(self.backend, lambda: self.replay_stream, _IDLE_S)

    def beat(self, item: int) -> None:
        """Show progress with ``item``; -1: with nothing in particular."""
        self._item = item
        self._beat(item)

    def load_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Copy ``inputs`` into the static buffers that every graph of this program reads."""
        with self.backend.on(self.replay_stream):
            self.backend.copy(self.static, inputs)
        self.backend.synchronize()

    @property
    def replay_stream(self) -> Stream:
        """Where graphs are launched for timing."""
        return self.capturer.streams.named("replay")

    def values(self, operators: Collection[int]) -> Slots:
        """Slots with what ``operators`` read, each when it runs alone; see :class:`RunValues`."""
        item = self._item
        slots = self._values.read_by(operators)
        if self._item != item:
            self.beat(item)
        return slots

    def wake(self) -> None:
        """Raise the device's clock if nothing was timed for a while. Before every request, and when many captures are over."""
        self._waker.wake()

    # -- one operator -------------------------------------------------------------------------------------------------
    def solo(self, repeats: int, skip: Sequence[int] = (), variant: int = 0, first: int = 0) -> Iterator[tuple[int, SoloRecord | Failure]]:
        """Every operator alone in one variant with a warm cache; operators of one signature share a record.

        ``first`` is the item of the first operator, ``skip`` are items, as in ``SoloRequest``.
        """
        known: dict[str, SoloRecord | Failure] = {}
        for operator in self.graph.operators:
            if first + operator.index in skip:
                continue
            if operator.signature not in known:
                self.beat(first + operator.index)
                try:
                    samples = self.solo_samples(operator.index, repeats, variant)
                except Exception as error:
                    samples = describe(error)
                if isinstance(samples, Failure):
                    known[operator.signature] = samples
                else:
                    name = variant_signature(operator.signature, variant)
                    known[operator.signature] = SoloRecord(name, 1, samples, self.contamination())
            yield operator.index, known[operator.signature]

    def solo_samples(self, operator: int, repeats: int, variant: int = 0) -> Samples | Failure:
        """``repeats`` times of one operator, each the mean over a chain of copies in one graph."""
        if isinstance(refusal := self.variants.kernel(operator, variant), Failure):
            return refusal
        copies = _FIRST_COPIES
        chain = self.chain([(operator, copies)], [variant])
        if isinstance(chain, Failure):
            return chain
        self.replay(chain.graph)
        first_us = self.lane_us(chain, 0) / copies
        wanted = int(_CHAIN_US / max(first_us, _RESOLUTION_US))
        if wanted >= 2 * copies:
            self.release(chain)
            copies = min(_MOST_COPIES, wanted)
            chain = self.chain([(operator, copies)], [variant])
            if isinstance(chain, Failure):
                return chain
            self.replay(chain.graph)
        times = []
        for _ in range(repeats):
            self.replay(chain.graph)
            times.append(max(self.lane_us(chain, 0) / copies, _RESOLUTION_US))
        self.release(chain)
        samples = summarize(times)
        self._solo[variant_signature(self.graph.operators[operator].signature, variant)] = samples.median_us
        return samples

    def solo_us(self, operator: int, variant: int = 0) -> float | Failure:
        """Time of one operator alone, measured once."""
        signature = variant_signature(self.graph.operators[operator].signature, variant)
        if signature not in self._solo:
            samples = self.solo_samples(operator, 5, variant)
            if isinstance(samples, Failure):
                return samples
        return self._solo[signature]

    def chain(self, lanes: Sequence[tuple[int, int]], variants: Sequence[int] = ()) -> Chain | Failure:
        """Capture, on lane ``i``, ``copies`` times ``operator`` for ``lanes[i] = (operator, copies)``; lanes are launched in order.

        Lane ``i`` is a branch of its own: fork{lane 0 | lane 1 | ...}join. A chain's copies run one after the other. ``variants`` are
        those of the operators, by lane; all 0 if empty.
        """
        kernels: list[Kernel] = []
        for place, (operator, _) in enumerate(lanes):
            kernel = self.variants.kernel(operator, variants[place] if variants else 0)
            if isinstance(kernel, Failure):
                return kernel
            kernels.append(kernel)
        backend, streams = self.backend, self.capturer.streams
        sides = [streams.lane(index) for index in range(len(lanes))]
        stamps: list[tuple[Event, Event]] = []

        def body() -> None:
            stamps.clear()
            for stream, (_, copies), kernel in zip(sides, lanes, kernels, strict=True):
                slots = held.copy()
                start, end = (backend.new_event(timing=True, in_graph=True) for _ in range(2))
                with backend.on(stream):
                    backend.record(start, stream)
                    for _ in range(copies):
                        kernel(slots)
                    backend.record(end, stream)
                stamps.append((start, end))

        held = self.values([operator for operator, _ in lanes])
        made = self.capturer.capture_script(sides, body)
        if isinstance(made, Failure):
            return made
        return Chain(made[0], tuple(stamps), held)

    def replay(self, graph: Graph) -> None:
        """Launch once and wait."""
        with self.backend.on(self.replay_stream):
            self.backend.replay(graph)
        self.backend.synchronize()
        self._waker.busy()
        # Progress with whatever is worked on: a chain of a slow operator may take seconds.
        self.beat(self._item)

    def lane_us(self, chain: Chain, lane: int) -> float:
        """Time between a lane's stamps in the last replay."""
        return self.backend.elapsed_us(*chain.stamps[lane])

    def release(self, chain: Chain) -> None:
        """Free a chain's graph."""
        self.backend.reset(chain.graph)

    # -- whole schedules ----------------------------------------------------------------------------------------------
    def runner(self, schedule: Schedule, copy: int = 0) -> GraphRunner | Failure:
        """The schedule as a graph in the scratch pool, captured once for each ``copy``."""
        key = self._key(schedule), copy
        if key not in self._runners:
            made = self.capture(schedule)
            if isinstance(made, Failure):
                return made
            with self.backend.on(self.replay_stream):
                made.replay()
            self.backend.synchronize()
            self._runners[key] = made
        return self._runners[key]

    def _key(self, schedule: Schedule) -> str:
        return canonical_key(self.graph, schedule, lanes_matter=False)

    def capture(
        self,
        schedule: Schedule,
        *,
        rule: FreeRule = FreeRule.VECTOR_CLOCK,
        options: CaptureOptions | None = None,
        private: bool = False,
    ) -> GraphRunner | Failure:
        """Capture a schedule under any rule and options; ``private`` gives it a pool of its own."""
        plan = make_plan(self.graph, schedule, rule)
        pool = self.backend.new_pool() if private else self.capturer.scratch_pool()
        program = self.variants.program(plan)
        # As much as many schedules hold, and no use to them; whatever runs an operator alone makes them again, in one run.
        self._values.drop()
        return self.capturer.capture(program, plan, self.static, graph=self.graph, pool=pool, options=options)

    def drop_runners(self) -> None:
        """Free every graph kept for reuse."""
        for runner in self._runners.values():
            runner.close()
        self._runners = {}

    def schedules(
        self, schedules: Sequence[Schedule], rounds: int, trace: bool, min_block_us: float, seed: int
    ) -> Iterator[tuple[int, ScheduleRecord | Failure]]:
        """Time schedules, interleaved in a random order in every round."""
        runners = [self._try_runner(index, schedule) for index, schedule in enumerate(schedules)]
        times = self._interleave(runners, rounds, min_block_us, seed)
        contamination = self.contamination()
        for index, (schedule, runner) in enumerate(zip(schedules, runners, strict=True)):
            self.beat(index)
            if isinstance(runner, Failure):
                yield index, runner
                continue
            starts, ends = self._trace(schedule) if trace else ((), ())
            yield index, ScheduleRecord(self._key(schedule), summarize(times[index]), runner.peak_bytes, contamination, starts, ends)
        self.drop_runners()

    def paired(self, schedules: Sequence[Schedule], rounds: int, seed: int) -> list[list[float]] | Failure:
        """Raw times, ``[len(schedules)][rounds]``; a failure of one is a failure of all.

        A schedule that is named twice is captured twice: whoever loads it captures it again, in other memory, and what that changes is
        noise to a comparison of two schedules. Times of one graph would not show it.

        Their graphs are kept for as long as the same schedules are asked for: a comparison takes a few rounds at a time, and capturing a
        thousand operators takes longer than those. Another selection is captured afresh, so that no graph's place in memory decides twice.
        """
        keys = [self._key(schedule) for schedule in schedules]
        if set(keys) != {key for key, _ in self._runners}:
            self.drop_runners()
        runners = []
        for index, schedule in enumerate(schedules):
            runner = self._try_runner(index, schedule, keys[:index].count(keys[index]))
            if isinstance(runner, Failure):
                return runner
            runners.append(runner)
        return self._interleave(runners, rounds, 0.0, seed)

    def _try_runner(self, index: int, schedule: Schedule, copy: int = 0) -> GraphRunner | Failure:
        self.beat(index)
        try:
            return self.runner(schedule, copy)
        except Exception as error:
            return failure_of(error, "preparing the schedule")

    def _interleave(self, runners: Sequence[GraphRunner | Failure], rounds: int, min_block_us: float, seed: int) -> list[list[float]]:
        rng = random.Random(seed)
        times: list[list[float]] = [[] for _ in runners]
        alive = [(index, runner) for index, runner in enumerate(runners) if isinstance(runner, GraphRunner)]
        # Capturing them has kept the device waiting, for seconds where they are many.
        self.wake()
        blocks = {index: self._block_length(index, runner, min_block_us) for index, runner in alive}
        for _ in range(rounds):
            for index, runner in rng.sample(alive, len(alive)):
                self.beat(index)
                times[index].append(max(self._block_us(runner, blocks[index]), _RESOLUTION_US))
        return times

    def _block_length(self, index: int, runner: GraphRunner, min_block_us: float) -> int:
        """Replays in a block: the first blocks also bring clocks and caches to where the others find them."""
        # The item of before is whichever was captured last.
        self.beat(index)
        once = min(self._block_us(runner, 3) for _ in range(2))
        return max(1, min(2000, int(max(min_block_us, _BLOCK_US) / max(once, _RESOLUTION_US)) + 1))

    def _block_us(self, runner: GraphRunner, replays: int) -> float:
        time_us = launched_us(self.backend, self.replay_stream, runner.replay, replays)
        self._waker.busy()
        return time_us

    def _trace(self, schedule: Schedule) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Start and end of each operator, from a graph with a time stamp around every one: a few percent slower, so only for traces."""
        made = self.capture(schedule, options=CaptureOptions(stamps=True))
        if isinstance(made, Failure):
            return (), ()
        backend, stream = self.backend, self.replay_stream
        best: dict[int, tuple[float, float]] = {}
        shortest = float("inf")
        for _ in range(_TRACE_REPLAYS):
            start = backend.new_event(timing=True)
            with backend.on(stream):
                backend.record(start, stream)
                made.replay()
            backend.synchronize()
            found = made.operator_times(start)
            length = max(end for _, end in found.values()) - min(begin for begin, _ in found.values())
            if length < shortest:
                best, shortest = found, length
        made.close()
        origin = min(begin for begin, _ in best.values())
        order = range(len(self.graph))
        return tuple(best[index][0] - origin for index in order), tuple(best[index][1] - origin for index in order)

    # -- numbers ------------------------------------------------------------------------------------------------------
    def reference(self, inputs: Sequence[Tensor], plan: Plan | None = None) -> list[Tensor]:
        """The same operators, in the graph's own order, in the variants of ``plan``, on one stream that nothing else uses."""
        program = self.program if plan is None else self.variants.pure(plan)
        with torch.inference_mode(), self.backend.on(self.capturer.streams.named("warm-up")):
            # A library that chooses its kernels anew, by timing them at that, takes seconds for each.
            outputs = self.backend.clone(program.run(inputs, lambda: self.beat(self._item)))
        self.backend.synchronize()
        return outputs

    def outputs(self, runner: GraphRunner, inputs: Sequence[Tensor]) -> list[Tensor]:
        """One replay on ``inputs``, as clones; what lies in a static buffer that the next replay overwrites, as that buffer."""
        with self.backend.on(self.replay_stream):
            made = runner(inputs)
        self.backend.synchronize()
        return made

    def close(self) -> None:
        """Free graphs and buffers."""
        self.drop_runners()
        self._values.drop()
