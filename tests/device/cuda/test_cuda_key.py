"""Where there is no GPU everything imports and the device says what is missing; what a GPU is, read from stand-ins for its driver."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest
import torch

from autosched.core.errors import DeviceError, DeviceMissing
from autosched.core.records import Contamination
from autosched.device.cuda.device import CudaDevice
from autosched.device.cuda.meter import GpuMeter
from autosched.device.registry import DEVICES
from autosched.runtime.cuda import key as facts
from autosched.runtime.cuda.torch_streams import TorchStreams
from tests.conformance.fake_driver import FakeDriverLibrary
from tests.conformance.forked import run_forked

no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")


def test_everything_imports_and_nothing_touches_cuda() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # a CUDA build of torch may load them itself
        "import pkgutil, importlib, autosched.device.cuda as room\n"
        "import autosched.runtime.cuda.graph, autosched.runtime.cuda.streams, autosched.runtime.cuda.audit, autosched.verify.race_stress\n"
        "for item in pkgutil.iter_modules(room.__path__): importlib.import_module('autosched.device.cuda.' + item.name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not any(name.startswith('cuda.bindings') or name == 'pynvml' for name in sys.modules.keys() - before), 'loaded too early'\n"
    )
    done = run_forked(code)
    assert done.returncode == 0, done.stderr


@no_cuda
def test_without_cuda_the_device_says_what_is_missing_and_what_to_do() -> None:
    with pytest.raises(DeviceMissing, match=r"built without CUDA; install .* or use --device cpu \(in Python device='cpu'\)"):
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
    for start, words, expected in (
        (802, "system not yet initialized", "cuInit gave error 802: system not yet initialized"),
        (999, "", r"cuInit gave error 999\)"),
    ):
        monkeypatch.setattr(facts, "driver_library", lambda start=start, words=words: FakeDriverLibrary(start=start, words=words))
        with pytest.raises(DeviceMissing, match=expected):
            facts.gpu_facts()
    # What a driver answers whose GPUs CUDA_VISIBLE_DEVICES hides.
    for nothing in (FakeDriverLibrary(names=()), FakeDriverLibrary(start=100, words="no CUDA-capable device is detected")):
        monkeypatch.setattr(facts, "driver_library", lambda nothing=nothing: nothing)
        with pytest.raises(DeviceMissing, match=r"sees 0 GPUs.*Check CUDA_VISIBLE_DEVICES"):
            facts.gpu_facts()


def test_the_key_is_read_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "driver_library", FakeDriverLibrary)
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


def test_a_driver_or_a_gpu_too_old_for_this_pytorch_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_80 sm_75 sm_120 compute_120", raising=False)
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "driver_library", lambda: FakeDriverLibrary(names=("NVIDIA H100",), version=12040))
    with pytest.raises(DeviceError, match=r"NVIDIA H100: its driver is too old .* for CUDA 12\.4, torch .* for CUDA 13\.0"):
        CudaDevice()
    # A driver serves later minor versions than its own.
    monkeypatch.setattr(torch.version, "cuda", "13.9")
    volta = FakeDriverLibrary(names=("Tesla V100",), attributes={75: 7, 76: 0})
    monkeypatch.setattr(facts, "driver_library", lambda: volta)
    with pytest.raises(DeviceError, match=r"Tesla V100: torch .* has no kernels for .* of 7\.0; expected at least 7\.5"):
        CudaDevice()
    facts.gpu_facts.cache_clear()
    turing = FakeDriverLibrary(names=("Tesla T4",), attributes={75: 7, 76: 5})
    monkeypatch.setattr(facts, "driver_library", lambda: turing)
    assert CudaDevice().key.name == "Tesla T4"
    facts.gpu_facts.cache_clear()


def test_the_clock_is_the_drivers_or_one_that_no_gpu_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "driver_library", FakeDriverLibrary)
    assert facts.fastest_clock_mhz() == pytest.approx(0.013)  # this driver's attributes are their numbers
    monkeypatch.setattr(FakeDriverLibrary, "cuDeviceGetAttribute", lambda self, value, number, handle: 1)
    assert facts.fastest_clock_mhz() > 3000
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
    monkeypatch.setattr(facts, "driver_library", FakeDriverLibrary)
    assert GpuMeter(0).read() == Contamination(clock_mhz=1980.0)
    assert asked == ["0000:3b:00.0"]
    facts.gpu_facts.cache_clear()
    monkeypatch.setattr(facts, "driver_library", lambda: FakeDriverLibrary(names=()))
    assert GpuMeter(0).read() == Contamination()
    facts.gpu_facts.cache_clear()


def test_variables_that_cuda_reads_at_start_are_in_the_software_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "driver_library", FakeDriverLibrary)
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
