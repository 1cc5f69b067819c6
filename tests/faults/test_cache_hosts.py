"""Schedules of another machine, version or setting: never found in the cache, never run unverified, and the answer stays the model's."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from autosched.core.records import DeviceKey, SoftwareKey
from autosched.datasets.journal import Journal, Scope
from autosched.export.bundle import encode_bundle
from autosched.export.cache import keep
from autosched.runtime.bundle.format import Bundle, BundleKey
from autosched.runtime.cache import find, key_of
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import load
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs

_MODEL = TwoBranches().eval()
_BUNDLE = two_branches_bundle(_MODEL)


def with_key(**changes: object) -> Bundle:
    return dataclasses.replace(_BUNDLE, key=_changed(_BUNDLE.key, **changes))


def _changed(key: BundleKey, **changes: object) -> BundleKey:
    fields = {name: getattr(key, name) for name in key.__struct_fields__}
    return BundleKey(**{**fields, **changes})


def _edited(pairs: tuple[tuple[str, str], ...]) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(name, (*pairs[:place], (name, f"{value}-else"), *pairs[place + 1 :])) for place, (name, value) in enumerate(pairs)]


def devices() -> list[tuple[str, Bundle]]:
    key = cpu_device_key()
    found = [(name, with_key(device=DeviceKey(key.kind, key.name, details))) for name, details in _edited(key.details)]
    return [*found, ("name", with_key(device=DeviceKey(key.kind, "another processor", key.details)))]


def settings() -> list[tuple[str, Bundle]]:
    return [(name, with_key(numerics=pairs)) for name, pairs in _edited(_BUNDLE.key.numerics)]


def versions() -> list[tuple[str, Bundle]]:
    return [(name, with_key(software=SoftwareKey(pairs))) for name, pairs in _edited(software_key().versions)]


def require_the_models_answer(run: object) -> None:
    args, kwargs = two_branches_inputs()
    with torch.no_grad():
        wanted, got = _MODEL(*args, **kwargs), run(*args, **kwargs)  # type: ignore[operator]
    assert got["name"] == wanted["name"]
    torch.testing.assert_close(got["sum"], wanted["sum"])
    torch.testing.assert_close(got["parts"], wanted["parts"])


def test_another_device_or_setting_runs_the_model_as_it_came_and_names_the_field() -> None:
    cases = [*devices(), *settings()]
    assert len(cases) > 6
    for field, bundle in cases:
        with pytest.warns(FallbackWarning, match=field):
            run = load(encode_bundle(bundle), _MODEL)
        assert not run.report().scheduled
        assert run.report().verdict == "incompatible"
        require_the_models_answer(run)


def test_another_version_is_verified_again_before_it_runs() -> None:
    for field, bundle in versions():
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            run = load(encode_bundle(bundle), _MODEL)
        assert run.report().verdict == "degraded"
        assert any(field in line for line in run.report().differences)
        require_the_models_answer(run)


def test_no_entry_of_another_host_answers(tmp_path: Path) -> None:
    cases = [*devices(), *settings(), *versions()]
    for _, bundle in cases:
        assert keep(tmp_path, bundle) is not None
    assert len(list(tmp_path.iterdir())) == len(cases)  # nobody's entry replaced another's
    assert find(tmp_path, key_of(_BUNDLE)) is None
    keep(tmp_path, _BUNDLE)
    found = find(tmp_path, key_of(_BUNDLE))
    assert found is not None
    assert found.key == _BUNDLE.key


_HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """Locks are the system's, not files that somebody must remember to delete."""
    path = tmp_path / "scope.jsonl"
    holder = subprocess.Popen([sys.executable, "-P", "-c", _HOLD, f"{path}.lock"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not _free(path)
    finally:
        holder.kill()
        holder.communicate()
    assert _free(path)
    with Journal.open(path, Scope(cpu_device_key(), software_key())) as journal:
        assert len(journal) == 0


def _free(path: Path) -> bool:
    lock = FileLock(f"{path}.lock", timeout=0)
    try:
        lock.acquire()
    except TimeoutError:
        return False
    lock.release()
    return True
