"""What a disk has damaged in Inductor's cache is neither run nor loaded: texts are written again, and libraries built again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosched.runtime.inductor import cache_files
from autosched.runtime.inductor.cache_files import cache_files_checked

codecache: Any = pytest.importorskip("torch._inductor.codecache")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries are ELF files on Linux only")

TEXT = "def call(args):\n    return [args[0] * 2.0]\n"

# Prints what the kernel makes of 3.
_BUILD_AND_RUN = """
import torch, torch._inductor.codecache as codecache
from autosched.runtime.inductor.cpp_kernels import kernels_release_gil
source = '''
extern "C" void kernel(const float* in_ptr0, float* out_ptr0) { out_ptr0[0] = in_ptr0[0] + 4.0f; }
'''
with kernels_release_gil() as active:
    kernel = codecache.CppPythonBindingsCodeCache.load_pybinding(["const float*", "float*"], source)
out = torch.zeros(1)
kernel(torch.tensor([3.0]), out)
print(active, out.item())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache, of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def another_number(path: Path) -> None:
    path.write_text(path.read_text().replace("2.0", "3.0"))


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes())


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # nobody can read its beginning


@pytest.mark.parametrize("damage", [nothing, zeros, another_number, no_text, unreadable])
def test_a_damaged_text_is_written_again(damage: Callable[[Path], None], folder: Path) -> None:
    with cache_files_checked():
        _, path = codecache.write(TEXT, "py")
        damage(Path(path))
        assert codecache.write(TEXT, "py")[1] == path
    assert Path(path).read_text() == TEXT
    assert Path(path).is_relative_to(folder)


def test_a_sound_text_is_left_alone(folder: Path) -> None:
    with cache_files_checked():
        _, path = codecache.write(TEXT, "py")
        before = os.stat(path)
        # Its name is of the text without the space around it, so the space may be another's.
        codecache.write(f"\n{TEXT}\n", "py")
    after = os.stat(path)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_text_of_a_given_name_is_what_its_writer_says(folder: Path) -> None:
    with cache_files_checked():
        _, path = codecache.write("one", "py", key="cname")
        codecache.write("two", "py", key="cname")
    assert Path(path).read_text() == "one"


def test_a_text_that_cannot_be_replaced_is_left_to_who_reads_it(folder: Path) -> None:
    with cache_files_checked():
        _, path = codecache.write(TEXT, "py")
        Path(path).unlink()
        Path(path, "inside").mkdir(parents=True)
        assert codecache.write(TEXT, "py")[1] == path


def built(content: bytes = b"machine code") -> Path:
    """As what Inductor does: the text is written, and compiled if there is no library of its name."""
    _, path = codecache.write("int one;", "main.cpp")
    library = Path(path).with_suffix(".so")
    if not library.exists():
        library.write_bytes(content)
    return library


def failing(begin: Callable[[], object]) -> None:
    with cache_files_checked():
        begin()
        raise KeyError


def test_a_library_that_is_not_what_was_built_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "is_whole", lambda path: True)
    with cache_files_checked():
        library = built()
    with cache_files_checked():
        assert built(b"built again").read_bytes() == b"machine code"
    library.write_bytes(b"machine c0de")
    with cache_files_checked():
        assert built(b"built again").read_bytes() == b"built again"
    # Known anew.
    library.write_bytes(b"machine code")
    with cache_files_checked():
        assert built(b"once more").read_bytes() == b"once more"


def test_a_library_that_somebody_else_has_built_is_not_judged_by_an_earlier_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "is_whole", lambda path: True)
    with cache_files_checked():
        library = built()
    library.unlink()
    with pytest.raises(KeyError):
        failing(lambda: codecache.write("int one;", "main.cpp"))  # and no library was built
    built(b"by another compiler")
    with cache_files_checked():
        assert built().read_bytes() == b"by another compiler"


def test_of_a_library_that_may_be_unfinished_nothing_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_files_checked():
        library = built(b"half")  # no ELF file, and so not whole
    assert sorted(path.name for path in library.parent.iterdir()) == sorted([library.name, library.with_suffix(".cpp").name])
    library.unlink()
    monkeypatch.setattr(cache_files, "is_whole", lambda path: True)
    with pytest.raises(KeyError):
        failing(built)
    assert not list(folder.rglob("*.sha256"))


def test_a_header_counts_as_whole_once_something_was_built_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "is_whole", lambda path: True)
    with cache_files_checked():
        _, path = codecache.write("#include <one.h>", "h")
        header = Path(f"{path}.gch")
        header.write_bytes(b"precompiled")
    assert not header.with_name(f"{header.name}.bytes").exists()
    with cache_files_checked():
        built()
    assert header.with_name(f"{header.name}.bytes").read_text() == str(len("precompiled"))


def test_the_module_is_as_it_was_afterwards(folder: Path) -> None:
    before = codecache.write
    with pytest.raises(KeyError), cache_files_checked():
        raise KeyError
    assert codecache.write is before


def test_a_kernel_whose_library_is_full_of_zeros_and_whose_text_is_another_computes_the_same(folder: Path) -> None:
    def run() -> str:
        # A library full of zeros ends the process that loads it.
        done = subprocess.run([sys.executable, "-c", _BUILD_AND_RUN], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run() == "True 7.0"
    (source,) = (path for path in folder.rglob("*.cpp") if "+ 4.0f" in path.read_text())
    library = source.with_suffix(".so")
    content = library.read_bytes()
    library.write_bytes(content[:64] + bytes(len(content) - 64))
    source.write_text(source.read_text().replace("4.0f", "5.0f"))
    assert run() == "True 7.0"
    assert library.read_bytes() == content
