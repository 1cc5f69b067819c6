"""The only file that touches ``cuda.bindings``: reads CUDA graphs, during and after capture, and the kernels in them.

Everything used exists in cuda-bindings 12.9 and 13.0.3; what is there is asked for by feature, because an unpinned install may be newer
than the driver. The driver's interface is used throughout: its handles are the runtime's.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

from autosched.runtime.cuda.captured import NodeKind
from autosched.runtime.cuda.key import driver_library
from autosched.runtime.cuda.streams import Graph, Stream

_NEEDED = (
    "cuStreamGetCaptureInfo",
    "cuGraphGetNodes",
    "cuGraphGetEdges",
    "cuGraphNodeGetDependencies",
    "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams",
    "cuFuncGetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
)

# First guesses at how many edges end at a node, and are in a graph; more are asked for again.
_FEW, _MANY = 16, 4096
NOT_INSTALLED = "cuda-bindings is not installed (pip install 'autosched[cuda]')"

_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC

# Up to 12.9 the plain names are those of forms that do not tell what edges carry, and answer one value less; since 13.0 there is one form.
_WITH_EDGE_DATA = {
    "cuStreamGetCaptureInfo": "cuStreamGetCaptureInfo_v3",
    "cuGraphGetEdges": "cuGraphGetEdges_v2",
    "cuGraphNodeGetDependencies": "cuGraphNodeGetDependencies_v2",
}
_EDGE_DATA_SINCE = 12030  # of CUDA, as ``cuDriverGetVersion`` counts


class _EdgeData(ctypes.Structure):
    """``CUgraphEdgeData`` of the driver."""

    _fields_ = (("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5))


@dataclass(frozen=True, slots=True)
class KernelNode:
    """One kernel of a captured graph, as it will be launched.

    Args:
        grid, block: blocks in the grid, threads in a block.
        registers: for each thread.
        static_shared_bytes, dynamic_shared_bytes: for each block.
        local_bytes: for each thread; above zero usually means spilled registers.
        resident_blocks: most blocks of it that one multiprocessor holds at once; 0 if unknown.
        cluster: blocks in a cluster; 1 without clusters.
        priority: of the node, 0 the default, negative more urgent.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    local_bytes: int
    resident_blocks: int
    cluster: int
    priority: int

    @property
    def blocks(self) -> int:
        """Blocks in the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]


def open_bindings() -> GraphBindings | None:
    """The reader, or None where cuda-bindings or the driver is missing or lacks something."""
    driver = _driver()
    return None if isinstance(driver, str) else GraphBindings(driver)


def why_unread() -> str:
    """Why :func:`open_bindings` gives none; empty where it gives one."""
    driver = _driver()
    return driver if isinstance(driver, str) else ""


def _driver() -> Any:
    """The module, or what is wrong with it."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return NOT_INSTALLED
    if lacking := [name for name in _NEEDED if not hasattr(driver, name)]:
        return f"this version of cuda-bindings lacks {lacking[0]}"
    if (made_for := int(getattr(driver, "CUDA_VERSION", _EDGE_DATA_SINCE))) < _EDGE_DATA_SINCE:
        return f"this version of cuda-bindings is for CUDA {_dotted(made_for)}; expected {_dotted(_EDGE_DATA_SINCE)} or newer"
    try:
        error, version = driver.cuDriverGetVersion()
    except RuntimeError:  # no libcuda on this machine
        return "cuda-bindings finds no NVIDIA driver"
    if int(error) != 0:
        return f"the NVIDIA driver answers cuda-bindings with error {int(error)}"
    if int(version) < _EDGE_DATA_SINCE:
        return f"the NVIDIA driver is for CUDA {_dotted(int(version))}; expected {_dotted(_EDGE_DATA_SINCE)} or newer"
    return driver


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class GraphBindings:
    """:class:`~autosched.runtime.cuda.lanes.GraphReader` over the driver, and more about kernels."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        kinds = driver.CUgraphNodeType
        self._kinds = {
            int(kinds.CU_GRAPH_NODE_TYPE_KERNEL): NodeKind.KERNEL,
            int(kinds.CU_GRAPH_NODE_TYPE_MEMCPY): NodeKind.MEMCPY,
            int(kinds.CU_GRAPH_NODE_TYPE_MEMSET): NodeKind.MEMSET,
            int(kinds.CU_GRAPH_NODE_TYPE_EMPTY): NodeKind.EMPTY,
            int(kinds.CU_GRAPH_NODE_TYPE_WAIT_EVENT): NodeKind.EVENT,
            int(kinds.CU_GRAPH_NODE_TYPE_EVENT_RECORD): NodeKind.EVENT,
        }

    def driver_version(self) -> str:
        """For example ``13.0``."""
        return _dotted(int(self._call("cuDriverGetVersion")))

    def frontier(self, stream: Stream) -> tuple[int, ...]:
        """From ``cuStreamGetCaptureInfo``; empty for a stream that is not capturing."""
        status, _, _, nodes, _, count = self._call("cuStreamGetCaptureInfo", self._driver.CUstream(int(stream.cuda_stream)))
        if int(status) != 1:  # CU_STREAM_CAPTURE_STATUS_ACTIVE
            return ()
        return tuple(int(node) for node in (nodes or [])[: int(count)])

    def dependencies(self, node: int) -> tuple[int, ...]:
        """From ``cuGraphNodeGetDependencies``."""
        handle = self._driver.CUgraphNode(init_value=node)
        nodes, _, count = self._all("cuGraphNodeGetDependencies", handle, _FEW)
        return tuple(int(item) for item in nodes[:count])

    def read(self, graph: Graph) -> tuple[tuple[tuple[int, NodeKind], ...], tuple[tuple[int, int], ...]]:
        """From ``cuGraphGetNodes`` and ``cuGraphGetEdges``, in the order the driver returns them."""
        handle = self._graph(graph)
        nodes = tuple((int(node), self._kind(node)) for node in self._nodes(handle))
        before, after, _, count = self._all("cuGraphGetEdges", handle, _MANY)
        return nodes, tuple((int(before[place]), int(after[place])) for place in range(count))

    def early_edges(self, graph: Graph) -> int:
        """Edges of ``cuGraphGetEdges`` whose data says programmatic.

        Asked of the driver itself: before 13.3.0, and 12.9.7, cuda-bindings answers with pointers to edge data that it has freed
        (NVIDIA/cuda-python#1804).
        """
        query, room = driver_library().cuGraphGetEdges_v2, _MANY
        while True:
            before, after = (ctypes.c_void_p * room)(), (ctypes.c_void_p * room)()
            data, count = (_EdgeData * room)(), ctypes.c_size_t(room)
            if (code := int(query(ctypes.c_void_p(int(graph.raw_cuda_graph())), before, after, data, ctypes.byref(count)))) != 0:
                raise RuntimeError(f"CUDA error: cuGraphGetEdges_v2 returned {code}")
            if count.value < room:
                return sum(edge.type == _PROGRAMMATIC for edge in data[: count.value])
            room *= 4

    def kernels(self, graph: Graph) -> tuple[KernelNode, ...]:
        """Every kernel node of a graph."""
        return tuple(self._kernel(node) for node in self._nodes(self._graph(graph)) if self._kind(node) is NodeKind.KERNEL)

    def _graph(self, graph: Graph) -> Any:
        return self._driver.CUgraph(init_value=int(graph.raw_cuda_graph()))

    def _all(self, name: str, handle: Any, room: int) -> list[Any]:
        """Everything that a query with room for an array answers, the count last.

        Never asked for the count alone: that leaves no place for what edges carry, and the driver refuses a query that would drop
        it (CUDA driver API, ``cuGraphNodeGetDependencies``: ``CUDA_ERROR_LOSSY_QUERY``).
        """
        while True:
            *arrays, count = self._call(name, handle, room)
            if int(count) < room:
                return [*arrays, int(count)]
            room *= 4

    def _nodes(self, handle: Any) -> list[Any]:
        _, count = self._call("cuGraphGetNodes", handle, 0)
        if not int(count):
            return []
        nodes, count = self._call("cuGraphGetNodes", handle, int(count))
        return list(nodes[: int(count)])

    def _kind(self, node: Any) -> NodeKind:
        return self._kinds.get(int(self._call("cuGraphNodeGetType", node)), NodeKind.OTHER)

    def _kernel(self, node: Any) -> KernelNode:
        params = self._call("cuGraphKernelNodeGetParams", node)
        grid = (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ))
        block = (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ))
        dynamic = int(params.sharedMemBytes)
        registers, static, local = (self._attribute(params, name) for name in ("NUM_REGS", "SHARED_SIZE_BYTES", "LOCAL_SIZE_BYTES"))
        resident = self._resident(params, block[0] * block[1] * block[2], dynamic)
        return KernelNode(grid, block, registers, static, dynamic, local, resident, self._cluster(node, params), self._priority(node))

    def _function(self, params: Any) -> Any:
        """Kernels of a library come as ``kern`` with no ``func``; the function is theirs in the current context."""
        if int(params.func):
            return params.func
        return self._try("cuKernelGetFunction", params.kern) if int(params.kern) else None

    def _attribute(self, params: Any, name: str) -> int:
        wanted = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}", None)
        if wanted is None:
            return 0
        if (function := self._function(params)) is not None:
            return int(self._try("cuFuncGetAttribute", wanted, function) or 0)
        device = self._try("cuCtxGetDevice") if int(params.kern) else None
        return 0 if device is None else int(self._try("cuKernelGetAttribute", wanted, params.kern, device) or 0)

    def _resident(self, params: Any, threads: int, dynamic_bytes: int) -> int:
        function = self._function(params)
        if function is None and int(params.kern):
            # The one query that takes a kernel in the place of a function (CUDA driver API, occupancy).
            function = self._driver.CUfunction(init_value=int(params.kern))
        if function is None:
            return 0
        return int(self._try("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, dynamic_bytes) or 0)

    def _cluster(self, node: Any, params: Any) -> int:
        """As it was launched, else as the kernel was compiled."""
        value = self._node_attribute(node, "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION")
        launched = 1 if value is None else _volume(value.clusterDim.x, value.clusterDim.y, value.clusterDim.z)
        if launched > 1:
            return launched
        return _volume(*(self._attribute(params, f"REQUIRED_CLUSTER_{side}") for side in ("WIDTH", "HEIGHT", "DEPTH")))

    def _priority(self, node: Any) -> int:
        value = self._node_attribute(node, "CU_LAUNCH_ATTRIBUTE_PRIORITY")
        return 0 if value is None else int(value.priority)

    def _node_attribute(self, node: Any, name: str) -> Any:
        wanted = getattr(getattr(self._driver, "CUkernelNodeAttrID", None), name, None)
        return None if wanted is None else self._try("cuGraphKernelNodeGetAttribute", node, wanted)

    def _try(self, name: str, *arguments: Any) -> Any:
        try:
            return self._call(name, *arguments)
        except (AttributeError, RuntimeError):
            return None

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._driver, _WITH_EDGE_DATA.get(name, name), None) or getattr(self._driver, name)
        error, *results = function(*arguments)
        if int(error) != 0:
            raise RuntimeError(f"CUDA error: {name} returned {error}")
        return results[0] if len(results) == 1 else results


def _volume(*sides: Any) -> int:
    size = 1
    for side in sides:
        size *= max(1, int(side))
    return size
