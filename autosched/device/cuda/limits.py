"""The device's costs between operators, measured with chains of the smallest kernel there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from autosched.core.errors import DeviceError
from autosched.core.records import Failure
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.streams import Event, Graph, Stream

_LENGTH = 64
_ROUNDS = 9
_LAUNCHES = 8
# Eight lanes fill a device's front end already; more streams only cost memory. PyTorch has 32 for each priority.
MOST_LANES = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """In microseconds, as in ``Limits``."""

    launch_gap_us: float
    cross_lane_us: float
    fixed_us: float


def measure_costs(measurer: CudaMeasurer) -> Costs:
    """Cost of a dependency across lanes, and what a launch of a graph adds to its longest path.

    Launches are timed back to back, as those of schedules are: what the host's first launch costs is over before the clock starts.

    The gap between two operators on one lane is part of an operator's own time here, because that is measured in a chain; so it is
    zero. A dependency across lanes costs what a chain that changes lanes at every node takes longer than one that stays.

    Raises:
        DeviceError: if not even such chains can be captured.
    """
    streams = measurer.capturer.streams
    first, second = streams.lane(0), streams.lane(1)
    staying = _capture(measurer, [first, second], lambda turn: first)
    changing = _capture(measurer, [first, second], lambda turn: (first, second)[turn % 2])
    rows = []
    for turn in range(_ROUNDS + 2):
        measurer.beat(-1)
        times = [_replay(measurer, item) for item in (staying, changing)]
        if turn >= 2:
            rows.append((times[0][0], times[1][0], times[0][1]))
    stay_us, change_us, block_us = (median(column) for column in zip(*rows, strict=True))
    for graph, _, _ in (staying, changing):
        measurer.backend.reset(graph)
    return Costs(0.0, max(0.0, (change_us - stay_us) / (_LENGTH - 1)), max(0.0, block_us - stay_us))


def _capture(measurer: CudaMeasurer, sides: list[Stream], choose: Callable[[int], Stream]) -> tuple[Graph, Event, Event]:
    backend = measurer.backend
    start, end = (backend.new_event(timing=True, in_graph=True) for _ in range(2))

    def body() -> None:
        previous = choose(0)
        backend.record(start, previous)
        for turn in range(_LENGTH):
            stream = choose(turn)
            if stream is not previous:
                event = backend.new_event()
                backend.record(event, previous)
                backend.wait(stream, event)
            with backend.on(stream):
                backend.touch()
            previous = stream
        backend.record(end, previous)

    made = measurer.capturer.capture_script(sides, body)
    if isinstance(made, Failure):
        raise DeviceError(f"the device cannot capture a chain of kernels: {made.detail}")
    return made[0], start, end


def _replay(measurer: CudaMeasurer, item: tuple[Graph, Event, Event]) -> tuple[float, float]:
    """Time of the chain itself, and of one launch among others."""
    backend = measurer.backend
    graph, start, end = item
    before, after = (backend.new_event(timing=True) for _ in range(2))
    with backend.on(measurer.replay_stream):
        backend.replay(graph)
        backend.record(before, measurer.replay_stream)
        for _ in range(_LAUNCHES):
            backend.replay(graph)
        backend.record(after, measurer.replay_stream)
    backend.synchronize()
    return backend.elapsed_us(start, end), backend.elapsed_us(before, after) / _LAUNCHES
