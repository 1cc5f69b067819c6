"""A graph launched back to back between two events, so that its time is the device's alone, however short it is."""

from __future__ import annotations

from collections.abc import Callable

from autosched.runtime.cuda.streams import Stream, StreamBackend

# Longer than the host takes for a launch from Python: a graph of a few kernels may run in less than that.
_LAUNCH_US = 15.0
# Launches that wait on a stream at once. A launch may be several entries, and of about a thousand the host has to wait for the device.
_MOST_QUEUED = 200


def launched_us(backend: StreamBackend, stream: Stream, launch: Callable[[], object], count: int) -> float:
    """Time of one launch in microseconds, the mean of ``count``.

    The device is kept busy until all of them wait on its stream: otherwise the host's time is measured where it is the slower one.
    """
    total_us, left = 0.0, count
    while left:
        queued = min(left, _MOST_QUEUED)
        left -= queued
        start, end = backend.new_event(timing=True), backend.new_event(timing=True)
        with backend.on(stream):
            backend.sleep((queued + 1) * _LAUNCH_US)
            # Once ahead of the clock: what others left in the caches is not this one's.
            launch()
            backend.record(start, stream)
            for _ in range(queued):
                launch()
            backend.record(end, stream)
        backend.synchronize()
        total_us += backend.elapsed_us(start, end)
    return total_us / count
