"""The measuring process of the CPU device: binds one program and times what it is asked to."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType

import torch

from autosched.core.errors import AutoschedError, DeviceError, UsageError
from autosched.core.records import Engine, Failure
from autosched.device.cpu_groups import measure_groups
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.cpu_pairs import measure_pairs
from autosched.device.cpu_solo import measure_solo
from autosched.device.variants import columns_of, compile_regions, prepare_regions
from autosched.device.worker_child import COMPILE_S, Channel, describe
from autosched.device.worker_messages import (
    Answer,
    Broken,
    CompareAnswer,
    CompareRequest,
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
from autosched.device.worker_tensors import read_in_order, read_program
from autosched.runtime.host_key import apply_numerics, compiler_key, cpu_device_key
from autosched.runtime.kernels import BoundProgram, random_inputs
from autosched.runtime.native.build import build_native, do_without, native_library
from autosched.runtime.regions.library import region_library
from autosched.runtime.widths import WidePrograms


class _Service:
    """What is open, and how each request is answered."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._measurer: CpuMeasurer | None = None

    def handle(self, request: Request) -> Iterator[Answer]:
        if isinstance(request, OpenRequest):
            self._measurer = self._open(request)
            return
        measurer = self._measurer
        if measurer is None:
            raise UsageError(f"{type(request).__name__} came before a program was opened")
        match request:
            case LimitsRequest():
                costs = measurer.costs()
                yield LimitsAnswer(
                    costs.launch_gap_us,
                    costs.cross_lane_us,
                    costs.fixed_us,
                    costs.concurrent_gap_us,
                    native_lanes=measurer.engine is Engine.NATIVE,
                    one_team=costs.one_team,
                )
            case SoloRequest():
                columns = columns_of(request)
                for operator, place, record, failure in measure_solo(measurer, columns, request.repeats, request.skip, request.seed):
                    yield SoloAnswer(operator, place, record, failure)
            case PrepareRegionsRequest():
                yield from prepare_regions(measurer.programs.regions, len(measurer.graph), request, self._channel.beat)
            case RegionsRequest():
                programs = measurer.programs
                yield from compile_regions(programs.regions, len(measurer.graph), request, self._channel.beat, programs.at)
            case PairsRequest():
                for index, pair, failure in measure_pairs(measurer, request.pairs, request.repeats, request.seed):
                    yield PairAnswer(index, pair, failure)
            case GroupsRequest():
                for index, group, failure in measure_groups(measurer, request.groups, request.repeats, request.seed):
                    yield GroupAnswer(index, group, failure)
            case SchedulesRequest():
                yield from self._schedules(measurer, request)
            case PairedRequest():
                times_us = measurer.paired(request.schedules, request.rounds, request.seed)
                yield Broken(times_us) if isinstance(times_us, Failure) else PairedAnswer(tuple(times_us))
            case CompareRequest():
                yield self._compare(measurer, request)
            case _:
                raise UsageError(f"the measuring process of the CPU device cannot answer {type(request).__name__}")

    def _open(self, request: OpenRequest) -> CpuMeasurer:
        if request.numerics:
            # Before weights are packed: their layout is that of a precision.
            apply_numerics(request.numerics)
        self._settle_lanes(native=request.native_lanes)
        program, constants = read_program(request.program_file, request.constants_file)
        self._channel.beat(-1)
        regions = region_library(program, torch.device("cpu"), cpu_device_key(), compiler_key())
        programs = WidePrograms(program, constants, lambda bound: _with_plugin(bound, self._channel.plugin), regions)
        if program.source:
            # Compiled again here, for each width there will be, and nothing shows progress while a compiler works.
            with self._channel.working(COMPILE_S):
                for width in request.widths:
                    # At which one it cannot be had, whoever times operators says.
                    with contextlib.suppress(AutoschedError):
                        programs.at(width)
        programs.at(1)
        self._channel.beat(-1)
        return CpuMeasurer(programs, random_inputs(program, request.seed), self._channel.beat)

    def _settle_lanes(self, *, native: bool) -> None:
        """Run lanes as whoever asks says they are run: another process may have built the native ones meanwhile, or removed them."""
        if not native:
            do_without("the job began without them")
        elif native_library() is None:
            # The job has them loaded, and somebody has cleared the cache since.
            with self._channel.working(COMPILE_S):
                why = build_native()
            if why:
                raise DeviceError(f"the native lanes that this job began with cannot be had any more ({why}); start it again")

    def _schedules(self, measurer: CpuMeasurer, request: SchedulesRequest) -> Iterator[Answer]:
        found = measurer.schedules(request.schedules, request.rounds, request.trace, request.min_block_us, request.seed)
        for index, record, failure in found:
            yield ScheduleAnswer(index, record, failure)

    def _compare(self, measurer: CpuMeasurer, request: CompareRequest) -> Answer:
        inputs, references = ([read_in_order(path) for path in paths] for paths in (request.inputs_files, request.references_files))
        try:
            result = measurer.compare(request.schedule, inputs, references)
        except Exception as error:
            return CompareAnswer(failure=describe(error))
        return result


def _with_plugin(bound: BoundProgram, plugin: ModuleType | None) -> BoundProgram:
    if plugin is None:
        return bound
    kernels = tuple(plugin.wrap_kernel(index, kernel) for index, kernel in enumerate(bound.kernels))
    return dataclasses.replace(bound, kernels=kernels)


def main() -> None:
    """Serve until the parent is done."""
    channel = Channel()
    channel.serve(_Service(channel).handle)
