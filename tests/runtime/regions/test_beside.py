"""Regions compiled while a process does something else; the compilers are made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering, Variant
from autosched.device.variants import prepare_regions
from autosched.device.worker_messages import PrepareRegionsRequest
from autosched.runtime.inductor.common import Refused
from autosched.runtime.regions import library as regions
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pool import Made
from autosched.runtime.regions.store import RegionStore
from autosched.runtime.regions.worker import Job

SOURCE = "def call(args):\n    return args\n"


class Two(nn.Module):
    """Two different regions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sigmoid(x - x.mean(-1, keepdim=True)) @ x + 1.0) * 3.0


class Compilers:
    """Stand in for ``compile_apart``: the first job is compiled at once, the second when ``go`` is set, and what comes then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.first = threading.Event(), threading.Event()
        self.asked: list[Sequence[Job]] = []
        self.limits_s: list[float | None] = []
        monkeypatch.setattr(regions, "compile_apart", self)
        monkeypatch.setattr(regions, "missing_compiler", lambda kind: "")
        monkeypatch.setattr(regions, "settings_digest", lambda kind: "agreed")

    def __call__(self, opening: Any, jobs: Sequence[Job], count: int, beat: Any, *, total_s: float | None = None) -> Iterator[Made]:
        self.asked.append(jobs)
        self.limits_s.append(total_s)
        yield Made(jobs[0], SOURCE)
        self.first.set()
        assert self.go.wait(60.0)
        yield Made(jobs[1], SOURCE)
        raise OSError("no more processes")


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(Two().eval(), (torch.randn(16, 16),), lowering=Lowering.FUSED)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return Compilers(monkeypatch)


def columns(captured: Captured, library: RegionLibrary) -> list[tuple[int, int, int]]:
    return [(index, 1, Variant.COMPILED) for index in range(len(captured.program.graph)) if Variant.COMPILED in library.variants(index)]


def test_what_is_begun_goes_on_beside_other_work_and_is_waited_for(captured: Captured, compilers: Compilers, tmp_path: Path) -> None:
    library = RegionLibrary(captured.program, torch.device("cpu"), "scope", RegionStore(tmp_path))
    wanted = columns(captured, library)
    library.begin(wanted, limit_s=50.0, workers=2)
    assert compilers.first.wait(60.0)
    # Kept at once: what this process does meanwhile may end it.
    assert len(list(tmp_path.iterdir())) == 1
    assert library.compiled == 0
    beats: list[int] = []

    def beat() -> None:
        beats.append(1)
        compilers.go.set()

    library.prepare(wanted, beat, limit_s=0.0, workers=2)
    assert beats
    assert library.compiled == len(compilers.asked[0]) == 2
    assert compilers.limits_s[0] == pytest.approx(50.0, abs=25.0)
    assert not any(isinstance(library.kernel(*item), Refused) for item in wanted)
    # Nothing is compiled a second time.
    library.prepare(wanted, limit_s=60.0, workers=2)
    assert len(compilers.asked) == 1


def test_with_nothing_to_compile_there_is_nothing_to_wait_for(captured: Captured, compilers: Compilers) -> None:
    library = RegionLibrary(captured.program, torch.device("cpu"), "scope")
    for wanted, limit_s, workers in (([], 60.0, 2), (columns(captured, library), 0.0, 2), (columns(captured, library), 60.0, 1)):
        library.begin(wanted, limit_s=limit_s, workers=workers)
        library.prepare(wanted, limit_s=0.0, workers=workers)
    assert compilers.asked == []


def test_the_measuring_process_answers_for_what_was_begun_when_it_is_asked_again(
    captured: Captured, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = RegionLibrary(captured.program, torch.device("cpu"), "scope")
    monkeypatch.setattr(regions, "worker_count", lambda *given: 2)
    compilers.go.set()
    count, asked = len(captured.program.graph), ((1, int(Variant.COMPILED)),)
    assert list(prepare_regions(library, count, PrepareRegionsRequest(asked, 60.0, begin=True), lambda item: None)) == []
    [answer] = prepare_regions(library, count, PrepareRegionsRequest(asked, 0.0), lambda item: None)
    assert (answer.compiled, answer.processes) == (2, 2)
