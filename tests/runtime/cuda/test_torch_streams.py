"""What torch.cuda must have, and where its allocator is not to be trusted, seen without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from autosched.core.errors import DeviceMissing
from autosched.runtime.cuda import private_streams, torch_streams
from autosched.runtime.cuda.streams import NAN_PATTERN
from autosched.runtime.cuda.torch_streams import TorchStreams


def test_a_graph_that_was_abandoned_stays_where_the_allocators_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def reset(self) -> None:
            pass

    given_back: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: given_back.append("end"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: given_back.append("release"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    streams = object.__new__(TorchStreams)
    streams.device, streams._abandoned = torch.device("cuda", 0), []
    graph = Graph()
    alive = weakref.ref(graph)
    assert not streams.abandon_capture(graph, (0, 1))
    del graph
    gc.collect()
    assert given_back == ["end", "release"]
    assert alive() is not None


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.float32])
def test_tensors_that_the_fused_copy_has_no_kernel_for_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    fused: list[torch.dtype] = []

    def copy(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        fused.append(targets[0].dtype)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    targets = [torch.zeros(4, dtype=torch.float32).to(dtype) for _ in range(3)]
    sources = [torch.arange(4, dtype=torch.float32).to(dtype) for _ in range(3)]
    object.__new__(TorchStreams).copy(targets, sources)
    assert [target.tolist() for target in targets] == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert fused == [torch.float32] * (dtype is torch.float32)


class _Driver:
    """The driver's library: what was asked of it, and how many contexts a thread has on top of each other."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.said: list[tuple[Any, ...]] = []
        self.depth = 0

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            self.said.append((name, *arguments))
            self.depth += {"cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1}.get(name, 0)
            if name == "cuStreamCreateWithPriority":
                arguments[0]._obj.value = 4096
            if name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 7
            return int(name == self.failing)

        return answer


@pytest.mark.parametrize("failing", ["", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuStreamCreateWithPriority"])
def test_streams_are_made_by_the_driver_in_the_context_that_pytorch_uses(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    driver = _Driver(failing)
    monkeypatch.setattr(private_streams, "driver_library", lambda: driver)
    private_streams._primary_context.cache_clear()
    made = [private_streams.private_stream(0, priority) for priority in (0, -2)]
    private_streams._primary_context.cache_clear()
    assert made == ([0, 0] if failing else [4096, 4096])
    assert driver.depth == 0
    if not failing:
        asked = [said[2:] for said in driver.said if said[0] == "cuStreamCreateWithPriority"]
        # 1: one that waits for nothing on the default stream.
        assert [(flags.value, priority.value) for flags, priority in asked] == [(1, 0), (1, -2)]
        assert [said[0] for said in driver.said].count("cuDevicePrimaryCtxRetain") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_is_forbidden_nothing_beside_captures_and_then_what_it_was_before(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    modes = [0]  # of this thread; 0 is CUDA's default, 2 forbids it nothing

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, given: Any) -> int:
            given._obj.value, modes[0] = modes[0], given._obj.value
            return 0

    monkeypatch.setattr(torch_streams, "driver_library", Driver)
    expected = pytest.raises(RuntimeError, match="lost") if fails else contextlib.nullcontext()
    with expected, object.__new__(TorchStreams).beside_captures():
        modes.append(modes[0])
        if fails:
            raise RuntimeError("the device is lost")
    assert modes == [0, 2]


def test_where_there_is_no_driver_no_stream_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise DeviceMissing("no driver")

    monkeypatch.setattr(private_streams, "driver_library", missing)
    private_streams._primary_context.cache_clear()
    assert private_streams.private_stream(0, 0) == 0


class Generator:
    def graphsafe_get_state(self) -> str:
        return ""

    def graphsafe_set_state(self, state: str) -> None:
        pass


def streams_that_capture(monkeypatch: pytest.MonkeyPatch, graph: type) -> TorchStreams:
    """Of a GPU that is not there: captures are those of ``graph``."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    streams = object.__new__(TorchStreams)
    streams.device, streams._generator = torch.device("cuda", 0), "nobody's"  # type: ignore[assignment]
    return streams


def test_a_capture_that_is_interrupted_as_it_begins_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            pass

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            nonlocal capturing
            capturing = True
            raise KeyboardInterrupt  # as soon as the interpreter looks for signals again

        def capture_end(self) -> None:
            nonlocal capturing
            capturing = False
            raise RuntimeError("CUDA error: operation failed")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    streams = streams_that_capture(monkeypatch, Graph)
    with pytest.raises(KeyboardInterrupt):
        streams.begin_capture((0, 1))
    assert not capturing


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", ""])
@pytest.mark.parametrize("setting", ["expandable_segments:True,garbage_collection_threshold:0.6", "max_split_size_mb:64"])
def test_an_allocator_that_frees_as_it_allocates_has_nothing_cached_when_a_capture_begins(
    monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            pass

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            done.append("began")

    done: list[str] = []
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, setting)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    streams = streams_that_capture(monkeypatch, Graph)
    streams.begin_capture((0, 1))
    assert done == (["emptied", "began"] if name else ["began"])


@pytest.mark.parametrize("counted", [0, 1])
def test_an_allocator_that_caches_nothing_is_another_one(monkeypatch: pytest.MonkeyPatch, counted: int) -> None:
    made: list[int] = []

    def empty(*_: object, **__: object) -> None:
        made.append(counted)

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": sum(made)})
    monkeypatch.setattr(torch, "empty", empty)
    streams = object.__new__(TorchStreams)
    streams.device = torch.device("cuda", 0)
    assert streams.native_allocator() == bool(counted)


@pytest.mark.parametrize("fails", [False, True])
def test_the_default_generator_takes_no_part_in_a_capture(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """PyTorch 2.11 would refuse every random number meanwhile, and for good where the end fails."""

    class Default:
        state = "everyone's"

        def graphsafe_get_state(self) -> str:
            return self.state

        def graphsafe_set_state(self, state: str) -> None:
            self.state = state

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            pass

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            seen.append(default.state)
            if fails:
                raise RuntimeError("CUDA error: operation not permitted")

    default, seen = Default(), []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", (default,))
    streams = object.__new__(TorchStreams)
    streams.device, streams._generator = torch.device("cuda", 0), "nobody's"  # type: ignore[assignment]
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        streams.begin_capture((0, 1))
    assert seen == ["nobody's"]
    assert default.state == "everyone's"


def test_every_name_of_torch_cuda_that_is_used_exists() -> None:
    """Trap 12: names and arguments drift from release to release, and without a GPU nothing else would notice."""
    import inspect
    import re

    from autosched.runtime.cuda import torch_streams

    source = inspect.getsource(torch_streams)
    used = set(re.findall(r"(?:torch\.cuda|\b_cuda)\.([A-Za-z_]+)", source))
    assert {"CUDAGraph", "Event", "Stream", "graph_pool_handle", "memory_snapshot", "_sleep"} <= used
    assert not [name for name in used if not hasattr(torch.cuda, name)]
    assert {"pool", "capture_error_mode"} <= set(inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters)
    assert {"enable_timing", "external"} <= set(inspect.signature(torch.cuda.Event.__new__).parameters)
    assert {"device", "priority"} <= set(inspect.signature(torch.cuda.Stream.__new__).parameters)
    assert "keep_graph" in inspect.signature(torch.cuda.CUDAGraph.__new__).parameters
    for name in ("raw_cuda_graph", "instantiate", "replay", "reset", "capture_end"):
        assert hasattr(torch.cuda.CUDAGraph, name)
    assert hasattr(torch.cuda, "set_sync_debug_mode")
    stubs = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text(encoding="utf-8")
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert name in source
        assert f"def {name}(" in stubs


def test_the_poison_is_not_a_number_in_every_floating_point_type() -> None:
    words = torch.tensor([NAN_PATTERN], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert bool(words.view(dtype).isnan().all())


def test_a_snapshot_that_takes_references_it_was_lent_frees_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # As PyTorch 2.11 does: without care the numbers of the 257th pool are freed while its tuple still holds them.
    def snapshot(pool: tuple[int, int]) -> list[dict[str, Any]]:
        for lent in pool:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(lent))
        return [{"segment_pool_id": pool, "address": 512, "total_size": 1024, "blocks": []}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    pool = (int("700001"), int("700002"))
    held = [tuple(pool) for _ in range(64)]  # references to spare, so that a failure is a failure and no crash
    before = [sys.getrefcount(number) for number in pool]
    streams = object.__new__(TorchStreams)
    for _ in range(10):
        assert [(span.start, span.bytes) for span in streams.pool_spans(pool, unused=False)] == [(512, 1024)]
    assert [sys.getrefcount(number) for number in pool] == before
    assert len(held) == 64
