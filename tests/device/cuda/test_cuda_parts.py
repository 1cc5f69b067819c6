"""The parts that touch drivers and libraries, on stand-ins for them; and everything imported where there is no GPU."""

from __future__ import annotations

import ctypes
import enum
import functools
import gc
import json
import random
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.errors import DeviceError, DeviceMissing, UnsupportedGraph, UsageError
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Many, Ref
from autosched.core.records import Contamination
from autosched.device.cuda.baselines import BaselineKind, compile_options, program_module
from autosched.device.cuda.device import CudaDevice
from autosched.device.cuda.meter import GpuMeter
from autosched.device.cuda.profile import OperatorProfile, ProfileSource, read_trace
from autosched.device.cuda.screen import require_capturable, synchronising_operators
from autosched.device.cuda.settings import apply_settings, current_settings
from autosched.device.registry import DEVICES
from autosched.runtime import cuda_key as facts
from autosched.runtime.captured import NodeKind
from autosched.runtime.cuda_bindings import GraphBindings, KernelNode, open_bindings, unaudited
from autosched.runtime.cuda_graph import GraphCapturer
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.plan import FreeRule, make_plan
from autosched.runtime.streams import NAN_PATTERN
from autosched.runtime.torch_streams import TorchStreams
from tests.conformance.fake_cuda import FakeCuda
from tests.conformance.graphs import random_placement, random_program
from tests.conformance.programs import branches_program

no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")


def test_everything_imports_and_nothing_touches_cuda() -> None:
    code = (
        "import pkgutil, importlib, sys, autosched.device.cuda as room\n"
        "import autosched.runtime.cuda_graph, autosched.runtime.streams, autosched.runtime.graph_audit, autosched.verify.race_stress\n"
        "for item in pkgutil.iter_modules(room.__path__): importlib.import_module('autosched.device.cuda.' + item.name)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not any(name.startswith('cuda.bindings') or name == 'pynvml' for name in sys.modules), 'loaded too early'\n"
    )
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(root)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # torch itself may import cuda.bindings; a CPU build has none to import.
    assert done.returncode == 0, done.stderr


@no_cuda
def test_without_cuda_the_device_says_what_is_missing_and_what_to_do() -> None:
    with pytest.raises(DeviceMissing, match=r"built without CUDA; install .* or use --device cpu"):
        DEVICES.get("cuda")()
    with pytest.raises(DeviceError, match="reaches no CUDA device"):
        TorchStreams()


def test_without_a_driver_or_a_gpu_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    facts.gpu_facts.cache_clear()

    def no_library(name: str) -> Any:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.raises(DeviceMissing, match="no NVIDIA driver here"):
        facts.gpu_facts()
    monkeypatch.setattr(facts, "_driver", lambda: FakeDriverLibrary(start=100))
    with pytest.raises(DeviceMissing, match="cuInit gave error 100"):
        facts.gpu_facts()
    monkeypatch.setattr(facts, "_driver", lambda: FakeDriverLibrary(devices=0))
    with pytest.raises(DeviceMissing, match="sees 0 GPUs"):
        facts.gpu_facts()


class FakeDriverLibrary:
    """The few driver calls that need no context."""

    def __init__(self, *, start: int = 0, devices: int = 1) -> None:
        self._start = start
        self._devices = devices

    def cuInit(self, flags: int) -> int:
        return self._start

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._devices
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        return 0

    def cuDeviceGetName(self, name: Any, length: int, handle: Any) -> int:
        name.value = b"Test GPU MIG 1g.18gb"
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, handle: Any) -> int:
        total._obj.value = 18 << 30
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13020
        return 0

    def cuDeviceGetPCIBusId(self, place: Any, length: int, handle: Any) -> int:
        place.value = b"0000:3b:00.0"
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, handle: Any) -> int:
        if number == 37:
            return 1  # this driver does not tell the bus width
        value._obj.value = number
        return 0


def test_the_key_is_read_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "_driver", FakeDriverLibrary)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    device = CudaDevice()
    details = dict(device.key.details)
    assert device.key.name == "Test GPU MIG 1g.18gb"
    assert details["compute_capability"] == "75.76"
    assert details["sm_count"] == "16"
    assert details["mig"] == "1g.18gb"
    assert details["memory_gib"] == "18"
    assert "memory_bus_bits" not in details
    assert dict(device.software.versions)["cuda_driver"] == "13.2"
    facts.gpu_facts.cache_clear()


def test_the_meter_asks_for_the_gpu_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's numbers are not CUDA's: it does not know which GPUs are visible."""
    asked: list[str] = []

    def by_place(place: str) -> str:
        asked.append(place)
        return "handle"

    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=by_place,
        nvmlDeviceGetClockInfo=lambda handle, kind: {("handle", 1): 1980}[handle, kind],
        NVML_CLOCK_SM=1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "_driver", FakeDriverLibrary)
    assert GpuMeter(0).read() == Contamination(clock_mhz=1980.0)
    assert asked == ["0000:3b:00.0"]
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "_driver", lambda: FakeDriverLibrary(devices=0))
    assert GpuMeter(0).read() == Contamination()
    facts.gpu_facts.cache_clear()


def test_variables_that_cuda_reads_at_start_are_in_the_software_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_driver", FakeDriverLibrary)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    facts.gpu_facts.cache_clear()
    tuned = facts.cuda_software_key()
    assert dict(tuned.versions)["cuda_device_max_connections"] == "default"
    assert dict(tuned.versions)["cublas_workspace_config"] == ":4096:8"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # A difference of software is "degraded": verified again before use.
    assert tuned.differences(facts.cuda_software_key()) == ["cuda_device_max_connections: default there, 32 here"]
    facts.gpu_facts.cache_clear()


# -- cuda-bindings -----------------------------------------------------------------------------------------------------
class Code(enum.IntEnum):
    SUCCESS = 0
    INVALID = 1
    LOSSY = 918


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
        early, whole = types.SimpleNamespace(type=1), types.SimpleNamespace(type=0)
        return self._filled(count, [11, 12], [12, 13], [early, whole])

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
    assert own.waves(2) == 2.0


def test_bindings_are_found_by_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 12: an install may resolve to bindings newer, or a driver older, than what is asked for."""
    import importlib

    driver: Any = FakeDriver()
    monkeypatch.setattr(importlib, "import_module", lambda name: driver)
    assert open_bindings() is not None
    assert unaudited() == ""

    class Older(FakeDriver):
        def __getattribute__(self, name: str) -> Any:
            if name == "cuGraphGetEdges":
                raise AttributeError(name)
            return super().__getattribute__(name)

    driver = Older()
    assert open_bindings() is None
    assert "not audited" in unaudited()

    class NoDriver(FakeDriver):
        def cuDriverGetVersion(self) -> tuple[Code, int]:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver = NoDriver()
    assert open_bindings() is None
    assert "not audited" in unaudited()


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
    assert words in unaudited()


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


def test_a_driver_error_is_an_error() -> None:
    class Failing(FakeDriver):
        def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:
            return Code.INVALID, None, None

    with pytest.raises(RuntimeError, match="cuGraphGetNodes"):
        GraphBindings(Failing()).read(RawGraph())


# -- profile -----------------------------------------------------------------------------------------------------------
def test_a_profiler_trace_is_read_without_looking_at_names() -> None:
    kernel = {"grid": [4, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 2048, "blocks per SM": 0.03}
    events = [
        {"ph": "X", "cat": "kernel", "ts": 20, "args": {**kernel, "occupancy": {"activeBlocksPerMultiprocessor": 8}}},
        {"ph": "X", "cat": "kernel", "ts": 10, "args": kernel},
        {"ph": "X", "cat": "gpu_memset", "ts": 5, "args": {}},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "name": "aten::mm"},
        {"ph": "M", "name": "process_name"},
    ]
    kernels, others = read_trace(json.loads(json.dumps(events)))
    assert others == 1
    assert [item.resident_blocks for item in kernels] == [0, 8]  # "blocks per SM" is not residency
    assert kernels[0].blocks == 4
    assert kernels[0].dynamic_shared_bytes == 2048
    profile = OperatorProfile("s", 0, kernels, others, 1, 2, 3, 4.0, 5.0, ProfileSource.PROFILER)
    assert profile.longest is kernels[0]
    assert OperatorProfile("s", 0, (), 0, 1, 2, 3, 4.0, 5.0, ProfileSource.GRAPH).longest is None


# -- screen ------------------------------------------------------------------------------------------------------------
def one_call(target: str, *args: object, dtypes: tuple[str, ...] = ("float32", "float32")) -> OpGraph:
    values = [Value(index, TensorSpec((4,), dtype, (1,)), ValueRole.INPUT, index) for index, dtype in enumerate(dtypes)]
    made = len(values)
    values.append(Value(made, TensorSpec((4,), "float32", (1,)), ValueRole.INTERMEDIATE, made))
    call = Call(target, args, (), (made,))  # type: ignore[arg-type]
    operator = Operator(0, "pick", (call,), call.reads(), (made,), (), 0, 0, 0, "s", "net.py:7")
    return OpGraph((operator,), tuple(values), tuple(range(made)), (made,))


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (one_call("aten::nonzero.default", Ref(0)), "reads a value back"),
        (one_call("aten::masked_select.default", Ref(0), Ref(1), dtypes=("float32", "bool")), "reads a value back"),
        (one_call("aten::index.Tensor", Ref(0), Many((Ref(1),)), dtypes=("float32", "bool")), "indexes with a mask"),
    ],
)
def test_operators_that_synchronise_are_named_before_capture(graph: OpGraph, words: str) -> None:
    (found,) = synchronising_operators(graph)
    assert words in found.reason
    with pytest.raises(UnsupportedGraph, match=r"pick \(aten::.*\) at net\.py:7"):
        require_capturable(graph)


@pytest.mark.parametrize(
    "graph",
    [
        one_call("aten::index.Tensor", Ref(0), Many((Ref(1),)), dtypes=("float32", "int64")),  # tagged dynamic, and harmless
        one_call("aten::add.Tensor", Ref(0), Ref(1)),
        branches_program()[0].graph,
    ],
)
def test_ordinary_operators_pass(graph: OpGraph) -> None:
    assert synchronising_operators(graph) == []


# -- baselines ---------------------------------------------------------------------------------------------------------
@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.integers(0, 1000))
def test_the_program_as_a_module_computes_the_same(seed: int) -> None:
    program, constants = random_program(random.Random(seed), 20)
    bound = bind(program, constants)
    inputs = random_inputs(program, seed)
    wanted = [tensor.clone() for tensor in bound.run(inputs)]
    with torch.inference_mode():
        made = program_module(bound)(*[tensor.clone() for tensor in inputs])
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.parametrize("kind", [BaselineKind.COMPILED, BaselineKind.MAX_AUTOTUNE, BaselineKind.MAX_AUTOTUNE_COMBO])
def test_every_compiler_option_exists(kind: BaselineKind) -> None:
    known = torch._inductor.list_options()
    options = compile_options(kind)
    assert set(options) <= set(known)
    assert options["triton.cudagraphs"] is False  # captured by us, so that no guard or copy is on its clock
    assert options.get("freezing", False) == (kind is BaselineKind.MAX_AUTOTUNE_COMBO)


def test_an_eager_baseline_has_no_compiler_options() -> None:
    with pytest.raises(UsageError, match="not compiled"):
        compile_options(BaselineKind.EAGER)


# -- real tensors under the executor's order and frees -----------------------------------------------------------------
@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 10_000))
def test_real_operators_in_any_order_with_frees_give_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    program, constants = random_program(rng, rng.randint(5, 30))
    bound = bind(program, constants)
    inputs = random_inputs(program, seed)
    wanted = [tensor.clone() for tensor in bound.run([tensor.clone() for tensor in inputs])]
    schedule = random_placement(rng, program.graph, 4, extra_edges=1)
    for rule in (FreeRule.VECTOR_CLOCK, FreeRule.HOLD_ALL):
        made = GraphCapturer(FakeCuda()).run_eager(bound, make_plan(program.graph, schedule, rule), inputs)
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_a_freed_value_is_really_gone() -> None:
    """Its last Python reference goes when the plan says so; else no block is ever used again."""
    program, constants = branches_program(branches=2, depth=3, size=8)
    bound = bind(program, constants)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def watching(kernel: Any, index: int) -> Any:
        def run(slots: list[Any]) -> None:
            nonlocal most
            kernel(slots)
            for value in program.graph.operators[index].writes:
                alive.append(weakref.ref(slots[value]))
            gc.collect()
            most = max(most, sum(item() is not None for item in alive))

        return run

    kernels = tuple(watching(kernel, index) for index, kernel in enumerate(bound.kernels))
    watched = type(bound)(program, bound.device, kernels, bound.constants)
    order = list(range(len(program.graph)))
    plan = make_plan(program.graph, random_placement(random.Random(0), program.graph, 1))
    gc.freeze()  # what was there before need not be looked through after each operator
    try:
        outputs = GraphCapturer(FakeCuda()).run_eager(watched, plan, random_inputs(program, 0))
    finally:
        gc.unfreeze()
    assert len(alive) == len(order)
    assert most <= 4
    assert sum(item() is not None for item in alive) == len(outputs)


def test_settings_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = current_settings(0)
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        changed = current_settings(2)
        assert changed.float32_matmul_precision == "high"
        assert changed.cudnn_benchmark
        assert changed.device_index == 2
        apply_settings(before)
        assert current_settings(0) == before
    finally:
        apply_settings(before)


def test_deterministic_algorithms_travel() -> None:
    before = current_settings(0)
    try:
        torch.use_deterministic_algorithms(True)
        wanted = current_settings(0)
        torch.use_deterministic_algorithms(False)
        apply_settings(wanted)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        apply_settings(before)
    assert not torch.are_deterministic_algorithms_enabled()


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


def test_every_name_of_torch_cuda_that_is_used_exists() -> None:
    """Trap 12: names and arguments drift from release to release, and without a GPU nothing else would notice."""
    import inspect
    import re

    from autosched.runtime import torch_streams

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
