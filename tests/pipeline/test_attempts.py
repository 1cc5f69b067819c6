"""What is remembered of compilers that did not finish: a compilation gets enough time or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.cache_folder import Kind, clear, items
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.variants import Lowering
from autosched.device.ahead import NotCompiled
from autosched.pipeline import inductor_capture, preparing
from autosched.pipeline.attempts import EXPORTS, Attempts
from autosched.pipeline.original import Original
from autosched.pipeline.preparing import NotHad, capture_as


class Device:
    """Never opened."""

    software = SoftwareKey((("torch", "0"),))

    def __init__(self, name: str = "a", kind: str = "cpu") -> None:
        self.key = DeviceKey(kind, name, ())


@pytest.fixture(autouse=True)
def a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))


def attempts(width: int = 8, device: Device | None = None, lowering: Lowering = Lowering.INDUCTOR) -> Attempts:
    """Of the same model with other weights and other example inputs each time."""
    source, _ = inductor_capture.inductor_source(Original(nn.Linear(width, width).eval(), (torch.randn(2, width),), None).draft())
    return Attempts(source.program, lowering, device or Device())  # type: ignore[arg-type]


def test_what_was_never_tried_needs_several_times_its_export() -> None:
    assert attempts().needs_s(4.0) == 4.0 * EXPORTS["cpu"]
    assert attempts(device=Device(kind="cuda")).needs_s(4.0) == 0.0


def test_what_did_not_finish_is_tried_once_more_and_then_gets_longer_or_nothing() -> None:
    attempts().unfinished(20.0)
    assert attempts().needs_s(100.0) <= 19.0  # what was finished of it is kept
    attempts().unfinished(19.0)
    assert attempts().needs_s(1.0) == 30.0
    # A longer one is the first of its length.
    attempts().unfinished(31.0)
    assert 19.0 < attempts().needs_s(1.0) <= 31.0
    attempts().finished()
    assert attempts().needs_s(100.0) == 0.0
    attempts().unfinished(2.0)
    assert attempts().needs_s(100.0) <= 2.0


def test_another_program_device_or_mode_is_another_matter() -> None:
    attempts().finished()
    for other in (attempts(16), attempts(device=Device("b")), attempts(lowering=Lowering.MAX_AUTOTUNE)):
        assert other.needs_s(1.0) == EXPORTS["cpu"]


def test_it_is_forgotten_with_the_compiled_code() -> None:
    attempts().unfinished(20.0)
    kept = [item for item in items() if item.kind is Kind.INDUCTOR]
    assert len(kept) == 1
    clear(kept)
    assert attempts().needs_s(1.0) == EXPORTS["cpu"]


def test_a_compiler_is_not_begun_where_it_cannot_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def late(source: Any, constants: Any, home: Any, threads: Any, limit_s: float, lowering: Lowering) -> NotCompiled:
        limits.append(limit_s)
        return NotCompiled("it had not compiled", timed_out=True)

    monkeypatch.setattr(preparing, "compile_ahead", late)
    original = Original(nn.Linear(8, 8).eval(), (torch.ones(2, 8),), None)
    original.draft()
    least_s = EXPORTS["cpu"] * original.export_cpu_s

    def asked(limit_s: float) -> NotHad:
        found = capture_as(Lowering.INDUCTOR, original, Device(), limit_s)  # type: ignore[arg-type]
        assert isinstance(found, NotHad)
        return found

    assert asked(0.5 * least_s).needs_s == pytest.approx(least_s)
    assert limits == []
    enough_s = 2.0 * least_s
    said = [asked(enough_s) for _ in range(3)]
    assert limits == [enough_s] * 2
    assert said[-1].needs_s == pytest.approx(1.5 * enough_s)
    assert "were left" in said[-1].why
    assert asked(2.0 * enough_s).why == "it had not compiled"


def test_a_reason_other_than_time_is_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "compile_ahead", lambda *call: NotCompiled("its code is not understood"))
    original = Original(nn.Linear(8, 8).eval(), (torch.ones(2, 8),), None)
    assert capture_as(Lowering.INDUCTOR, original, Device(), 1000.0) == NotHad("its code is not understood")  # type: ignore[arg-type]
    assert items() == []
