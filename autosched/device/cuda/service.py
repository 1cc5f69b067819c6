"""How the measuring process of the CUDA device answers each request. What it measures with is handed in, so a double will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from autosched.core.errors import UsageError
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule, sequential
from autosched.device.base import Comparison
from autosched.device.cuda.groups import measure_group
from autosched.device.cuda.limits import measure_costs
from autosched.device.cuda.lost import require_device
from autosched.device.cuda.measure import CudaMeasurer
from autosched.device.cuda.messages import (
    CapturedBody,
    CapturedResult,
    FailedResult,
    MemoryBody,
    MemoryResult,
    ProfileResult,
    ProfilesBody,
    SettingsBody,
    StressedBody,
    StressedResult,
    TaintedResult,
    unwrap,
    wrap_answer,
)
from autosched.device.cuda.pairs import measure_pair
from autosched.device.cuda.profile import profile_operator
from autosched.device.cuda.repeating import not_repeatable, unrepeatable
from autosched.device.cuda.stress import stress_plan
from autosched.device.variants import columns_of, compile_regions, prepare_regions
from autosched.device.worker_child import describe
from autosched.device.worker_messages import (
    Answer,
    CompareAnswer,
    CompareRequest,
    ExtraAnswer,
    ExtraRequest,
    GroupAnswer,
    GroupsRequest,
    LimitsAnswer,
    LimitsRequest,
    OpenRequest,
    PairAnswer,
    PairedAnswer,
    PairedRequest,
    PairsRequest,
    PrepareRegionsRequest,
    RegionsRequest,
    Request,
    ScheduleAnswer,
    SchedulesRequest,
    SoloAnswer,
    SoloRequest,
)
from autosched.device.worker_tensors import read_in_order
from autosched.runtime.cuda.bindings import GraphBindings
from autosched.runtime.cuda.failures import failure_of
from autosched.runtime.cuda.lanes import CaptureOptions
from autosched.runtime.cuda.streams import Tensor
from autosched.runtime.float32 import rounded_as
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.numerics import compare
from autosched.runtime.plan import FreeRule, Plan, make_plan
from autosched.runtime.rounding import coarsest_of

_TIMED = (LimitsRequest, SoloRequest, PairsRequest, GroupsRequest, SchedulesRequest, PairedRequest)

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Bench:
    """Everything one open program is measured with.

    Args:
        to_device: moves CPU tensors to the device.
        draw: inputs on the device for a seed.
        exact: calls a function with reduced float32 precision (TF32) off; None where that makes no difference.
        bindings: None where cuda-bindings is missing.
        flushing: gives, for as long as it is open, something that launches what displaces the L2 cache.
    """

    measurer: CudaMeasurer
    inputs: Sequence[Tensor]
    to_device: Callable[[Sequence[torch.Tensor]], list[Tensor]]
    draw: Callable[[int], list[Tensor]]
    exact: Callable[[Callable[[], list[Tensor]]], list[Tensor]] | None = None
    bindings: GraphBindings | None = None
    flushing: Callable[[], AbstractContextManager[Callable[[], object]]] | None = None


class CudaService:
    """Answers requests about one program.

    Args:
        build: opens a program; called at the ``OpenRequest``.
        settings: applies the parent's settings; called before.
        beat: told the item worked on.
    """

    def __init__(
        self,
        build: Callable[[OpenRequest], Bench],
        settings: Callable[[SettingsBody], None],
        beat: Callable[[int], None],
    ) -> None:
        self._build = build
        self._settings = settings
        self._beat = beat
        self._bench: Bench | None = None

    def handle(self, request: Request) -> Iterator[Answer]:
        """Answer one request; afterwards look whether this process may go on."""
        troubled = False
        try:
            for answer in self._answers(request):
                if _may_be_lost(answer):
                    troubled = True
                    self._require_device()
                yield answer
        except Exception as error:
            self._require_device(error)
            # Whoever serves us turns the exception into the last answer, so this must come before.
            if self._is_tainted():
                yield wrap_answer(TaintedResult())
            raise
        if troubled and self._is_tainted():
            yield wrap_answer(TaintedResult())

    def _is_tainted(self) -> bool:
        return self._bench is not None and self._bench.measurer.capturer.tainted

    def _require_device(self, error: Exception | None = None) -> None:
        """End this process if the device is lost to it.

        Ending with the item still on the board blames that item and nothing else; a fresh process goes on with the rest.
        """
        if self._bench is not None:
            require_device(self._bench.measurer.backend, error)

    def _answers(self, request: Request) -> Iterator[Answer]:
        if isinstance(request, ExtraRequest) and (settings := unwrap(request, SettingsBody)) is not None:
            self._settings(settings)
            return
        if isinstance(request, OpenRequest):
            self._bench = self._build(request)
            return
        if self._bench is None:
            raise UsageError(f"{type(request).__name__} came before a program was opened")
        measurer = self._bench.measurer
        if isinstance(request, _TIMED):
            measurer.wake()
        match request:
            case LimitsRequest():
                costs = measure_costs(measurer)
                yield LimitsAnswer(costs.launch_gap_us, costs.cross_lane_us, costs.fixed_us)
            case SoloRequest():
                yield from self._solo(measurer, request)
            case PrepareRegionsRequest():
                yield from prepare_regions(measurer.variants.regions, len(measurer.graph), request, self._beat)
            case RegionsRequest():
                yield from compile_regions(measurer.variants.regions, len(measurer.graph), request, self._beat)
            case PairsRequest():
                pairs = self._each(measurer, request.pairs, lambda index, pair: measure_pair(measurer, pair, request.repeats, index))
                for index, pair in pairs:
                    yield PairAnswer(index, failure=pair) if isinstance(pair, Failure) else PairAnswer(index, pair)
            case GroupsRequest():
                groups = self._each(measurer, request.groups, lambda index, group: measure_group(measurer, group, request.repeats, index))
                for index, group in groups:
                    yield GroupAnswer(index, failure=group) if isinstance(group, Failure) else GroupAnswer(index, group)
            case SchedulesRequest():
                for index, made in measurer.schedules(request.schedules, request.rounds, request.trace, request.min_block_us, request.seed):
                    yield ScheduleAnswer(index, failure=made) if isinstance(made, Failure) else ScheduleAnswer(index, made)
            case PairedRequest():
                times = measurer.paired(request.schedules, request.rounds, request.seed)
                yield wrap_answer(FailedResult(times)) if isinstance(times, Failure) else PairedAnswer(tuple(tuple(row) for row in times))
            case CompareRequest():
                inputs, references = ([read_in_order(path) for path in paths] for paths in (request.inputs_files, request.references_files))
                yield self.compare(request.schedule, inputs, references)
            case ExtraRequest():
                yield from self._extra(self._bench, request)
            case _:
                raise UsageError(f"the measuring process of the CUDA device cannot answer {type(request).__name__}")

    @staticmethod
    def _solo(measurer: CudaMeasurer, request: SoloRequest) -> Iterator[Answer]:
        for place, (width, variant) in enumerate(columns_of(request)):
            if width != 1:
                for operator in measurer.graph.operators:
                    yield SoloAnswer(operator.index, place, failure=Failure(FailureKind.ILLEGAL, f"width {width}; expected 1 on CUDA"))
                continue
            for operator_index, made in measurer.solo(request.repeats, request.skip, variant, place * len(measurer.graph)):
                if isinstance(made, Failure):
                    yield SoloAnswer(operator_index, place, failure=made)
                else:
                    yield SoloAnswer(operator_index, place, made)

    @staticmethod
    def _each(measurer: CudaMeasurer, items: Sequence[Item], measure: Callable[[int, Item], Made]) -> Iterator[tuple[int, Made | Failure]]:
        """Measure one item after the other; what is raised is that item's failure."""
        for index, item in enumerate(items):
            # By the measurer, which goes back to it after a run of the whole program.
            measurer.beat(index)
            try:
                made: Made | Failure = measure(index, item)
            except Exception as error:
                made = describe(error)
            yield index, made

    def compare(
        self, schedule: Schedule, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
    ) -> CompareAnswer:
        """Bitwise against the same operators on one stream; within tolerance against the original model's outputs.

        The model's outputs are in full float32. Where this device rounds float32 products to fewer bits (TF32), the
        tolerance is judged on the same operators without that rounding: it is a setting of the user's, not an error of the program.
        """
        bench = self._bench
        assert bench is not None
        measurer = bench.measurer
        measurer.beat(0)
        runner = measurer.runner(schedule)
        if isinstance(runner, Failure):
            return CompareAnswer(failure=runner)
        plan, coarsest = make_plan(measurer.graph, schedule), coarsest_of(measurer.graph)
        bitwise, within, worst = True, True, 0.0
        try:
            for given, wanted in zip(inputs, references, strict=True):
                measurer.beat(0)
                tensors = bench.to_device(given)
                alone = measurer.reference(tensors, plan)
                made = measurer.outputs(runner, tensors)
                bitwise = bitwise and measurer.backend.same(made, alone)
                agreement = compare([tensor.cpu() for tensor in made], wanted, coarsest=coarsest)
                worst = max(worst, agreement.max_abs_error)
                if not agreement.within_tolerance and bench.exact is not None:
                    exact = bench.exact(lambda tensors=tensors: measurer.reference(tensors, plan))  # type: ignore[misc]
                    rounded = rounded_as("cuda") if _compiled(measurer, plan) else None
                    agreement = compare([tensor.cpu() for tensor in exact], wanted, rounded=rounded, coarsest=coarsest)
                within = within and agreement.within_tolerance
                if within and not bitwise and (operator := unrepeatable(measurer, tensors, plan)) is not None:
                    return CompareAnswer(failure=not_repeatable(operator))
        except Exception as error:
            return CompareAnswer(failure=failure_of(error, "comparing with the model"))
        finally:
            measurer.load_inputs(bench.inputs)
            measurer.drop_runners()
        return CompareAnswer(Comparison(bitwise, worst, within))

    def _extra(self, bench: Bench, request: ExtraRequest) -> Iterator[Answer]:
        if (captured := unwrap(request, CapturedBody)) is not None:
            yield wrap_answer(_captured(bench, captured))
        elif (stressed := unwrap(request, StressedBody)) is not None:
            sets = [bench.draw(stressed.seed + place) for place in range(3)]
            plan = make_plan(bench.measurer.graph, stressed.schedule)
            outcomes = stress_plan(bench.measurer, plan, stressed.delay_sets, sets, replays=stressed.replays, seed=stressed.seed)
            for index, outcome in enumerate(outcomes):
                failed = isinstance(outcome, Failure)
                yield wrap_answer(StressedResult(index, None, outcome) if failed else StressedResult(index, outcome))  # type: ignore[arg-type]
            bench.measurer.load_inputs(bench.inputs)
        elif (profiles := unwrap(request, ProfilesBody)) is not None:
            yield from self._profiles(bench, profiles)
        elif (memory := unwrap(request, MemoryBody)) is not None:
            yield wrap_answer(_memory(bench, memory.schedule))
        else:
            raise UsageError(f"the measuring process of the CUDA device cannot answer {request.name}")

    def _profiles(self, bench: Bench, body: ProfilesBody) -> Iterator[Answer]:
        # They hold times, too.
        bench.measurer.wake()
        with bench.flushing() if body.cold and bench.flushing is not None else nullcontext() as flush:
            for operator, variant in zip(body.operators, body.variants, strict=True):
                bench.measurer.beat(operator)
                try:
                    made = profile_operator(bench.measurer, operator, variant, bindings=bench.bindings, flush=flush)
                except Exception as error:
                    made = describe(error)
                failed = isinstance(made, Failure)
                yield wrap_answer(ProfileResult(operator, None, made) if failed else ProfileResult(operator, made))  # type: ignore[arg-type]


def _may_be_lost(answer: Answer) -> bool:
    """Whether whatever is behind an answer may have lost the device: what went wrong is words by now, also those of a variant's trial."""
    return isinstance(answer, ExtraAnswer) or bool(getattr(answer, "failure", None) or getattr(answer, "reason", ""))


def _compiled(measurer: CudaMeasurer, plan: Plan) -> bool:
    """Whether a plan runs compiled code, which keeps the rounding that it was compiled with."""
    bound = measurer.program
    return any(step.variant for step in plan.steps) or (isinstance(bound, BoundProgram) and bool(bound.program.source))


def _captured(bench: Bench, body: CapturedBody) -> CapturedResult:
    runner = bench.measurer.capture(body.schedule, rule=body.rule, options=CaptureOptions(observe=True), private=True)
    if isinstance(runner, Failure):
        return CapturedResult(failure=runner)
    graph = runner.captured
    runner.close()
    bench.measurer.backend.release_cached()
    return CapturedResult(graph)


def _memory(bench: Bench, schedule: Schedule) -> MemoryResult:
    peaks: list[int] = []
    for rule in (FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL):
        runner = bench.measurer.capture(schedule, rule=rule, private=True)
        if isinstance(runner, Failure):
            raise RuntimeError(runner.detail)
        peaks.append(runner.peak_bytes)
        runner.close()
    measurer = bench.measurer
    alone = measurer.capture(sequential(measurer.graph), private=True)
    if isinstance(alone, Failure):
        raise RuntimeError(alone.detail)
    # What an eager program holds is what one stream holds: it frees each value after its last reader, in program order.
    eager = alone.peak_bytes
    alone.close()
    measurer.backend.release_cached()
    return MemoryResult(peaks[0], peaks[1], eager)
