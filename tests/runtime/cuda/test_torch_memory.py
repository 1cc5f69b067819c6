"""What PyTorch's streams and allocator are asked for, and what is made of their answers, seen without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosched.runtime.cuda import torch_streams
from autosched.runtime.cuda.captured import Span
from autosched.runtime.cuda.streams import NAN_PATTERN, EmptyCapture
from autosched.runtime.cuda.torch_streams import TorchStreams


@pytest.fixture
def streams() -> TorchStreams:
    """Of a GPU that is not there; its tensors are on the CPU."""
    made = object.__new__(TorchStreams)
    made.device, made._abandoned, made._own, made._clock_mhz = torch.device("cpu", 0), [], set(), 1500.0
    return made


def test_a_stream_of_high_priority_is_asked_for_as_each_library_counts_them(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    handles, asked = iter([4096, 0]), []
    monkeypatch.setattr(torch_streams, "private_stream", lambda index, priority: asked.append(priority) or next(handles))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle, stream_id=handle))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=77, stream_id=3, priority=priority))
    own, pooled = streams.new_stream(2), streams.new_stream(2)
    assert asked == [-2, -2]
    assert (streams.handle(own), streams.handle(pooled), pooled.priority) == (4096, 77, -2)
    # The default one lasts, too; another library's does not.
    default, foreign = SimpleNamespace(cuda_stream=0, stream_id=0), SimpleNamespace(cuda_stream=512, stream_id=512)
    assert [streams.lasting(stream) for stream in (own, pooled, default, foreign)] == [True, True, True, False]


def test_without_pytorchs_quick_way_the_current_stream_is_asked_for_its_handle(
    streams: TorchStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=99))
    streams._current_handle = None
    assert streams.current_handle() == 99
    streams._current_handle = lambda index: 100 + index
    assert streams.current_handle() == 100


def test_times_are_microseconds(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    assert streams.elapsed_us(SimpleNamespace(elapsed_time=lambda end: 0.25), None) == 250.0
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    for time_us in (2.0, 0.0):
        streams.sleep(time_us)
    assert cycles == [3000, 1]


def test_a_capture_takes_its_pool_keeps_its_nodes_and_forbids_other_threads_nothing(
    streams: TorchStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graph:
        def __init__(self, **asked: object) -> None:
            self.asked = asked

        def capture_begin(self, **asked: object) -> None:
            self.asked |= asked

    generator = SimpleNamespace(graphsafe_get_state=lambda: "", graphsafe_set_state=lambda state: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    streams._generator = "nobody's"  # type: ignore[assignment]
    assert streams.begin_capture((0, 1)).asked == {"keep_graph": True, "pool": (0, 1), "capture_error_mode": "thread_local"}


@pytest.mark.parametrize(("said", "empty"), [("The CUDA Graph is empty. This usually means ...", True), ("something else", False)])
def test_an_empty_graph_is_an_error(streams: TorchStreams, said: str, empty: bool) -> None:
    def end() -> None:
        for words in ("another warning", said):
            warnings.warn(words, stacklevel=1)

    graph = SimpleNamespace(capture_end=end)
    if empty:
        with pytest.raises(EmptyCapture):
            streams.end_capture(graph)
    else:
        streams.end_capture(graph)


@pytest.mark.parametrize(("missing", "ended", "lost", "clean"), [
    ("_cuda_endAllocateToPool", False, False, True), ("_cuda_releasePool", False, False, True), ("", True, False, True),
    ("", False, False, False), ("", True, True, False),
])  # fmt: skip
def test_a_process_may_capture_on_where_a_failed_capture_left_the_allocator_as_it_was(
    streams: TorchStreams, monkeypatch: pytest.MonkeyPatch, missing: str, ended: bool, lost: bool, clean: bool
) -> None:
    done: list[str] = []

    def doing(name: str, *wanted: object, fails: bool = False) -> Callable[..., None]:
        def call(*given: object) -> None:
            assert given == wanted
            done.append(name)
            if fails:
                raise RuntimeError(name)

        return call

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", doing("end", 0, (0, 1), fails=ended), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", doing("release", 0, (0, 1)), raising=False)
    if missing:
        monkeypatch.delattr(torch._C, missing)
    monkeypatch.setattr(torch.cuda, "synchronize", doing("synchronize", streams.device, fails=lost))
    graph = SimpleNamespace(reset=doing("reset"))
    assert streams.abandon_capture(graph, (0, 1)) is clean
    assert done == ["reset", *(["end"] if not missing else []), *(["release"] if not missing and not ended else []), "synchronize"]
    assert streams._abandoned == ([] if missing or ended else [graph])


def segments(pool: object = None) -> list[dict[str, Any]]:
    """As a snapshot has them: one whose blocks say where they are, one of an older PyTorch, and one of another pool."""
    blocks = [("active_allocated", 512), ("inactive", 256), ("active_pending_free", 256), ("inactive", 1024)]
    told = [{"state": state, "size": size, "address": 9000 + size} for state, size in blocks]
    untold = [{"state": state, "size": size} for state, size in blocks]
    return [
        {"address": 4096, "total_size": 2048, "segment_pool_id": (0, 1), "blocks": untold},
        {"address": 9000, "total_size": 2048, "segment_pool_id": None, "blocks": told},
        {"address": 1, "total_size": 1, "segment_pool_id": (0, 2), "blocks": untold},
    ]


@pytest.mark.parametrize("of_all", [False, True])
def test_memory_of_a_pool_that_nobody_holds_is_found(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch, of_all: bool) -> None:
    def refusing(*pool: object) -> list[dict[str, Any]]:
        if pool:
            raise TypeError("memory_snapshot() takes 0 positional arguments")
        return segments()

    monkeypatch.setattr(torch.cuda, "memory_snapshot", refusing if of_all else segments)
    assert streams.pool_spans((0, 1), unused=False) == (Span(4096, 2048), Span(9000, 2048))
    own = (Span(4608, 256), Span(5120, 1024))
    assert streams.pool_spans((0, 1), unused=True) == (*own, Span(9256, 256), Span(10024, 1024))


def test_poison_fills_whole_words_and_no_byte_beyond(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[int, torch.Tensor]] = []

    def memory_of(raw: Any, device: torch.device) -> torch.Tensor:
        described = raw.__cuda_array_interface__
        assert described["typestr"] == "<i4"
        filled.append((described["data"][0], torch.zeros(described["shape"], dtype=torch.int32)))
        return filled[-1][1]

    monkeypatch.setattr(torch, "as_tensor", memory_of)
    streams.poison([Span(4096, 11), Span(512, 3), Span(64, 4)])
    assert [(address, tensor.tolist()) for address, tensor in filled] == [(4096, [NAN_PATTERN] * 2), (64, [NAN_PATTERN])]


def test_a_buffer_is_laid_out_as_its_input_and_dense_where_elements_share_memory(streams: TorchStreams) -> None:
    turned, expanded = torch.zeros(6, 4, dtype=torch.float16).t(), torch.zeros(1, 6, dtype=torch.int32).expand(4, 6)
    assert [(made.shape, made.stride(), made.dtype) for made in map(streams.static_like, (turned, expanded))] == [
        ((4, 6), (1, 4), torch.float16),
        ((4, 6), (6, 1), torch.int32),
    ]
    part = torch.zeros(8, 4)[2:]
    assert streams.span(part) == Span(part.untyped_storage().data_ptr(), 8 * 4 * 4)


def test_copies_are_fused_from_where_that_pays(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[int] = []
    real = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda targets, sources, non_blocking: fused.append(len(targets)) or real(targets, sources)
    )
    tensors = [torch.arange(6.0).reshape(3, 2).t() for _ in range(3)]
    for count in (1, 2, 3):
        made = streams.clone(tensors[:count])
        assert [(tensor.tolist(), tensor.stride()) for tensor in made] == [([[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]], (1, 2))] * count
    assert fused == [3]
    fused.clear()
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    for count in (0, 1, 2):
        streams.copy(targets[:count], tensors[:count])
    assert fused == [2]
    assert [torch.equal(one, other) for one, other in zip(targets, tensors, strict=True)] == [True, True, False]


@pytest.mark.parametrize(("before", "after"), [(2048, 1024), (1024, 1024)])
def test_memory_was_given_back_if_less_is_reserved(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch, before: int, after: int) -> None:
    reserved = [before]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.__setitem__(0, after))
    assert streams.release_cached() is (after < before)


@pytest.mark.parametrize(("after_first", "had_none"), [(4096, True), (1024, False)])
def test_a_product_that_leaves_something_behind_found_no_workspace(
    streams: TorchStreams, monkeypatch: pytest.MonkeyPatch, after_first: int, had_none: bool
) -> None:
    remaining = iter([1024, after_first])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(remaining))
    asked: list[str] = []
    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, lambda *_, name=name: asked.append(name))
    assert streams.multiply() is had_none
    # One by cuBLAS, one by cuBLASLt.
    assert asked == ["mm", "addmm"]


@pytest.mark.parametrize(("allocations", "kept"), [([1, 1, 1, 0], True), ([1, 1, 1, 1], False)])
def test_one_product_without_an_allocation_shows_that_workspaces_are_kept(
    streams: TorchStreams, monkeypatch: pytest.MonkeyPatch, allocations: list[int], kept: bool
) -> None:
    totals = [number for place in range(4) for number in (10 * place, 10 * place + allocations[place])]
    remaining = iter(totals)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": next(remaining)})
    assert streams.keeps_workspaces() is kept


def test_another_allocator_is_not_tried(streams: TorchStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    counts = iter([0, 1])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": next(counts)})
    assert not streams.native_allocator()
