"""A machine with several GPUs: each is had by its number, alike ones share what is learned of them, and others never do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autosched import doctor
from autosched.capture.export import capture
from autosched.compile_options import parse_options
from autosched.core.errors import DeviceError, DeviceMissing, UnknownName, UsageError
from autosched.core.progress import Silent
from autosched.core.records import DeviceKey, Failure, FailureKind
from autosched.core.variants import Lowering
from autosched.datasets.journal import Scope
from autosched.device.base import OneOfSeveral
from autosched.device.cuda import device as cuda_device
from autosched.device.cuda import worker_main
from autosched.device.cuda.device import CudaDevice
from autosched.device.cuda.messages import SettingsBody
from autosched.device.cuda.settings import current_settings, require_gpu
from autosched.device.registry import device_like, device_named, index_of, place_of
from autosched.pipeline import baselines, inductor_capture, preparing, request, retraining
from autosched.pipeline.memory import open_journal
from autosched.pipeline.original import Original
from autosched.runtime import current_device
from autosched.runtime import load as loading
from tests.conformance.command import run
from tests.conformance.fake_driver import gpus_called
from tests.conformance.unavailable_baseline import UnavailableBaseline


@pytest.fixture
def alike() -> Iterator[None]:
    with gpus_called("Test GPU A", "Test GPU A"):
        yield


@pytest.fixture
def different() -> Iterator[None]:
    with gpus_called("Test GPU A", "Test GPU B", "Test GPU A"):
        yield


@pytest.mark.usefixtures("alike")
def test_a_gpu_is_had_by_its_number() -> None:
    for name, index in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        device = device_named(name)
        assert isinstance(device, CudaDevice)
        assert isinstance(device, OneOfSeveral)
        assert (device.index, device.count, index_of(device), place_of(device)) == (index, 2, index, f"cuda:{index}")
    cpu = device_named("cpu")
    assert (index_of(cpu), place_of(cpu)) == (None, "cpu")


@pytest.mark.usefixtures("alike")
def test_cuda_alone_is_the_current_gpu_where_pytorch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [index_of(device_named(name)) for name in ("cuda", "cuda:0")] == [1, 0]


def test_to_ask_which_is_current_begins_nothing() -> None:
    before = torch.cuda.is_initialized()
    current_device.current_index()
    assert torch.cuda.is_initialized() is before


@pytest.mark.usefixtures("alike")
def test_a_gpu_that_is_not_there_is_a_mistake_and_they_are_counted() -> None:
    with pytest.raises(UsageError, match=r"no cuda:2: this process sees 2 GPUs; expected cuda:0 to cuda:1\."):
        device_named("cuda:2")
    assert run("tune", "autosched:toy", "--device", "cuda:2") == 2
    assert run("collect", "autosched:toy", "--device", "cuda:17") == 2


def test_one_gpu_is_said_to_be_the_only_one() -> None:
    with gpus_called("Test GPU A"), pytest.raises(UsageError, match=r"sees 1 GPU; expected cuda:0\."):
        device_named("cuda:1")


def test_where_there_is_none_the_device_is_missing() -> None:
    with gpus_called(), pytest.raises(DeviceMissing, match="sees 0 GPUs"):
        device_named("cuda:1")


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize(
    "name", ["cuda:", "cuda:-1", "cuda:+1", "cuda:01", "cuda:1:0", "cuda:one", "cuda:\u0661", "cuda:99999", "cpu:0", "gpu:1"]
)
def test_what_is_no_number_is_no_device(name: str) -> None:
    with pytest.raises(UnknownName, match="cuda:N, one of several GPUs"):
        device_named(name)


@pytest.mark.usefixtures("alike")
def test_alike_gpus_are_one_device_to_whatever_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    first, second = device_named("cuda:0"), device_named("cuda:1")
    assert (first.key, first.software) == (second.key, second.software)
    assert retraining.places_of("cuda:0") == retraining.places_of("cuda:1")
    with open_journal(Scope(first.key, first.software), private=False) as journal:
        journal.add_solo("kernel", 1, Failure(FailureKind.CRASH, "tried"))
    with open_journal(Scope(second.key, second.software), private=False) as journal:
        assert journal.solo("kernel", 1) == Failure(FailureKind.CRASH, "tried")


@pytest.mark.usefixtures("different")
def test_different_gpus_of_one_machine_share_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    first, second = device_named("cuda:0"), device_named("cuda:1")
    assert first.key != second.key
    for one, other in zip(retraining.places_of("cuda:0"), retraining.places_of("cuda:1"), strict=True):
        assert one != other
    with open_journal(Scope(first.key, first.software), private=False) as journal:
        journal.add_solo("kernel", 1, Failure(FailureKind.CRASH, "tried"))
    with open_journal(Scope(second.key, second.software), private=False) as journal:
        assert journal.solo("kernel", 1) is None


@pytest.mark.usefixtures("different")
def test_a_file_is_measured_on_the_gpu_that_it_was_tuned_for() -> None:
    second, third = device_named("cuda:1"), device_named("cuda:2")
    assert place_of(device_like(second.key)) == "cuda:1"
    assert place_of(device_like(third.key)) == "cuda:0"  # the first of those that are alike
    assert place_of(device_like(second.key, "cuda:2")) == "cuda:2"
    # Where none fits, the first is there to say what differs.
    assert place_of(device_like(DeviceKey("cuda", "Test GPU C", ()))) == "cuda:0"


class _Asked(Exception):
    """Ends a test at what it wanted to see."""


@pytest.mark.usefixtures("different")
def test_the_measuring_process_is_told_which_and_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[SettingsBody] = []

    def session(program: Any, constants: Any, **options: Any) -> None:
        told.append(options["settings"])

    monkeypatch.setattr(cuda_device, "CudaSession", session)
    captured = capture(nn.ReLU(), (torch.ones(2),))
    device = device_named("cuda:1")
    device.open(captured.program, captured.constants, timeout_s=1.0)
    assert (told[0].device_index, told[0].gpu) == (1, device.key)


@pytest.mark.usefixtures("different")
def test_the_measuring_process_uses_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def streams(name: str) -> None:
        named.append(name)
        raise _Asked

    monkeypatch.setattr(worker_main, "TorchStreams", streams)
    builder = worker_main._Builder(None)  # type: ignore[arg-type]
    builder._channel = type("Channel", (), {"beat": lambda self, item: None})()  # type: ignore[assignment]
    builder.apply(current_settings(1, device_named("cuda:1").key))
    with pytest.raises(_Asked):
        builder.build(None)  # type: ignore[arg-type]
    assert named == ["cuda:1"]


@pytest.mark.usefixtures("different")
def test_a_process_that_sees_other_gpus_refuses() -> None:
    """``CUDA_VISIBLE_DEVICES`` was changed after the driver had been asked: every record would carry another GPU's key."""
    first, second = device_named("cuda:0").key, device_named("cuda:1").key
    require_gpu(current_settings(1, second))
    require_gpu(current_settings(2, first))
    require_gpu(current_settings(1))
    with pytest.raises(DeviceError, match=r"cuda:1 is another GPU in the measuring process .*name: Test GPU A there, Test GPU B here"):
        require_gpu(current_settings(1, first))
    with pytest.raises(UsageError, match="no cuda:3"):
        require_gpu(current_settings(3, first))


@pytest.mark.usefixtures("different")
def test_baselines_run_on_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[SettingsBody] = []

    class Baseline(UnavailableBaseline):
        def __init__(self, program: Any, constants: Any, kind: Any, settings: SettingsBody, **options: Any) -> None:
            super().__init__(program, constants, kind, settings)
            told.append(settings)

    monkeypatch.setattr(baselines, "CudaBaseline", Baseline)
    model, args, device = nn.ReLU(), (torch.ones(2),), device_named("cuda:1")
    rivals = baselines.Rivals(model, args, None, device, compiled=True, source=None, progress=Silent())
    rivals.ready(capture(model, args), [])
    assert len(told) > 1
    assert {(item.device_index, item.gpu) for item in told} == {(1, device.key)}


@pytest.mark.usefixtures("alike")
def test_a_whole_model_is_compiled_for_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes the index into its code, and what is compiled here is found by the measuring process."""
    compiled: list[str] = []

    def late(source: Any, constants: Any, home: torch.device, *rest: Any) -> None:
        compiled.append(str(home))
        raise _Asked

    monkeypatch.setattr(preparing, "compile_ahead", late)
    with pytest.raises(_Asked):
        preparing.capture_as(Lowering.INDUCTOR, Original(nn.ReLU(), (torch.ones(2),), None), device_named("cuda:1"), 10.0)

    def at_once(captured: Any, home: torch.device, mode: Any, *, threads: int | None) -> None:
        assert threads is None
        compiled.append(str(home))
        raise _Asked

    monkeypatch.setattr(inductor_capture, "lower_inductor", at_once)
    with pytest.raises(_Asked):
        preparing.capture_as(Lowering.INDUCTOR, Original(nn.ReLU(), (torch.ones(2),), None), device_named("cuda:1"))
    assert compiled == ["cuda:1", "cuda:1"]


@pytest.mark.usefixtures("different")
def test_a_model_on_a_gpu_is_measured_there_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    call: tuple[Any, ...] = (nn.ReLU(), (torch.ones(2),), None)
    assert [request.where_to_measure(name, *call) for name in ("cuda", "auto", "cpu", "cuda:0")] == ["cuda", "auto", "cpu", "cuda:0"]
    monkeypatch.setattr(request, "home_of", lambda *call: torch.device("cuda:2"))
    asked = ("cuda", "auto", "cpu", "cuda:0", "replay:runs")
    assert [request.where_to_measure(name, *call) for name in asked] == ["cuda:2", "cuda:2", "cpu", "cuda:0", "replay:runs"]
    assert request.moved_note(device_named("cuda:2"), *call) == ""
    assert request.moved_note(device_named("cpu"), *call) == ""
    alike = "measured on cuda:0, a GPU of the same kind: the schedule is for both"
    assert request.moved_note(device_named("cuda:0"), *call).endswith(alike)
    assert "on cuda:1, another kind of GPU (Test GPU B)" in request.moved_note(device_named("cuda:1"), *call)


def test_doctor_lists_each_gpu_and_a_cost_model_for_each_kind() -> None:
    def found() -> dict[str, str]:
        return {item.what: item.detail for item in doctor.examine() if "cuda" in item.what}

    with gpus_called("Test GPU A"):
        assert found()["cuda"] == "Test GPU A"
        assert found().keys() == {"cuda", "cost model, cuda", "cuda-bindings"}
    with gpus_called("Test GPU A", "Test GPU A"):
        assert (found()["cuda"], found()["cuda:0"], found()["cuda:1"]) == ("2 GPUs", "Test GPU A, 18 GiB", "Test GPU A, 18 GiB")
        assert [name for name in found() if name.startswith("cost model")] == ["cost model, cuda"]
    with gpus_called("Test GPU A", "Test GPU B", "Test GPU A"):
        assert found()["cuda:2"] == "Test GPU A, 18 GiB"
        assert [name for name in found() if name.startswith("cost model")] == ["cost model, cuda:0", "cost model, cuda:1"]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", torch.device("cuda", 1)])
def test_the_compiler_backend_takes_a_numbered_device(device: Any) -> None:
    assert parse_options({"device": device}).device == str(device)


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:01", "gpu", None, 1])
def test_the_compiler_backend_refuses_what_is_none(device: Any) -> None:
    with pytest.raises(UsageError, match="expected auto, cpu, cuda, or cuda:N"):
        parse_options({"device": device})


def test_a_model_without_parameters_is_where_pytorch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "current_index", lambda: 1)
    assert loading._home(nn.ReLU(), "cuda") == torch.device("cuda:1")
    assert loading._home(nn.ReLU(), "cpu") == torch.device("cpu")
    assert loading._home(nn.Linear(1, 1), "cuda") == torch.device("cpu")
