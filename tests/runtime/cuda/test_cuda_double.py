"""The double keeps CUDA's rules; otherwise what is tested on it means nothing."""

from __future__ import annotations

import pytest

from autosched.runtime.cuda.streams import STREAMS_PER_PRIORITY, EmptyCapture, StreamBackend
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.fake_cuda_values import PAGE, CaptureError, FakeStream


def start(cuda: FakeCuda) -> tuple[FakeStream, FakeStream, object]:
    origin, side = cuda.new_stream(0), cuda.new_stream(0)
    with cuda.on(origin):
        graph = cuda.begin_capture(cuda.new_pool())
    return origin, side, graph


def fork(cuda: FakeCuda, origin: FakeStream, side: FakeStream) -> None:
    event = cuda.new_event()
    cuda.record(event, origin)
    cuda.wait(side, event)


def test_is_a_stream_backend() -> None:
    backend: StreamBackend = FakeCuda()
    wanted = [name for name in vars(StreamBackend) if not name.startswith("_")]
    assert all(callable(getattr(backend, name)) for name in wanted)


def test_a_stream_joins_a_capture_by_waiting_for_its_event() -> None:
    cuda = FakeCuda()
    origin, side, _ = start(cuda)
    assert cuda.capturing(origin)
    assert not cuda.capturing(side)
    fork(cuda, origin, side)
    assert cuda.capturing(side)


def test_a_launch_on_a_stream_outside_runs_at_once_and_is_missing_from_the_graph() -> None:
    cuda = FakeCuda()
    origin, side, graph = start(cuda)
    with cuda.on(side):
        cuda.touch()
    with cuda.on(origin):
        cuda.touch()
        cuda.end_capture(graph)
    assert len(cuda.read(graph)[0]) == 1
    assert cuda.strays == 1


def test_an_allocation_before_the_fork_is_outside_the_private_pool() -> None:
    cuda = FakeCuda()
    origin, side, graph = start(cuda)
    with cuda.on(side):
        outside = cuda.allocate(PAGE)
    fork(cuda, origin, side)
    with cuda.on(side):
        inside = cuda.allocate(PAGE)
    spans = cuda.pool_spans(graph.pool, unused=False)
    assert cuda.span(outside) not in spans
    assert cuda.span(inside) in spans


def test_every_stream_must_be_joined_even_an_idle_one() -> None:
    cuda = FakeCuda()
    origin, side, graph = start(cuda)
    fork(cuda, origin, side)
    with cuda.on(origin):
        cuda.touch()
        with pytest.raises(CaptureError, match="Unjoined"):
            cuda.end_capture(graph)
    assert not cuda.capturing(side)


def test_a_stream_used_after_its_join_is_unjoined_again() -> None:
    cuda = FakeCuda()
    origin, side, graph = start(cuda)
    fork(cuda, origin, side)
    fork(cuda, side, origin)
    with cuda.on(side):
        cuda.touch()
    with cuda.on(origin), pytest.raises(CaptureError, match="Unjoined"):
        cuda.end_capture(graph)


def test_events_inside_and_outside_never_mix() -> None:
    cuda = FakeCuda()
    outside = cuda.new_event()
    cuda.record(outside, cuda.new_stream(0))
    origin, _, graph = start(cuda)
    with pytest.raises(CaptureError, match="Isolation"):
        cuda.wait(origin, outside)
    with cuda.on(origin), pytest.raises(CaptureError, match="Invalidated"):
        cuda.end_capture(graph)
    inside = cuda.new_event()
    origin, _, graph = start(cuda)
    cuda.record(inside, origin)
    with cuda.on(origin):
        cuda.touch()
        cuda.end_capture(graph)
    with pytest.raises(CaptureError, match="CapturedEvent"):
        cuda.wait(cuda.new_stream(0), inside)


def test_an_empty_capture_is_an_error() -> None:
    cuda = FakeCuda()
    origin, _, graph = start(cuda)
    with cuda.on(origin), pytest.raises(EmptyCapture):
        cuda.end_capture(graph)


def test_streams_repeat_after_32_of_a_priority() -> None:
    cuda = FakeCuda()
    handles = [cuda.handle(cuda.new_stream(0)) for _ in range(STREAMS_PER_PRIORITY + 1)]
    assert len(set(handles)) == STREAMS_PER_PRIORITY
    assert handles[0] == handles[-1]
    assert cuda.handle(cuda.new_stream(1)) not in handles


def test_a_block_goes_to_its_own_stream_only_and_record_stream_keeps_it_in_a_capture() -> None:
    cuda = FakeCuda()
    origin, side, graph = start(cuda)
    fork(cuda, origin, side)
    with cuda.on(origin):
        first = cuda.allocate(PAGE)
    address = cuda.span(first).start
    del first
    with cuda.on(side):
        assert cuda.span(cuda.allocate(PAGE)).start != address
    with cuda.on(origin):
        again = cuda.allocate(PAGE)
    assert cuda.span(again).start == address
    again.record_stream(side)
    del again
    with cuda.on(origin):
        # Why nothing here calls record_stream: until the capture is over, the memory is lost to it.
        assert cuda.span(cuda.allocate(PAGE)).start != address
    fork(cuda, side, origin)
    with cuda.on(origin):
        cuda.touch()
        cuda.end_capture(graph)


def test_a_replay_takes_the_critical_path() -> None:
    cuda = FakeCuda()
    origin, side, graph = start(cuda)
    fork(cuda, origin, side)
    for stream, length in ((origin, 30.0), (side, 50.0)):
        with cuda.on(stream):
            cuda.launch(None, length)
    fork(cuda, side, origin)
    with cuda.on(origin):
        cuda.launch(None, 5.0)
        cuda.end_capture(graph)
    cuda.instantiate(graph)
    before, after = cuda.new_event(timing=True), cuda.new_event(timing=True)
    cuda.record(before, cuda.current_stream())
    cuda.replay(graph)
    cuda.record(after, cuda.current_stream())
    assert cuda.elapsed_us(before, after) == 55.0
