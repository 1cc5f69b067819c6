"""Libraries and precompiled headers that a killed compiler left unfinished are removed, and nothing else is."""

from __future__ import annotations

import math
import os
import shutil
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor import unfinished as inductor_unfinished
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.cpp_kernels import kernels_release_gil
from autosched.runtime.inductor.settings import settings_digest
from autosched.runtime.inductor.unfinished import is_whole, remove_unfinished, worth_another_try
from autosched.runtime.regions import compile as region_compile

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries are ELF files on Linux only")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole library in a cache folder of its own."""
    folder = tmp_path / "inductor" / "ab"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path / "inductor"))
    # As g++ lays it out: a header, the sections, and at the end a header for each.
    sections, count, each = 2000, 10, 64
    path = folder / "whole.so"
    path.write_bytes(struct.pack("<4s36xQ10xHHH", b"\x7fELF", sections, each, count, count - 1) + bytes(sections - 64 + each * count))
    return path


def part(library: Path, name: str, share: float) -> Path:
    data = library.read_bytes()
    path = library.with_name(name)
    path.write_bytes(data[: math.floor(share * len(data))])
    return path


def test_what_is_not_whole_is_removed_and_what_is_stays(library: Path) -> None:
    source = library.with_name("kernel.cpp")
    source.write_text("int main")
    pieces = [part(library, f"part{index}.so", share) for index, share in enumerate((0.0, 1e-4, 0.5, 0.999))]
    assert is_whole(library)
    assert not any(is_whole(path) for path in pieces)
    assert sorted(remove_unfinished()) == sorted(pieces)
    assert library.is_file()
    assert source.is_file()
    assert remove_unfinished() == []


def test_a_library_that_another_process_is_writing_stays_until_that_one_ends(library: Path) -> None:
    path = part(library, "growing.so", 0.5)
    code = "import sys; file = open(sys.argv[1], 'ab'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        assert remove_unfinished() == []
        assert path.is_file()
        writer.communicate()
    assert remove_unfinished() == [path]


def test_what_is_not_whole_is_gone_before_anything_is_loaded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch._inductor.codecache")  # which would take what is put in the function's place for good
    # To load the first pages of a library ends the process, by SIGBUS.
    broken, later, fresh = part(library, "half.so", 0.5), part(library, "later.so", 0.5), part(library, "fresh.so", 0.5)
    now_s = time.time()
    os.utime(broken, (now_s - 60.0, now_s - 60.0))
    os.utime(later, (now_s + 3600.0, now_s + 3600.0))  # the clock was set back since
    seen: list[tuple[bool, bool, bool]] = []
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: seen.append((broken.exists(), later.exists(), fresh.exists())))
    assert settings_digest("cpu")
    # Where machines share the folder, another one's linker may be at work on what has just been written.
    assert seen == [(False, False, True)]


@pytest.mark.parametrize(("room", "call"), [(inductor_compile, "compile_whole"), (region_compile, "compile_piece")])
@pytest.mark.parametrize(
    ("broken", "reason", "again"),
    [
        (True, "file too short", True),
        (False, "file too short", False),
        (False, "fatal error: cannot read PCH file", True),
        (False, "fatal error: /tmp/torchinductor_root/precompiled_headers/name.h: No such file or directory", True),
    ],
)
def test_compiling_is_tried_once_more_only_where_something_was_removed(
    room: Any, call: str, broken: bool, reason: str, again: bool, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of several processes that come upon one header, one removes it.
    answers = [Refused(reason), "code"]
    monkeypatch.setattr(room, "_compiled", lambda *_: answers.pop(0))
    if broken:
        part(library, "half.so", 0.5)
    arguments: dict[str, Any] = {"width": 1, "variant": 1} if call == "compile_piece" else {}
    made = getattr(room, call)(*[None] * (3 if arguments else 2), **arguments)
    assert made == ("code" if again else Refused(reason))


def test_what_the_compiler_here_makes_is_whole(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    (tmp_path / "one.cpp").write_text("int one() { return 1; }")
    subprocess.run([compiler, "-shared", "-fPIC", "one.cpp", "-o", "one.so"], cwd=tmp_path, check=True)
    assert is_whole(tmp_path / "one.so")
    assert not is_whole(part(tmp_path / "one.so", "less.so", 0.999))


@pytest.fixture
def header(library: Path) -> Path:
    """A precompiled header, in the folder that PyTorch has for them."""
    path = library.parents[1] / "precompiled_headers" / "name.h.gch"
    path.parent.mkdir()
    path.write_bytes(bytes(2 << 20))
    return path


def test_the_first_block_of_a_header_is_removed(header: Path) -> None:
    header.write_bytes(bytes(16384))
    os.utime(header, (0.0, 0.0))
    assert remove_unfinished(idle_s=5.0) == [header]


def test_a_header_that_may_be_whole_is_in_doubt_where_compiling_has_failed(header: Path) -> None:
    os.utime(header, (0.0, 0.0))
    assert remove_unfinished(idle_s=5.0) == []
    assert remove_unfinished() == [header]


def test_a_header_with_which_something_was_compiled_is_whole_as_long_as_it_is(header: Path) -> None:
    inductor_unfinished.note_header(header)
    assert remove_unfinished() == []
    header.write_bytes(bytes(1 << 20))
    assert remove_unfinished() == [header]
    assert not list(header.parent.iterdir())


def test_a_header_that_cannot_be_read_is_removed(header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_unfinished, "_READING_S", 0.0)
    assert worth_another_try("g++: fatal error: cannot read PCH file: No such file or directory")
    assert not header.exists()


def test_what_has_failed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = pytest.importorskip("torch._inductor.codecache")
    inductor_config = pytest.importorskip("torch._inductor.config")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    attempts: list[object] = []

    def compiled(*given: object) -> None:
        attempts.append(given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codecache, "_worker_compile_cpp", compiled)
    with ThreadPoolExecutor(1) as pool, inductor_config.patch(cpp_cache_precompile_headers=False):
        for _ in range(2):
            # PyTorch holds on to what came of it in a thread.
            with pytest.raises(OSError, match="No space"), kernels_release_gil():
                codecache.CppPythonBindingsCodeCache.load_pybinding_async([], 'extern "C" void kernel() {}', submit_fn=pool.submit)()
    assert len(attempts) == 2


def test_without_a_cache_folder_there_is_nothing_to_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_unfinished, "inductor_folder", lambda: None)
    assert remove_unfinished() == []
