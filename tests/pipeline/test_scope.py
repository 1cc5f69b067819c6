"""What measurements are valid for: times on lanes of Python are no times of native lanes, whatever else on the machine is native."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosched.core.records import Contamination, DeviceKey, Engine, Failure, FailureKind, PairRecord, SoftwareKey, SoloRecord
from autosched.core.report import TuneReport
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Scope
from autosched.device.base import Limits, Pair
from autosched.device.cpu_session import CpuSession
from autosched.device.replay import ReplayDevice
from autosched.pipeline import job
from autosched.pipeline.measuring import Ledger, measure_solo
from autosched.pipeline.memory import forget_measurements, open_journal
from autosched.pipeline.model_choice import ChosenModel
from autosched.pipeline.scope import scope_of, scope_row
from autosched.runtime.host_key import cpu_device_key, software_key
from tests.conformance.caches import own_cache
from tests.conformance.contest_double import Bench, Speed, comparing
from tests.conformance.precision import rounding
from tests.conformance.programs import branches_program

LIMITS = Limits(2, (1,), (0,), True, 1.0, 5.0, 10.0)
NATIVE = SoftwareKey((("torch", "0"),)).on(Engine.NATIVE)


def a_device(kind: str, software: SoftwareKey = NATIVE) -> Any:
    return SimpleNamespace(key=DeviceKey(kind, "a device", ()), software=software)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path / "cache"))
    # Which the tests may be run with.
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


@pytest.mark.parametrize("native", [True, False])
def test_the_scope_names_what_ran_the_lanes_of_the_program(native: bool) -> None:
    limits = dataclasses.replace(LIMITS, native_lanes=native)
    for software in (NATIVE, NATIVE.on(Engine.PYTHON)):
        device = a_device("cpu", software)
        assert scope_of(device, limits).software == NATIVE.on(Engine.NATIVE if native else Engine.PYTHON)
        row = scope_row(device, limits)
        assert (row.scope, row.software, row.facts) == (
            scope_of(device, limits).digest,
            scope_of(device, limits).software,
            device_facts(device.key),
        )
    assert scope_of(a_device("cuda"), limits) == Scope(a_device("cuda").key, NATIVE)


@contextlib.contextmanager
def product_rounding() -> Iterator[None]:
    with rounding():
        torch.set_float32_matmul_precision("medium")
        yield


@contextlib.contextmanager
def switched(backend: Any, name: str) -> Iterator[None]:
    usual = getattr(backend, name)
    setattr(backend, name, not usual)
    try:
        yield
    finally:
        setattr(backend, name, usual)


@contextlib.contextmanager
def waiting_asleep() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


OTHER_SETTINGS = {
    "threads that sleep": ("cpu", waiting_asleep, ("omp_wait_policy", "passive")),
    "products": ("cpu", product_rounding, ("float32_matmul_precision", "medium")),
    "convolutions": ("cpu", lambda: rounding(conv="bf16"), ("float32_convolutions", "bf16")),
    "mkldnn": ("cpu", lambda: switched(torch.backends.mkldnn, "enabled"), ("mkldnn_enabled", "False")),
    "products on a GPU": ("cuda", product_rounding, ("float32_matmul_precision", "medium")),
    "TF32": ("cuda", lambda: switched(torch.backends.cudnn, "allow_tf32"), ("cudnn_tf32", "False")),
    "choosing kernels": ("cuda", lambda: switched(torch.backends.cudnn, "benchmark"), ("cudnn_benchmark", "True")),
}


@pytest.mark.parametrize("what", OTHER_SETTINGS)
def test_what_is_measured_under_other_settings_is_kept_apart(what: str) -> None:
    kind, changed, said = OTHER_SETTINGS[what]
    device = a_device(kind)
    limits = dataclasses.replace(LIMITS, native_lanes=True)
    usual = scope_of(device, limits)
    # Nothing is said of usual settings, so that what was measured before settings were part of a scope is still found.
    assert usual == Scope(device.key, NATIVE)
    with changed():
        scope = scope_of(device, limits)
        assert set(scope.software.versions) - set(usual.software.versions) == {said}
        assert scope.software.engine is Engine.NATIVE
        assert scope_row(device, limits).scope == scope.digest != usual.digest
        with open_journal(scope, private=False) as journal:
            journal.add_solo("a", 1, Failure(FailureKind.CRASH, "tried"))
        assert len(open_journal(usual, private=False)) == 0
        forget_measurements(device)
        assert len(open_journal(scope, private=False)) == 0
    assert scope_of(device, limits) == usual


def test_what_a_replayed_device_was_measured_under_its_software_says() -> None:
    recording: Any = a_device("cpu")
    with product_rounding():
        assert scope_of(ReplayDevice(recording), dataclasses.replace(LIMITS, native_lanes=True)) == Scope(recording.key, NATIVE)


def test_saying_what_runs_lanes_twice_is_saying_it_once() -> None:
    plain = NATIVE.on(Engine.PYTHON)
    assert plain.versions == (("torch", "0"),)
    assert NATIVE.engine is Engine.NATIVE
    assert plain.engine is plain.on(Engine.PYTHON).engine is Engine.PYTHON
    assert NATIVE.on(Engine.NATIVE) == NATIVE == plain.on(Engine.NATIVE)


def test_forgetting_begins_the_journals_of_both_engines_anew() -> None:
    device = a_device("cpu")
    scopes = [Scope(device.key, NATIVE.on(engine)) for engine in Engine]
    for scope in scopes:
        with open_journal(scope, private=False) as journal:
            journal.add_solo("a", 1, Failure(FailureKind.CRASH, "tried"))
            assert len(journal) == 1
    forget_measurements(device)
    assert [len(open_journal(scope, private=False)) for scope in scopes] == [0, 0]


CALLED_FROM_PYTHON = """
def wrap_kernel(index, kernel):
    return (lambda slots: kernel(slots)) if index == 2 else kernel
"""
"""A plugin of the measuring process: as where one operator of the program is none that native lanes take."""


@pytest.mark.usefixtures("native")
def test_a_program_on_lanes_of_python_leaves_no_times_to_one_on_native_lanes(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(CALLED_FROM_PYTHON)
    program, constants = branches_program(branches=2, depth=2)
    device: Any = SimpleNamespace(key=cpu_device_key(), software=software_key())
    assert device.software.engine is Engine.NATIVE
    facts = device_facts(device.key)

    def measured(plugin: Path | None) -> tuple[int, set[Engine | None]]:
        """Measurements made, and what ran them."""
        with CpuSession(program, constants, timeout_s=60, max_lanes=2, widths=(1,), plugin=plugin) as session:
            ledger = Ledger()
            quiet: Any = _Undisturbed(session)
            with open_journal(scope_of(device, session.limits), private=False) as journal:
                solo = measure_solo(quiet, program.graph, facts, journal, 2, ledger)
            [pair] = session.pairs([Pair(0, 4)], repeats=1)
            assert isinstance(pair, PairRecord)
            return ledger.measurements, {pair.engine, *(item.engine for row in solo for item in row if isinstance(item, SoloRecord))}

    first, on_python = measured(plugin)
    assert first > 0
    assert on_python == {Engine.PYTHON}
    again, _ = measured(plugin)
    assert again == 0
    native, on_native = measured(None)
    assert native == first
    assert on_native == {Engine.NATIVE}
    assert measured(None)[0] == measured(plugin)[0] == 0


class _Undisturbed:
    """A session that says nothing of other processes, so that what it measured answers on a busy machine, too."""

    def __init__(self, session: CpuSession) -> None:
        self._session = session
        self.limits = session.limits
        self.paired = session.paired

    def solo(self, widths: Any, *, repeats: int) -> list[list[SoloRecord | Failure]]:
        found = self._session.solo(widths, repeats=repeats)
        return [[dataclasses.replace(item, contamination=Contamination()) for item in row if isinstance(item, SoloRecord)] for row in found]


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x) + torch.mm(x.t(), x)


@pytest.mark.parametrize("native", [True, False])
def test_a_job_predicts_with_a_model_of_the_lanes_that_its_program_has(
    native: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Engine | None] = []

    def choose(key: DeviceKey, engine: Engine | None, explicit: Path | None = None) -> ChosenModel:
        asked.append(engine)
        return ChosenModel(None, "analytic", "none")

    compare: Callable[..., TuneReport] = comparing(monkeypatch, tmp_path)
    monkeypatch.setattr(job, "choose_model", choose)
    monkeypatch.setattr(job, "engine_of", lambda device: Engine.NATIVE)
    bench = Bench(rewritten=Speed(300.0))
    bench.software = NATIVE
    opened = bench.open

    def open_so(*call: Any, **options: Any) -> Any:
        session = opened(*call, **options)
        session.limits = dataclasses.replace(session.limits, native_lanes=native)
        return session

    monkeypatch.setattr(bench, "open", open_so)
    compare(bench, Branches(), lowering="rewritten")
    assert asked[-1] is (Engine.NATIVE if native else Engine.PYTHON)
