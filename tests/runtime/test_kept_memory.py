"""What is freed stays with the process once it is asked to, in those that it starts too, and bundles say so."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import msgspec
import pytest

from autosched import config
from autosched.cli.options import keep_memory_if
from autosched.core.errors import UsageError
from autosched.core.records import Engine, SoftwareKey
from autosched.runtime import cache, host_key, kept_memory
from autosched.runtime.kept_memory import keep_memory, memory_kept
from autosched.runtime.verdict import Compatibility, check_bundle
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches

_GLIBC = pytest.mark.skipif(not kept_memory._is_glibc(), reason="mallopt is glibc's")

_PROGRAM = """
import json, resource, subprocess, sys
from autosched.runtime.kept_memory import keep_memory, memory_kept

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        bytearray(b"x") * (48 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, given_back = memory_kept(), pages()
answer = keep_memory()
pages()
kept = pages()
ask = "from autosched.runtime.kept_memory import memory_kept; print(memory_kept())"
child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
print(json.dumps([before, given_back, answer, memory_kept(), kept, child]))
"""


@pytest.fixture
def not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config._KEEPING:
        monkeypatch.delenv(name, raising=False)


@_GLIBC
@pytest.mark.usefixtures("not_kept")
def test_pages_come_once_and_stay_and_a_process_started_then_keeps_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    before, given_back, answer, after, kept, child = json.loads(done.stdout)
    assert (before, answer, after, child) == (False, True, True, "True")
    assert given_back > 0
    assert kept * 4 < given_back


@pytest.mark.usefixtures("not_kept")
def test_another_c_library_changes_nothing_and_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "_is_glibc", lambda: False)
    assert not keep_memory()
    assert not memory_kept()
    assert not config.memory_kept_since_start()
    keep_memory_if(False)
    with pytest.raises(UsageError, match="--keep-memory is for Linux with glibc"):
        keep_memory_if(True)


@_GLIBC
@pytest.mark.usefixtures("not_kept")
def test_measurements_with_kept_memory_are_not_those_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = host_key.software_key()
    assert not given_back.keeps_memory
    for name, value in config._KEEPING.items():
        monkeypatch.setenv(name, value)
    kept = host_key.software_key()
    assert kept.keeps_memory
    assert kept != given_back
    assert kept.keeping_memory(False) == given_back
    assert not host_key.compiler_key().keeps_memory  # compiled code is the same


@pytest.mark.parametrize(("there", "here", "said"), [(True, False, True), (True, True, False), (False, True, False), (False, False, False)])
def test_a_schedule_that_was_timed_with_kept_memory_asks_for_it(there: bool, here: bool, said: bool) -> None:
    bundle = two_branches_bundle(TwoBranches())
    software = bundle.key.software.keeping_memory(there)
    kept = dataclasses.replace(bundle, key=msgspec.structs.replace(bundle.key, software=software))
    verdict = check_bundle(kept, bundle.key.device, bundle.key.software.keeping_memory(here), numerics=bundle.key.numerics)
    assert verdict.compatibility is (Compatibility.DEGRADED if said else Compatibility.EXACT)
    assert any("autosched.keep_memory()" in line for line in verdict.lines) is said
    # The cache finds it either way.
    assert cache.key_of(kept) == cache.key_of(bundle)


def test_a_key_says_both_what_runs_lanes_and_whether_memory_is_kept() -> None:
    key = SoftwareKey((("torch", "2"),))
    both = key.on(Engine.NATIVE).keeping_memory(True)
    assert (both.engine, both.keeps_memory) == (Engine.NATIVE, True)
    assert both.keeping_memory(False).on(Engine.PYTHON) == key
