"""Graphs and kernels read through a stand-in for cuda.bindings."""

from __future__ import annotations

import ctypes
import enum
import functools
import types
from typing import Any

import pytest

from autosched.runtime.cuda import bindings
from autosched.runtime.cuda.bindings import GraphBindings, KernelNode, open_bindings, why_unread
from autosched.runtime.cuda.captured import NodeKind


class Code(enum.IntEnum):
    SUCCESS = 0
    INVALID = 1
    LOSSY = 918


class FreedEdge:
    """What cuda-bindings before 13.3.0 says an edge carries: whatever is in that memory by now."""

    @property
    def type(self) -> int:
        raise AssertionError("memory is read that cuda-bindings has freed")


class FakeLibrary:
    """The driver's own library, which knows graph 9: its first edge, and ``more`` others of its kind, are early ones.

    It writes where it is told, as the real one does.
    """

    def __init__(self, more: int = 0, code: int = 0) -> None:
        self.edges = [(11, 12, 1), *[(11, 12, 1)] * more, (12, 13, 0)]
        self.code = code

    def cuGraphGetEdges_v2(self, graph: ctypes.c_void_p, *arguments: Any) -> int:
        assert graph.value == 9
        before, after, data, count = (ctypes.cast(item, ctypes.c_void_p).value or 0 for item in arguments)
        room = ctypes.c_size_t.from_address(count)
        told = self.edges[: room.value]
        for place, (first, last, kind) in enumerate(told):
            ctypes.c_void_p.from_address(before + 8 * place).value = first
            ctypes.c_void_p.from_address(after + 8 * place).value = last
            ctypes.memmove(data + 8 * place, bytes([kind, 0, kind, 0, 0, 0, 0, 0]), 8)
        room.value = len(told)
        return self.code


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "driver_library", FakeLibrary)


class FakeDriver(types.SimpleNamespace):
    """``cuda.bindings.driver`` with a graph of three nodes: a fill, then a function's kernel, then a library's kernel."""

    def __init__(self) -> None:
        kinds = types.SimpleNamespace(
            CU_GRAPH_NODE_TYPE_KERNEL=0,
            CU_GRAPH_NODE_TYPE_MEMCPY=1,
            CU_GRAPH_NODE_TYPE_MEMSET=2,
            CU_GRAPH_NODE_TYPE_EMPTY=5,
            CU_GRAPH_NODE_TYPE_WAIT_EVENT=6,
            CU_GRAPH_NODE_TYPE_EVENT_RECORD=7,
        )
        super().__init__(
            CUgraphNodeType=kinds,
            CUfunction_attribute=types.SimpleNamespace(
                CU_FUNC_ATTRIBUTE_NUM_REGS="NUM_REGS",
                CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="SHARED",
                CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES="LOCAL",
            ),
            CUkernelNodeAttrID=types.SimpleNamespace(
                CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster", CU_LAUNCH_ATTRIBUTE_PRIORITY="priority"
            ),
            CUstream=int,
        )

    def CUgraph(self, init_value: int) -> int:
        return init_value

    def CUgraphNode(self, init_value: int) -> int:
        return init_value

    def cuDriverGetVersion(self) -> tuple[Code, int]:
        return Code.SUCCESS, 13000

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return (Code.SUCCESS, 1 if stream == 7 else 0, 5, 9, [11, 12, 0], None, 2)

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        return Code.SUCCESS, [11, 12, 13][:count], 3

    def cuGraphGetEdges(self, graph: int, count: int = 0) -> tuple[Any, ...]:
        return self._filled(count, [11, 12], [12, 13], [FreedEdge(), FreedEdge()])

    def _filled(self, room: int, *arrays: list[Any]) -> tuple[Any, ...]:
        # Asked for a count alone, the driver would have to drop what edges carry.
        if not room:
            return (Code.LOSSY, *([] for _ in arrays), 0)
        return (Code.SUCCESS, *([*array, *[0] * room][:room] for array in arrays), min(len(arrays[0]), room))

    def cuGraphNodeGetDependencies(self, node: int, count: int = 0) -> tuple[Any, ...]:
        found = {12: [11], 13: [12], 14: list(range(100, 140))}.get(node, [])
        return self._filled(count, found, [None] * len(found))

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return Code.SUCCESS, {11: 2}.get(node, 0)

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:
        shape = {"gridDimX": 10, "gridDimY": 2, "gridDimZ": 1, "blockDimX": 128, "blockDimY": 1, "blockDimZ": 1, "sharedMemBytes": 1024}
        return Code.SUCCESS, types.SimpleNamespace(func=100 if node == 12 else 0, kern=0 if node == 12 else 200, **shape)

    def cuKernelGetFunction(self, kernel: int) -> tuple[Any, ...]:
        return Code.SUCCESS, 201

    def cuFuncGetAttribute(self, attribute: str, function: int) -> tuple[Any, ...]:
        return Code.SUCCESS, {"NUM_REGS": 40, "SHARED": 512, "LOCAL": 16}[attribute]

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> tuple[Any, ...]:
        return Code.SUCCESS, 5

    def cuGraphKernelNodeGetAttribute(self, node: int, attribute: str) -> tuple[Any, ...]:
        if node == 13:
            return Code.INVALID, None
        return Code.SUCCESS, types.SimpleNamespace(clusterDim=types.SimpleNamespace(x=2, y=1, z=1), priority=-3)


class RawGraph:
    def raw_cuda_graph(self) -> int:
        return 9


def test_bindings_read_graphs_and_kernels() -> None:
    reader = GraphBindings(FakeDriver())
    assert reader.driver_version() == "13.0"
    assert reader.frontier(types.SimpleNamespace(cuda_stream=7)) == (11, 12)
    assert reader.frontier(types.SimpleNamespace(cuda_stream=8)) == ()
    assert reader.dependencies(13) == (12,)
    assert reader.dependencies(11) == ()
    assert reader.dependencies(14) == tuple(range(100, 140))
    nodes, edges = reader.read(RawGraph())
    assert nodes == ((11, NodeKind.MEMSET), (12, NodeKind.KERNEL), (13, NodeKind.KERNEL))
    assert edges == ((11, 12), (12, 13))
    assert reader.early_edges(RawGraph()) == 1
    own, library = reader.kernels(RawGraph())
    assert own == KernelNode((10, 2, 1), (128, 1, 1), 40, 512, 1024, 16, 5, 2, -3)
    assert (library.registers, library.cluster, library.priority) == (40, 1, 0)
    assert own.blocks == 20
    assert own.threads == 128


def test_bindings_are_found_by_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 12: an install may resolve to bindings newer, or a driver older, than what is asked for."""
    import importlib

    driver: Any = FakeDriver()
    monkeypatch.setattr(importlib, "import_module", lambda name: driver)
    assert open_bindings() is not None
    assert why_unread() == ""

    class Older(FakeDriver):
        def __getattribute__(self, name: str) -> Any:
            if name == "cuGraphGetEdges":
                raise AttributeError(name)
            return super().__getattribute__(name)

    driver = Older()
    assert open_bindings() is None
    assert why_unread() == "this version of cuda-bindings lacks cuGraphGetEdges"

    class NoDriver(FakeDriver):
        def cuDriverGetVersion(self) -> tuple[Code, int]:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver = NoDriver()
    assert open_bindings() is None
    assert why_unread() == "cuda-bindings finds no NVIDIA driver"


def test_bindings_of_cuda_12_are_read_through_the_forms_that_tell_what_edges_carry() -> None:
    class Twelve(FakeDriver):
        """The plain names answer without what edges carry, and fail where they would have to drop some."""

        def __getattr__(self, name: str) -> Any:
            base, _, version = name.partition("_v")
            if version in ("2", "3") and hasattr(FakeDriver, base):
                return functools.partial(getattr(FakeDriver, base), self)
            raise AttributeError(name)

        def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
            return (Code.LOSSY, 0, 0, 0, [], 0)

        def cuGraphGetEdges(self, graph: int, count: int = 0) -> tuple[Any, ...]:
            return (Code.LOSSY, [], [], 0)

        def cuGraphNodeGetDependencies(self, node: int, count: int = 0) -> tuple[Any, ...]:
            return (Code.LOSSY, [], 0)

    reader = GraphBindings(Twelve())
    assert reader.frontier(types.SimpleNamespace(cuda_stream=7)) == (11, 12)
    assert reader.dependencies(13) == (12,)
    assert reader.read(RawGraph())[1] == ((11, 12), (12, 13))
    assert reader.early_edges(RawGraph()) == 1


@pytest.mark.parametrize(
    ("bindings", "driver", "words"), [(12020, 13000, "cuda-bindings is for CUDA 12.2"), (13050, 12010, "driver is for CUDA 12.1")]
)
def test_what_is_too_old_to_tell_what_edges_carry_is_not_read(
    monkeypatch: pytest.MonkeyPatch, bindings: int, driver: int, words: str
) -> None:
    import importlib

    class Old(FakeDriver):
        CUDA_VERSION = bindings

        def cuDriverGetVersion(self) -> tuple[Code, int]:
            return Code.SUCCESS, driver

    monkeypatch.setattr(importlib, "import_module", lambda name: Old())
    assert open_bindings() is None
    assert words in why_unread()


def test_a_library_s_kernel_is_described_without_a_function_in_this_context() -> None:
    class Contextless(FakeDriver):
        def __init__(self) -> None:
            super().__init__()
            names = {f"REQUIRED_CLUSTER_{side}" for side in ("WIDTH", "HEIGHT", "DEPTH")} | {
                "NUM_REGS",
                "SHARED_SIZE_BYTES",
                "LOCAL_SIZE_BYTES",
            }
            self.CUfunction_attribute = types.SimpleNamespace(**{f"CU_FUNC_ATTRIBUTE_{name}": name for name in names})

        def CUfunction(self, init_value: int) -> int:
            return init_value

        def cuCtxGetDevice(self) -> tuple[Any, ...]:
            return Code.SUCCESS, 3

        def cuKernelGetFunction(self, kernel: int) -> tuple[Any, ...]:
            return Code.INVALID, None

        def cuFuncGetAttribute(self, attribute: str, function: int) -> tuple[Any, ...]:
            return Code.SUCCESS, 0

        def cuKernelGetAttribute(self, attribute: str, kernel: int, device: int) -> tuple[Any, ...]:
            assert (kernel, device) == (200, 3)
            return Code.SUCCESS, {"NUM_REGS": 168, "REQUIRED_CLUSTER_WIDTH": 2, "REQUIRED_CLUSTER_HEIGHT": 2}.get(attribute, 0)

        def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> tuple[Any, ...]:
            return Code.SUCCESS, {100: 5, 200: 1}[function]

    own, library = GraphBindings(Contextless()).kernels(RawGraph())
    assert (library.registers, library.resident_blocks) == (168, 1)
    assert (own.cluster, library.cluster) == (2, 4)  # as launched; as compiled


@pytest.mark.parametrize("more", [4094, 4095, 40000])  # one edge less than there is room for at first, as many, and more
def test_what_all_edges_of_a_large_graph_carry_is_read_from_memory_of_our_own(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(bindings, "driver_library", lambda: FakeLibrary(more))
    assert GraphBindings(FakeDriver()).early_edges(RawGraph()) == more + 1


def test_edges_that_the_driver_does_not_tell_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "driver_library", lambda: FakeLibrary(code=1))
    with pytest.raises(RuntimeError, match="cuGraphGetEdges_v2 returned 1"):
        GraphBindings(FakeDriver()).early_edges(RawGraph())


def test_a_driver_error_is_an_error() -> None:
    class Failing(FakeDriver):
        def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
            return Code.INVALID, None, None

    with pytest.raises(RuntimeError, match="cuGraphGetNodes"):
        GraphBindings(Failing()).read(RawGraph())
