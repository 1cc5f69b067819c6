"""Preparing a lowering: the measuring process starts while the model is captured, and does not outlive a capture that fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture import export
from autosched.capture.draft import Draft
from autosched.capture.export import Captured, capture
from autosched.capture.structure import structure_of
from autosched.core.errors import UnsupportedGraph
from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.core.progress import Silent
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.schedule import Schedule
from autosched.core.variants import Lowering
from autosched.device.cpu import CpuDevice
from autosched.export import bundle
from autosched.pipeline import inductor_capture, original, preparing
from autosched.pipeline.original import Original
from autosched.pipeline.preparing import NotHad, capture_as
from autosched.runtime.bundle.zip import MAX_BUNDLE_BYTES
from tests.conformance.session_double import SessionDouble


class Device:
    """Says what was asked of it, in order."""

    key = DeviceKey("cpu", "double", (("cores", "2"),))
    software = SoftwareKey((("torch", "0"),))

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.compiling: list[bool] = []

    def start_early(self, *, timeout_s: float, compiling: bool = False) -> None:
        self.asked.append(f"start {timeout_s:.0f}")
        self.compiling.append(compiling)

    def drop_early(self) -> None:
        self.asked.append("drop")

    def open(self, program: Program, constants: Mapping[int, torch.Tensor], *, timeout_s: float) -> SessionDouble:
        self.asked.append(f"open {timeout_s:.0f}")

        def truth(schedule: Schedule) -> float:
            return 1.0

        return SessionDouble(truth)


def prepared(device: Device, lowering: Lowering = Lowering.ATEN) -> Any:
    return preparing.prepare(lowering, Original(nn.ReLU(), (torch.ones(2),), None), device, Silent())  # type: ignore[arg-type]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(answer: Any) -> Device:
        device = Device()

        def capture_as(*call: Any) -> Any:
            device.asked.append("capture")
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(preparing, "capture_as", capture_as)
        return device

    return use


def test_the_process_starts_before_the_capture_and_is_the_sessions(capturing: Any) -> None:
    device = capturing(capture(nn.ReLU(), (torch.ones(2),)))
    assert prepared(device).lowering
    start, *rest = device.asked
    # Only with the same patience does the session take it.
    assert rest == ["capture", start.replace("start", "open")]


def test_compilers_may_start_early_where_there_will_be_regions(capturing: Any) -> None:
    device = capturing(capture(nn.ReLU(), (torch.ones(2),)))
    for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED):
        prepared(device, lowering)
    assert device.compiling == [False, False, True]


def test_a_capture_that_is_refused_or_breaks_leaves_no_process(capturing: Any) -> None:
    device = capturing(NotHad("its code is not understood"))
    assert prepared(device) == NotHad("its code is not understood")
    assert device.asked[1:] == ["capture", "drop"]
    device = capturing(UnsupportedGraph("no"))
    with pytest.raises(UnsupportedGraph):
        prepared(device)
    assert device.asked[1:] == ["capture", "drop"]


def test_a_model_is_exported_once_for_all_its_lowerings(monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[object] = []
    draft_of = original.draft_of

    def counted(*call: Any) -> Any:
        exported.append(call[0])
        return draft_of(*call)

    monkeypatch.setattr(original, "draft_of", counted)
    net, args = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval(), (torch.randn(1, 3, 8, 8),)
    shared = Original(net, args, None)
    assert shared.export_s == 0.0
    device = Device()
    for lowering in (Lowering.REWRITTEN, Lowering.FUSED, Lowering.ATEN, Lowering.REWRITTEN):
        found = preparing.capture_as(lowering, shared, device)  # type: ignore[arg-type]
        alone = capture(net, args, lowering=lowering, target="cpu")
        # What rewriting does to one draft must not show in the next.
        assert not isinstance(found, NotHad)
        assert found.program.graph.hash == alone.program.graph.hash
        assert encode_program(found.program) == encode_program(alone.program)
        assert found.structure == alone.structure
    assert exported == [net]
    assert shared.export_s > 0.0


def test_what_runs_beside_an_export_does_not_count_as_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s, cpu_s = iter([10.0, 30.0]), iter([1.0, 6.0])
    monkeypatch.setattr(original, "time", SimpleNamespace(monotonic=lambda: next(wall_s), thread_time=lambda: next(cpu_s)))
    monkeypatch.setattr(original, "draft_of", lambda *call: SimpleNamespace(copy=lambda: None))
    shared = Original(nn.ReLU(), (torch.zeros(1),), None)
    assert shared.export_cpu_s == 0.0
    shared.draft()
    assert (shared.export_s, shared.export_cpu_s) == (20.0, 5.0)


def test_a_model_whose_literals_no_file_holds_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table

    monkeypatch.setattr(bundle, "_ROOM_BYTES", MAX_BUNDLE_BYTES - 7)
    device = Device()
    with pytest.raises(UnsupportedGraph, match="8 bytes in tensors that are neither parameters nor buffers"):
        preparing.prepare(Lowering.ATEN, Original(Table(), (torch.ones(2),), None), device, Silent())  # type: ignore[arg-type]
    assert not any(asked.startswith("open") for asked in device.asked)
    registered = Table()
    del registered.table
    registered.register_buffer("table", torch.ones(2), persistent=False)
    preparing.prepare(Lowering.ATEN, Original(registered, (torch.ones(2),), None), device, Silent())  # type: ignore[arg-type]


def test_what_the_model_computes_is_found_out_once_for_all_lowerings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def once(draft: Draft) -> str:
        asked.append(draft)
        return structure_of(draft)

    for module in (original, export, inductor_capture):
        monkeypatch.setattr(module, "structure_of", once)
    given = original.Original(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), (torch.randn(2, 4),), None)
    found = [capture_as(lowering, given, CpuDevice()) for lowering in (Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED)]
    assert len({item.structure for item in found if isinstance(item, Captured)}) == 1
    assert len(asked) == 1
    assert structure_of(given.draft()) == given.structure
