"""The lowering fused, end to end on the CPU: regions compiled in the worker, the bundle carries numbers, the loader compiles for itself."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import autosched
from autosched import pipeline
from autosched.core.variants import Variant, variant_signature
from autosched.datasets.store import Store
from autosched.export.bundle import encode_bundle
from autosched.pipeline import Tuned
from autosched.pipeline.replaying import StoreRecording
from autosched.runtime.bundle.format import read_bundle
from tests.conformance.caches import own_cache

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Tiny(nn.Module):
    """A written-out normalisation, which a compiler makes one kernel of, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        return self.head(scaled * torch.sigmoid(scaled)).cumsum(0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tiny().eval()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def runs(tuned: Tuned, cache: Path) -> Path:
    """What the job left for training."""
    (folder,) = (cache / "runs").iterdir()
    return folder


@pytest.fixture(scope="module")
def tuned(model: nn.Module, cache: Path) -> Tuned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", own_cache(cache))
        patch.setattr("autosched.datasets.collect.DISTURBED", 1.0)  # other tests may have the cores
        return pipeline.tune(model, (torch.randn(32, 64),), device="cpu", effort="quick", budget_s=3.0, lowering="fused")


def test_it_tunes_with_variants_measured_and_says_what_compiling_took(tuned: Tuned) -> None:
    report = tuned.report
    assert report.lowering == "fused"
    assert any("compiled regions were ready" in note for note in report.notes)
    assert not any("not compiled" in note for note in report.notes)
    row = next(row for row in report.strategies if row.name == report.chosen)
    assert row.max_abs_error is not None
    assert row.max_abs_error < 1e-4


def test_an_input_with_gaps_between_its_rows_is_no_trouble(model: nn.Module, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(cache))
    x = torch.randn(64, 128)[::2, ::2]
    found = pipeline.tune(model, (x,), device="cpu", effort="quick", budget_s=3.0, lowering="fused")
    assert not any(row.failure for row in found.report.strategies)
    assert any("compiled regions were ready" in note for note in found.report.notes)


def test_what_was_measured_of_variants_can_be_trained_on_and_replayed(tuned: Tuned, runs: Path) -> None:
    graph = tuned.bundle.program.graph
    recording = StoreRecording(Store.open(runs))
    offered = recording.offered(graph)
    region = next(operator.index for operator in graph.operators if len(operator.calls) > 4)
    assert offered[region] == (Variant.CALLS, Variant.COMPILED)
    costs, calls = recording.problem(graph).costs, recording.problem(graph, calls_only=True).costs
    compiled = recording.solo(variant_signature(graph.operators[region].signature, Variant.COMPILED), 1)
    alone = recording.solo(graph.operators[region].signature, 1)
    assert compiled is not None
    assert alone is not None
    assert costs.operator_us()[region] == min(compiled.samples.median_us, alone.samples.median_us)
    assert calls.operator_us()[region] == alone.samples.median_us


def test_a_bundle_carries_variants_and_the_loader_compiles_them_itself(
    tuned: Tuned, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = tuned.bundle.program.graph
    # Whatever was fastest here: the region runs compiled, so that loading has something to compile.
    region = next(operator.index for operator in graph.operators if len(operator.calls) > 4)
    variant = tuple(int(Variant.COMPILED) if index == region else 0 for index in range(len(graph)))
    bundle = dataclasses.replace(tuned.bundle, schedule=dataclasses.replace(tuned.bundle.schedule, variant=variant))
    path = tmp_path / "tiny.autosched"
    path.write_bytes(encode_bundle(bundle))
    assert read_bundle(path).schedule.variant == variant
    assert b"cpp_fused" not in path.read_bytes()
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    x = torch.randn(32, 64)
    with torch.no_grad():
        wanted = model(x)
        for entries in (1, 1):
            loaded = autosched.load(path, model, strict=True)
            torch.testing.assert_close(loaded(x), wanted, rtol=1e-4, atol=1e-5)
            assert loaded.report().scheduled
            assert len(list((tmp_path / "cache" / "regions").iterdir())) == entries


def test_a_loader_without_a_compiler_runs_the_calls(
    tuned: Tuned, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("autosched.runtime.regions.library.missing_compiler", lambda kind: "there is no C++ compiler")
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    graph = tuned.bundle.program.graph
    region = next(operator.index for operator in graph.operators if len(operator.calls) > 4)
    variant = tuple(int(index == region) for index in range(len(graph)))
    bundle = dataclasses.replace(tuned.bundle, schedule=dataclasses.replace(tuned.bundle.schedule, variant=variant))
    x = torch.randn(32, 64)
    with torch.no_grad(), caplog.at_level("WARNING"):
        loaded = autosched.load(encode_bundle(bundle), model, strict=True)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
    assert "run call by call: there is no C++ compiler" in caplog.text
    assert loaded.report().notes == ("1 operators run call by call: there is no C++ compiler",)
