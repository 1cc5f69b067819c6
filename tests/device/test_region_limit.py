"""Compiling regions within a limit: what was begun is finished, what was not is refused, and what an earlier process kept is still had."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering, Variant
from autosched.device import variants
from autosched.device.variants import compile_regions
from autosched.device.worker_messages import RegionsRequest
from autosched.runtime.inductor.common import Refused
from autosched.runtime.regions import library as regions
from autosched.runtime.regions.compile import Code
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.store import RegionStore


class Chain(nn.Module):
    """Two different normalisations with a product between them: two regions to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(torch.softmax(x, -1) * 2.0), -1) + 1.0


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Chain().eval(), (torch.randn(4, 16),), lowering=Lowering.FUSED)


def library(captured: Captured, store: RegionStore | None = None) -> RegionLibrary:
    return RegionLibrary(captured.program, torch.device("cpu"), "scope", store)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stands in for the compiler: which pieces it got."""
    seen: list[object] = []

    def compile_piece(piece: object, *_: object, **__: object) -> Code:
        seen.append(piece)
        return Code("call = lambda values: []", lambda values: [])

    monkeypatch.setattr(regions, "compile_piece", compile_piece)
    monkeypatch.setattr(regions, "missing_compiler", lambda kind: "")
    return seen


def ask(found: RegionLibrary, count: int, limit_s: float | None) -> dict[int, str]:
    request = RegionsRequest(1, int(Variant.COMPILED), (), limit_s)
    return {answer.operator: answer.reason for answer in compile_regions(found, count, request, lambda operator: None)}


def test_without_a_limit_everything_is_compiled(captured: Captured, compiled: list[object]) -> None:
    reasons = ask(library(captured), len(captured.program.graph), None)
    assert len(reasons) == len(compiled) >= 2
    assert set(reasons.values()) == {""}


def test_what_is_not_begun_in_time_is_refused_for_good(captured: Captured, compiled: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(variants.time, "monotonic", lambda: float(next(clock)))
    found = library(captured)
    reasons = ask(found, len(captured.program.graph), 2.0)
    in_time = [operator for operator, reason in reasons.items() if not reason]
    late = [operator for operator, reason in reasons.items() if reason]
    assert len(in_time) == len(compiled) == 1
    assert late
    assert all("no time left" in reasons[operator] for operator in late)
    # Measuring must not wait for a compiler either, and what was compiled stays.
    assert isinstance(found.kernel(late[0], 1, Variant.COMPILED), Refused)
    assert not isinstance(found.kernel(in_time[0], 1, Variant.COMPILED), Refused)
    assert len(compiled) == 1


def test_what_an_earlier_process_kept_needs_no_time(captured: Captured, compiled: list[object], tmp_path: Path) -> None:
    count = len(captured.program.graph)
    ask(library(captured, RegionStore(tmp_path)), count, None)
    before = len(compiled)
    again = library(captured, RegionStore(tmp_path))
    assert set(ask(again, count, 0.0).values()) == {""}
    assert len(compiled) == before


@pytest.mark.parametrize(("width", "used"), [(1, 1), (2, 1), (3, 3)])
def test_a_variant_is_tried_on_as_many_threads_as_it_is_for_or_on_one(
    captured: Captured, width: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On more, what is small waits for the last of a team whose core another process has."""
    threads: list[int] = []
    monkeypatch.setattr(RegionLibrary, "kernel", lambda *_: threads.append(torch.get_num_threads()) or Refused("not here"))
    before = torch.get_num_threads()
    request = RegionsRequest(width, int(Variant.COMPILED), ())
    made = list(compile_regions(library(captured), len(captured.program.graph), request, lambda item: None, lambda width: None))  # type: ignore[arg-type, return-value]
    assert threads == [used] * len(made)
    assert len(made) >= 2
    assert torch.get_num_threads() == before
