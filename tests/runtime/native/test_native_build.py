"""Building the native lanes: once for all processes, found again, and a reason instead of an error whatever goes wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autosched import cache_folder, doctor
from autosched.config import native_dir
from autosched.core.records import Engine
from autosched.runtime.native import build as native_build
from autosched.runtime.native import compiler
from autosched.runtime.native.build import build_native, engine_here, engine_to_come, native_library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are built on Linux only")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has found out nothing yet, and an empty cache folder."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOSCHED_NATIVE", "1")
    monkeypatch.setattr(native_build, "_state", native_build._State())
    # The process has loaded it already, perhaps, and cannot twice.
    monkeypatch.setattr(native_build, "_load", lambda path: None)
    return tmp_path


def _compiler(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of the compiler, which counts how often it is called; ``$out`` is the file to write."""
    path = folder / "c++"
    path.write_text(f'#!/bin/sh\necho called >> {folder}/calls\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n{body}\n')
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    return folder / "calls"


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000])
def test_it_is_built_once_and_found_again(mask: int, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiler(fresh, "echo built > $out", monkeypatch)
    before = os.umask(mask)
    try:
        assert build_native() == ""
    finally:
        os.umask(before)
    assert len(calls.read_text().splitlines()) == 2  # compiled, and linked
    (made,) = native_dir().glob("*.so")
    assert made.read_text() == "built\n"
    assert [item.path for item in cache_folder.items() if item.kind is cache_folder.Kind.NATIVE] == [made]
    monkeypatch.setattr(native_build, "_state", native_build._State())
    assert build_native() == ""
    assert len(calls.read_text().splitlines()) == 2


def test_what_is_damaged_or_others_may_write_is_not_loaded(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiler(fresh, "echo built > $out", monkeypatch)
    build_native()
    (made,) = native_dir().glob("*.so")
    assert native_build.lanes_recipe().find() == made
    made.chmod(0o666)
    assert native_build.lanes_recipe().find() is None
    made.chmod(0o600)
    made.write_text("forged")
    assert native_build.lanes_recipe().find() is None
    monkeypatch.setattr(native_build, "_state", native_build._State())
    build_native()
    assert len(calls.read_text().splitlines()) == 4
    native_dir().chmod(0o777)
    assert native_build.lanes_recipe().find() is None
    monkeypatch.setattr(native_build, "_state", native_build._State())
    assert "others may write" in build_native()


def test_what_cannot_be_read_does_not_hide_what_can(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(fresh, "echo built > $out", monkeypatch)
    build_native()
    (made,) = native_dir().glob("*.so")
    # A folder cannot be read whoever asks.
    (native_dir() / f"lanes-{native_build.lanes_recipe().key}-{'0' * 16}.so").mkdir(mode=0o700)
    monkeypatch.setattr(compiler, "private_file", lambda path: True)
    assert native_build.lanes_recipe().find() == made


def test_what_is_not_found_again_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring process looks for it, too, and would have none."""
    _compiler(fresh, "echo built > $out", monkeypatch)
    # As where a mounted file system gives every file one mode.
    monkeypatch.setattr(compiler, "private_file", lambda path: False)
    assert "cannot be read back" in build_native()
    assert engine_here() is Engine.PYTHON


def test_a_failing_compiler_is_a_reason_and_is_not_asked_twice(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiler(fresh, "echo 'lanes.cpp:3: error: no such header'; exit 1", monkeypatch)
    assert "error: no such header" in build_native()
    assert "error: no such header" in build_native()
    assert calls.read_text() == "called\n"
    assert engine_here() is Engine.PYTHON


def test_a_compiler_that_is_no_program_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(fresh, "", monkeypatch)
    named = compiler.compiler()[0]
    Path(named).write_text("neither a program nor a script")
    assert f"{named} cannot be run: Exec format error" in build_native()


def test_a_compiler_that_writes_nothing_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiler(fresh, "echo garbage", monkeypatch)
    assert "wrote nothing" in build_native()
    assert calls.read_text() == "called\n"


def test_what_was_built_and_cannot_be_loaded_is_a_reason_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOSCHED_NATIVE", "1")
    monkeypatch.setattr(native_build, "_state", native_build._State())
    calls = _compiler(tmp_path, "echo built > $out", monkeypatch)
    assert "'autosched cache clear native'" in build_native()
    assert engine_here() is Engine.PYTHON
    cache_folder.clear(cache_folder.select(["native"]))
    monkeypatch.setattr(native_build, "_state", native_build._State())
    build_native()
    assert len(calls.read_text().splitlines()) == 4


def test_a_compiler_that_does_not_end_is_ended(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(fresh, f"sleep 600 & echo $! > {fresh}/child; wait", monkeypatch)
    assert "after its time was over" in build_native(limit_s=2.0)
    # All that it had started has ended with it.
    child = int((fresh / "child").read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def _recipe(folder: Path, *names: str) -> compiler.Recipe:
    (folder / "sources").mkdir()
    sources = tuple(folder / "sources" / f"{name}.cpp" for name in names)
    for source in sources:
        source.touch()
    return compiler.Recipe("kernels", sources, (), ())


@pytest.mark.parametrize("cores", [1, 2])
def test_as_many_files_are_compiled_at_a_time_as_there_are_cores(cores: int, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for a second one that is there at the same time, which there is not if one core is all."""
    wait = f"for i in 1 2 3 4; do [ $(ls {fresh}/there | wc -l) -gt 1 ] && touch {fresh}/met; sleep 0.1; done"
    calls = _compiler(fresh, f"mkdir -p {fresh}/there; touch {fresh}/there/$$; {wait}; echo $out > $out; rm {fresh}/there/$$", monkeypatch)
    monkeypatch.setattr(compiler, "usable_cores", lambda: cores)
    made = _recipe(fresh, "one", "two", "three").make(60.0)
    assert isinstance(made, Path)
    assert made.read_text().endswith("kernels.so\n")
    assert len(calls.read_text().splitlines()) == 4
    assert (fresh / "met").exists() == (cores > 1)


def test_where_one_file_cannot_be_compiled_the_others_are_not_waited_for(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = f"while [ ! -s {fresh}/child ]; do sleep 0.05; done; echo 'error: bad'; exit 1"
    calls = _compiler(fresh, f"case $out in *bad.o) {bad};; esac; echo $$ > {fresh}/child; sleep 600", monkeypatch)
    monkeypatch.setattr(compiler, "usable_cores", lambda: 2)
    said = _recipe(fresh, "bad", "good", "never").make(60.0)
    assert isinstance(said, str)
    assert said.endswith("failed: error: bad")
    assert len(calls.read_text().splitlines()) == 2
    assert not Path(f"/proc/{(fresh / 'child').read_text().strip()}").exists()


def test_a_compiler_that_cannot_be_named_so_is_none(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'ccache "g++')
    monkeypatch.setenv("PATH", str(fresh))
    assert "no C++ compiler" in build_native()


def test_without_a_compiler_and_switched_off_there_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in build_native()
    monkeypatch.setenv("AUTOSCHED_NATIVE", "0")
    assert "AUTOSCHED_NATIVE=0" in build_native()
    assert native_library() is None


def test_processes_that_build_at_the_same_time_build_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiler(fresh, "sleep 1; echo built > $out", monkeypatch)
    code = "from autosched.runtime.native import build as n; n._load = lambda path: None; why = n.build_native(); assert not why, why"
    both = [subprocess.Popen([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert len(calls.read_text().splitlines()) == 2
    assert len(list(native_dir().glob("*.so"))) == 1


def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.os, "access", lambda place, how: False)


def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    native_dir().mkdir(parents=True)
    native_dir().chmod(0o777)


def _in_a_zip_file(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Path("/somewhere/autosched.zip/autosched/runtime/native/lanes.cpp")
    recipe = dataclasses.replace(native_build.lanes_recipe(), sources=(inside,))
    monkeypatch.setattr(native_build, "lanes_recipe", lambda: recipe)


@pytest.mark.parametrize(
    ("arrange", "words"),
    [(_elsewhere, "cannot be written"), (_others, "others may write into it"), (_in_a_zip_file, "is in a zip file")],
)
def test_doctor_says_what_is_in_the_way_before_anybody_tries(
    arrange: Callable[[pytest.MonkeyPatch], None], words: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _compiler(fresh, "echo built > $out", monkeypatch)
    assert doctor._native_lanes().detail.startswith("not built yet")
    arrange(monkeypatch)
    found = doctor._native_lanes()
    assert found.state is doctor.State.MISSING
    assert words in found.detail
    assert engine_to_come() is Engine.PYTHON
    assert words in build_native()
    assert not calls.exists()
