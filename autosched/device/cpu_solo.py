"""Every operator alone, where it stands in the program: at each width, and in each variant it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from autosched.core.errors import IncompatibleArtifact
from autosched.core.program import Call, Many, TorchLiteral
from autosched.core.records import Failure, FailureKind, SoloRecord
from autosched.core.schedule import sequential
from autosched.core.variants import Variant, variant_signature
from autosched.device.cpu_measure import MOST_RUNS, SHORTEST_BLOCK_US, CpuMeasurer, no_collector, warmed_us
from autosched.device.timing import summarize
from autosched.device.worker_child import describe
from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import CallOperator, carrying
from autosched.runtime.kernels import BoundProgram, dtype_name
from autosched.runtime.lanes import LaneExecutor, Trace
from autosched.runtime.plan import make_plan

# A run this long counts although none was before it. Whole schedules are compared to a hundredth (``cpu_measure.LONG_RUN_US``); operators
# alone take most of a slow model's budget (every variant, at every width), and are only where a search begins: some milliseconds do not
# matter there.
_LONG_RUN_US = 1e5


def measure_solo(
    measurer: CpuMeasurer, columns: Sequence[tuple[int, int]], repeats: int, skip: Sequence[int], seed: int
) -> Iterator[tuple[int, int, SoloRecord | None, Failure | None]]:
    """Time every operator: the whole program in order, ``repeats`` times for each column, columns interleaved.

    One round before these does not count, unless all its runs are long or there is to be but one: then it is the first of them. Operators
    of one signature share a record (:func:`shared_times`). Operators in ``skip``, and those that raise, get what they should have made
    from their specs, so that the others can still be timed. An operator that does not have a column's variant runs call by call there, and
    its answer is a failure.

    Args:
        columns: width and variant of each.
        skip: items, as in ``SoloRequest``.

    Yields:
        Operator index, place in ``columns``, and a record or (not for ``skip``) a failure.
    """
    graph = measurer.graph
    failures: dict[tuple[int, int], Failure] = {}
    executors: dict[int, LaneExecutor] = {}
    count = len(graph)
    for place, (width, variant) in enumerate(columns):
        try:
            bound = _without_broken(measurer, width, variant, place, skip, failures)
        except IncompatibleArtifact as error:
            # Inductor's code for the whole model may be other launches at some width. It is the width that is out then.
            failures.update(dict.fromkeys(((index, place) for index in range(count)), describe(error)))
            continue
        executors[place] = LaneExecutor(bound, make_plan(graph, sequential(graph, width=width)), measurer.pool)
    start = measurer.meter.start()
    with no_collector():
        times_us = _times_us(measurer, columns, executors, repeats, seed)
    load = measurer.meter.read(start)
    alike: dict[str, list[int]] = {}
    for operator in graph.operators:
        alike.setdefault(operator.signature, []).append(operator.index)
    for place, (width, variant) in enumerate(columns):
        sound = {
            signature: [index for index in indices if (index, place) not in failures and place * count + index not in skip]
            for signature, indices in alike.items()
        }
        shared = shared_times(times_us[place], sound)
        for signature, indices in alike.items():
            record = None
            if signature in shared:
                samples = summarize(shared[signature].tolist())
                record = SoloRecord(variant_signature(signature, variant), width, samples, load, engine=executors[place].engine)
            for index in indices:
                if place * count + index not in skip:
                    failure = failures.get((index, place))
                    yield index, place, None if failure else record, failure


def _times_us(
    measurer: CpuMeasurer, columns: Sequence[tuple[int, int]], executors: Mapping[int, LaneExecutor], repeats: int, seed: int
) -> NDArray[np.float64]:
    """Of every operator in each round of each column: ``[columns, repeats, n_operators]``, microseconds; zeros without an executor."""
    rng, count = np.random.default_rng(seed), len(measurer.graph)
    times_us = np.zeros((len(columns), repeats, count))

    def take(turn: int) -> None:
        for place in rng.permutation(list(executors)).tolist():
            measurer.beat(-1)
            measurer.settle(wide=columns[place][0] > 1)
            times_us[place, turn] = _block_us(executors[place], measurer.inputs, count)

    take(0)
    counts = repeats == 1 or all(times_us[place, 0].sum() >= _LONG_RUN_US for place in executors)
    for turn in range(int(counts), repeats):
        take(turn)
    return times_us


def shared_times(times_us: NDArray[np.float64], members: Mapping[str, Sequence[int]]) -> dict[str, NDArray[np.float64]]:
    """One time for each signature and round, such that what schedules add up of them is what a run took.

    The median over operators, and later over rounds, leaves out what now and then stops any of them; each run of a program is stopped
    somewhere. So the sum of the medians is less than the median of the sums, on a busy machine and at two threads, each of which may be
    stopped, much less; and all are scaled by that.

    Args:
        times_us: ``[rounds, n_operators]``, microseconds.
        members: operators of each signature; one without any has no time.

    Returns:
        ``[rounds]`` for each signature, microseconds.
    """
    found = {signature: np.median(times_us[:, list(indices)], axis=1) for signature, indices in members.items() if indices}
    together_us = sum(len(members[signature]) * float(np.median(rounds_us)) for signature, rounds_us in found.items())
    run_us = float(np.median(times_us[:, [index for indices in members.values() for index in indices]].sum(axis=1)))
    return {signature: rounds_us * (run_us / together_us) for signature, rounds_us in found.items()}


def _block_us(executor: LaneExecutor, inputs: Sequence[torch.Tensor], count: int) -> NDArray[np.float64]:
    """Time of each operator in a block like those whole schedules are timed in (``cpu_measure.warmed_us``): the mean of at least one run.

    A column's first run after another's finds the caches and the cores as that one left them, which doubles the time of a short program.
    """
    runs: list[NDArray[np.float64]] = []

    def runs_us(most: int) -> float:
        runs.clear()
        spent_us = 0.0
        while not runs or (spent_us < SHORTEST_BLOCK_US and len(runs) < most):
            trace = Trace(count)
            executor.run(inputs, trace)
            runs.append(np.maximum(np.subtract(trace.end_ns, trace.start_ns), 1) / 1000.0)
            spent_us += (trace.finish_ns - trace.begin_ns) / 1000.0
        return spent_us / len(runs)

    warmed_us(runs_us, lambda _: MOST_RUNS, _LONG_RUN_US)
    block: NDArray[np.float64] = np.mean(runs, axis=0)
    return block


def _without_broken(
    measurer: CpuMeasurer, width: int, variant: int, place: int, skip: Sequence[int], failures: dict[tuple[int, int], Failure]
) -> BoundProgram:
    """Run every operator once in a column, and replace those that fail by something that makes outputs of the right form."""
    bound = measurer.in_order(width)
    first = place * len(bound.kernels)
    kernels = [_stand_in(bound, index) if first + index in skip else kernel for index, kernel in enumerate(bound.kernels)]
    if variant != Variant.CALLS:
        for index in range(len(kernels)):
            measurer.beat(first + index)
            if first + index not in skip:
                made = _variant_kernel(measurer, index, width, variant)
                if isinstance(made, Failure):
                    failures[index, place] = made
                else:
                    kernels[index] = made
    before = torch.get_num_threads()
    slots = bound.new_slots(measurer.inputs)
    torch.set_num_threads(width)
    try:
        with torch.inference_mode():
            for index in range(len(kernels)):
                measurer.beat(first + index)
                try:
                    kernels[index](slots)
                except Exception as error:
                    failures[index, place] = describe(error)
                    kernels[index] = _stand_in(bound, index)
                    kernels[index](slots)
                for value in bound.frees[index]:
                    slots[value] = None
    finally:
        torch.set_num_threads(before)
    return dataclasses.replace(bound, kernels=tuple(kernels))


def _variant_kernel(measurer: CpuMeasurer, index: int, width: int, variant: int) -> Kernel | Failure:
    regions = measurer.programs.regions
    if regions is None or variant not in regions.variants(index):
        return Failure(FailureKind.UNAVAILABLE, f"the operator has no variant {variant}")
    made = regions.kernel(index, width, variant, measurer.programs.at(width))
    return Failure(FailureKind.UNAVAILABLE, made.reason) if isinstance(made, Refused) else made


def _stand_in(bound: BoundProgram, index: int) -> Kernel:
    graph = bound.program.graph
    made = [
        (value, torch.ones(graph.values[value].spec.shape, dtype=getattr(torch, graph.values[value].spec.dtype)))
        for value in graph.operators[index].writes
    ]

    def run(slots: Slots) -> None:
        for value, tensor in made:
            slots[value] = tensor

    # On native lanes, too: all other operators are to be timed on what they run on without the broken one.
    return carrying(run, [CallOperator(_ones(value, tensor)) for value, tensor in made])


def _ones(value: int, tensor: torch.Tensor) -> Call:
    dtype = TorchLiteral("dtype", dtype_name(tensor.dtype))
    return Call("aten::ones.default", (Many(tuple(tensor.shape)),), (("dtype", dtype),), (value,))
