"""The device's costs between operators, measured with chains of the smallest kernel there is."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from autosched.core.errors import DeviceError
from autosched.core.records import Failure
from autosched.device.cuda.measure import CudaMeasurer
from autosched.runtime.cuda.streams import Event, Graph, Stream, StreamBackend

_LENGTH = 64
_ROUNDS = 9
_LAUNCHES = 8
# Eight lanes fill a device's front end already; more streams only cost memory.
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
    zero. A dependency across lanes costs what two chains that wait for each other at every step take longer than two that do not. One
    chain that changes lanes at every node would tell nothing: its edges order the nodes as those of a chain on one lane do, and of lanes a
    graph knows only what its edges say.

    Raises:
        DeviceError: if not even such chains can be captured.
    """
    streams = measurer.capturer.streams
    pair = [streams.lane(0), streams.lane(1)]
    alone, beside, crossing = (
        _capture(measurer, lanes, crossing=waiting) for lanes, waiting in ((pair[:1], False), (pair, False), (pair, True))
    )
    rows = []
    for turn in range(_ROUNDS + 2):
        measurer.beat(-1)
        times = [_replay(measurer, item) for item in (alone, beside, crossing)]
        if turn >= 2:
            rows.append((*times[0], times[1][0], times[2][0]))
    alone_us, block_us, beside_us, crossing_us = (median(column) for column in zip(*rows, strict=True))
    for graph, _, _ in (alone, beside, crossing):
        measurer.backend.reset(graph)
    return Costs(0.0, max(0.0, (crossing_us - beside_us) / (_LENGTH - 1)), max(0.0, block_us - alone_us))


def _capture(measurer: CudaMeasurer, lanes: list[Stream], *, crossing: bool) -> tuple[Graph, Event, Event]:
    """A chain on each of ``lanes``, the first between two stamps; ``crossing``: every step waits for the step before on all lanes."""
    backend = measurer.backend
    stamps: list[Event] = []

    def body() -> None:
        stamps[:] = [backend.new_event(timing=True, in_graph=True) for _ in range(2)]
        backend.record(stamps[0], lanes[0])
        for turn in range(_LENGTH):
            if crossing and turn:
                meet(backend, lanes)
            for stream in lanes:
                with backend.on(stream):
                    backend.touch()
        backend.record(stamps[1], lanes[0])

    made = measurer.capturer.capture_script(lanes, body)
    if isinstance(made, Failure):
        raise DeviceError(f"the device cannot capture a chain of kernels: {made.detail}")
    return made[0], stamps[0], stamps[1]


def meet(backend: StreamBackend, lanes: list[Stream]) -> None:
    """Each lane waits for what the others have launched so far."""
    events = [backend.new_event() for _ in lanes]
    for event, stream in zip(events, lanes, strict=True):
        backend.record(event, stream)
    for stream in lanes:
        for event, other in zip(events, lanes, strict=True):
            if other is not stream:
                backend.wait(stream, event)


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
