"""A schedule that was tuned without the interpreter, where lanes are threads of Python: said, and never on several lanes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from autosched.core.records import Engine, SoftwareKey
from autosched.export.bundle import encode_bundle
from autosched.runtime import load as loading
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.cores import usable_cores
from autosched.runtime.host_key import compiler_key, cpu_device_key, software_key
from autosched.runtime.lane_choice import for_engine
from autosched.runtime.load import load
from autosched.runtime.verdict import Compatibility, check_bundle
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs


def _native(bundle: Bundle) -> Bundle:
    versions = tuple(sorted({*bundle.key.software.versions, ("lanes", "native")}))
    return dataclasses.replace(bundle, key=msgspec.structs.replace(bundle.key, software=SoftwareKey(versions)))


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


def test_without_the_interpreter_is_said_and_python_is_not() -> None:
    assert software_key() == compiler_key()
    assert software_key().engine is Engine.PYTHON


@pytest.mark.usefixtures("native")
def test_native_lanes_are_in_the_key(model: TwoBranches) -> None:
    assert software_key().engine is Engine.NATIVE
    assert software_key() != compiler_key()
    bundle = two_branches_bundle(model)
    assert check_bundle(bundle, cpu_device_key(), software_key(), model).compatibility is Compatibility.EXACT
    loaded = load(encode_bundle(bundle), model, strict=True)
    args, kwargs = two_branches_inputs(9)
    with torch.no_grad():
        assert torch.equal(loaded(*args, **kwargs)["sum"], model(*args, **kwargs)["sum"])
    assert loaded.report().lanes == 2


@pytest.mark.usefixtures("native")
def test_what_was_tuned_on_python_lanes_is_said_and_runs_on_its_lanes(model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    bundle = dataclasses.replace(bundle, key=msgspec.structs.replace(bundle.key, software=compiler_key()))
    verdict = check_bundle(bundle, cpu_device_key(), software_key(), model)
    assert verdict.compatibility is Compatibility.DEGRADED
    assert verdict.lines == ("lanes: python there, native here; times were taken with the former",)
    assert for_engine(bundle, Engine.NATIVE) == bundle


def test_several_lanes_become_the_better_order_on_one(model: TwoBranches) -> None:
    bundle = _native(two_branches_bundle(model, lanes=2))
    narrow = for_engine(bundle, Engine.PYTHON)
    assert narrow.schedule.lanes == 1
    assert set(narrow.schedule.width) == {1}
    assert narrow.schedule.order == bundle.schedule.order
    report = bundle.evidence.report
    rows = (dataclasses.replace(report.strategies[0], name="sequential_wide", measured_us=9.0), *report.strategies)
    evidence = dataclasses.replace(bundle.evidence, report=dataclasses.replace(report, strategies=rows))
    wide = for_engine(dataclasses.replace(bundle, evidence=evidence), Engine.PYTHON)
    assert set(wide.schedule.width) == {max(1, min(torch.get_num_threads(), usable_cores()))}
    alone = _native(two_branches_bundle(model, lanes=1))
    assert for_engine(alone, Engine.PYTHON) == alone


def test_a_server_that_cannot_have_native_lanes_runs_in_order_and_says_why(
    model: TwoBranches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    data = encode_bundle(_native(two_branches_bundle(model, lanes=2)))
    report = load(data, model, strict=True).report()
    assert report.lanes == 1
    assert report.verdict == "degraded"
    assert any(line.startswith("lanes: native there, python here (switched off by AUTOSCHED_NATIVE=0)") for line in report.differences)


def test_loading_builds_what_a_schedule_was_tuned_with_and_nothing_for_others(model: TwoBranches, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(loading, "build_native", lambda: built.append(1))
    monkeypatch.setattr(loading, "native_library", lambda: None)
    monkeypatch.setattr(loading, "obstacle", lambda: "")
    load(encode_bundle(two_branches_bundle(model)), model)
    assert built == []
    load(encode_bundle(_native(two_branches_bundle(model))), model)
    assert built == [1]
