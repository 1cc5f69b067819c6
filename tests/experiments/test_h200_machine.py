"""What is learned of a machine first: that what does not repeat its bits is named, and which packages it has."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import types

import pytest
import torch

from experiments.h200 import machine


def test_what_does_not_repeat_its_bits_is_named() -> None:
    fourth = itertools.count()

    def once_otherwise() -> torch.Tensor:
        return torch.tensor([1.0, 2.0 + (2.0**-22 if next(fourth) == 3 else 0.0)])

    assert machine.differing({"same": lambda: torch.ones(2), "not": once_otherwise}) == ["not"]


def test_convolutions_of_both_dtypes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CONVOLUTIONS", ((3, 4, 8, 3, 2), (4, 4, 8, 1, 1)))
    found = machine.convolutions(torch, "cpu")
    assert (found["tried"], found["times"], found["repeat_their_bits"], found["differing"]) == (4, 5, True, [])
    monkeypatch.setattr(torch, "conv2d", lambda *given, **options: torch.rand(2))
    found = machine.convolutions(torch, "cpu")
    assert not found["repeat_their_bits"]
    assert "torch.bfloat16 4 to 4, 8, 1 by 1" in found["differing"]


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "cuda-bindings":
            return "13.0.1"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert machine.versions() == {"cuda-bindings": "13.0.1", "triton": "", "nvidia-cudnn-cu13": ""}


def test_the_clock_is_that_of_the_gpu_that_pytorch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's numbers are not CUDA's: it does not know which GPUs are visible."""
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId={"0000:3b:00.0": "second"}.__getitem__,
        nvmlDeviceGetHandleByIndex=lambda index: "first",
        nvmlDeviceGetClockInfo=lambda handle, kind: {"first": 210, "second": 1980}[handle],
        NVML_CLOCK_SM=1,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine, "pci_bus_id", {0: "0000:3b:00.0"}.__getitem__)
    assert machine.clock_reader()() == 1980
