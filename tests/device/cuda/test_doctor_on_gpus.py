"""What doctor says of a GPU: whether this PyTorch can use it, and whether others do; read from stand-ins for the driver and NVML."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from autosched import doctor
from autosched.core.errors import DeviceError
from autosched.device.cuda.meter import GpuMeter
from autosched.device.registry import device_like, place_of
from autosched.pipeline.bundles import verdict_here
from autosched.runtime.cuda import bindings
from autosched.runtime.cuda import key as facts
from autosched.runtime.cuda.bindings import NOT_INSTALLED
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.fake_driver import FakeDriverLibrary, gpus_called
from tests.conformance.graphs import TwoBranches


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_taken_now", lambda cores: 0.0)


def found() -> dict[str, doctor.Finding]:
    return {item.what: item for item in doctor.examine() if "cuda" in item.what}


def nvml(busy_pct: int, held_gib: int, *, refuses: str = "") -> types.SimpleNamespace:
    """NVML's module, for a GPU of 80 GiB; the function called ``refuses`` raises."""

    def refuse(*of: str) -> None:
        raise RuntimeError("Not Supported")

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": lambda place: place,
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=busy_pct, memory=0),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=held_gib << 30, total=80 << 30),
    }
    return types.SimpleNamespace(**{**answers, **({refuses: refuse} if refuses else {})})


def test_a_driver_too_old_for_this_pytorch_is_a_problem_and_not_a_gpu() -> None:
    with gpus_called("NVIDIA H100", version=12040):
        said = found()
        assert (said["cuda"].state, said["cuda"].state.exit_code) == (doctor.State.PROBLEM, 5)
        assert "for CUDA 12.4" in said["cuda"].advice
        assert "cost model, cuda" not in said


def test_a_gpu_without_kernels_is_a_problem_and_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldOneFirst(FakeDriverLibrary):
        def cuDeviceGetAttribute(self, value: object, number: int, handle: types.SimpleNamespace) -> int:
            self._attributes = {75: (7, 9)[handle.value], 76: 0}
            return super().cuDeviceGetAttribute(value, number, handle)

    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_75 sm_90", raising=False)
    with gpus_called("Tesla V100", "NVIDIA H100", kind=OldOneFirst):
        said = found()
        assert [said[name].state for name in ("cuda:0", "cuda:1")] == [doctor.State.PROBLEM, doctor.State.OK]
        assert "no kernels for its compute capability of 7.0" in said["cuda:0"].advice
        assert place_of(device_like(facts.cuda_device_key(1))) == "cuda:1"
        with pytest.raises(DeviceError, match="Tesla V100"):
            device_like(facts.cuda_device_key(0))


def test_a_file_for_a_gpu_that_cannot_be_used_says_why_and_not_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus_called("NVIDIA H100"):
        tuned_on = facts.cuda_device_key()
    monkeypatch.setattr("tests.conformance.bundles.cpu_device_key", lambda: tuned_on)
    bundle = two_branches_bundle(TwoBranches().eval())
    for options, why in (({"version": 12040}, "its driver is too old for this PyTorch"), ({"start": 100}, "Check CUDA_VISIBLE_DEVICES")):
        with gpus_called("NVIDIA H100", **options):
            lines = [line for line in verdict_here(bundle).lines if line.startswith("device")]
        assert lines[0] == "device kind: cuda there, none here"
        assert lines[1].startswith("device name: NVIDIA H100 there, no such device (")
        assert why in lines[1]
        assert len(lines) == 2


@pytest.mark.parametrize(
    ("busy_pct", "held_gib", "state", "detail"),
    [
        (0, 1, doctor.State.OK, "Test GPU"),
        (5, 71, doctor.State.OK, "Test GPU; 71 of 80 GiB of its memory taken"),
        (93, 12, doctor.State.BUSY, "Test GPU; other processes keep it busy 93 % of the time now, 12 of 80 GiB of its memory taken"),
    ],
)
def test_what_other_processes_use_of_a_gpu_is_said(
    busy_pct: int, held_gib: int, state: doctor.State, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(busy_pct, held_gib))
    with gpus_called("Test GPU"):
        said = found()
    assert (said["cuda"].state, said["cuda"].detail) == (state, detail)
    assert "cost model, cuda" in said


@pytest.mark.parametrize("refuses", ["nvmlInit", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo"])
def test_a_gpu_of_which_nvml_tells_nothing_is_fine(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(93, 12, refuses=refuses))
    with gpus_called("Test GPU"):
        said = found()
    assert (said["cuda"].state, said["cuda"].detail) == (doctor.State.OK, "Test GPU")


@pytest.mark.parametrize(
    ("busy_pct", "share", "waits"),
    [
        ((0,), 0.0, 0),
        # What this process ran a moment ago.
        ((80, 0), 0.0, 1),
        ((80, 60, 0), 0.0, 2),
        ((80, 60, 35), 0.35, 2),
        ((80, None), None, 1),
        ((None,), None, 0),
    ],
)
def test_other_processes_share_of_a_gpu_is_that_after_our_own_kernels(
    busy_pct: tuple[int | None, ...], share: float | None, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, waited = list(busy_pct), []

    def rates(handle: object) -> types.SimpleNamespace:
        now = said.pop(0)
        if now is None:
            raise RuntimeError("Not Supported")
        return types.SimpleNamespace(gpu=now)

    library = nvml(0, 1)
    library.nvmlDeviceGetUtilizationRates = rates
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr("time.sleep", waited.append)
    with gpus_called("Test GPU"):
        assert GpuMeter(0).others_share() == share
    # No window may hold anything from before.
    assert len(waited) == waits
    assert all(seconds > 1.0 for seconds in waited)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.6.0")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("there", "named", "headers", "lacking"),
    [
        ({"gcc"}, None, True, ""),
        ({"clang"}, None, True, ""),
        ({"mycc"}, "mycc", True, ""),
        (set(), None, True, "no C compiler: install gcc"),
        ({"gcc"}, "mycc", True, "no C compiler mycc"),
        ({"gcc"}, None, False, "Python.h is missing: install the headers"),
    ],
)
def test_what_triton_compiles_its_launchers_with_is_looked_for(
    there: set[str], named: str | None, headers: bool, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if named is not None:
        monkeypatch.setenv("CC", named)
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    # As on Debian, where the folder of the default scheme may be empty.
    monkeypatch.setattr("sysconfig.get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(
        "sysconfig.get_paths", lambda scheme: {"include": str(tmp_path if scheme == "posix_prefix" else tmp_path / "local")}
    )
    with gpus_called("Test GPU"):
        triton = next(item for item in doctor.examine() if item.what == "triton")
    assert triton.state is (doctor.State.MISSING if lacking else doctor.State.OK)
    assert lacking in triton.detail


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("why", "detail"),
    [
        ("", "3.6.0"),
        ("this version of cuda-bindings lacks cuGraphGetEdges", "3.6.0; this version of cuda-bindings lacks cuGraphGetEdges"),
        (NOT_INSTALLED, "3.6.0; it cannot be imported"),
    ],
)
def test_bindings_that_cannot_be_used_are_not_ok(why: str, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "why_unread", lambda: why)
    with gpus_called("Test GPU"):
        said = next(item for item in doctor.examine() if item.what == "cuda-bindings")
    assert (said.state, said.detail) == (doctor.State.MISSING if why else doctor.State.OK, detail)
    # With the name of autosched, pip would upgrade that alone.
    assert ("pip install -U cuda-bindings" in said.advice) is bool(why)
