"""Code kept on disk is used again, and an edit in any file of the folder reaches every function, also callers in other files."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest

import autosched.search.compiled
from autosched.search.compiled import cache, layout
from autosched.search.compiled.turns import turn

FOLDER = Path(autosched.search.compiled.__file__).parent

LOW = """from parts.cache import compiled


@compiled("f8(f8)")
def low(value):
    return value + {constant}
"""
HIGH = """from parts.cache import compiled
from parts.low import low


@compiled("f8(f8)")
def high(value):
    return 10.0 * low(value)
"""
ASK = (
    "import json, sys; from parts.high import high; from parts.low import low; "
    "print(json.dumps([high(1.0), sum(high.stats.cache_hits.values()), sum(low.stats.cache_hits.values())]))"
)


def ask(folder: Path, **environment: str) -> list[float]:
    """What ``high(1.0)`` is in a new process, and how many functions of each file came from disk."""
    command = [sys.executable, "-c", ASK]
    asked = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    found = subprocess.run(command, env=asked, cwd=folder, check=True, capture_output=True, text=True)
    answer: list[float] = json.loads(found.stdout)
    return answer


def make_parts(folder: Path) -> Path:
    """A package with a copy of the cache, for functions of its own."""
    parts = folder / "parts"
    parts.mkdir()
    (parts / "__init__.py").write_text("")
    for name in ("cache.py", "turns.py"):
        (parts / name).write_text((FOLDER / name).read_text().replace(autosched.search.compiled.__name__, "parts"))
    return parts


def test_an_edit_reaches_callers_in_other_files(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    (parts / "high.py").write_text(HIGH)
    (parts / "low.py").write_text(LOW.format(constant="1.0"))
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    assert ask(tmp_path, **kept) == [20.0, 0, 0]
    assert ask(tmp_path, **kept) == [20.0, 1, 1]
    (parts / "low.py").write_text(LOW.format(constant="2.0"))
    assert ask(tmp_path, **kept) == [30.0, 0, 0]


def test_what_another_process_compiles_is_waited_for(tmp_path: Path) -> None:
    parts, kept = make_parts(tmp_path), tmp_path / "kept"
    begun = tmp_path / "begun"
    (parts / "high.py").write_text(HIGH)
    (parts / "low.py").write_text(f"open({str(begun)!r}, 'w').close()\n" + LOW.format(constant="1.0"))
    asked = {"NUMBA_CACHE_DIR": str(kept)}
    assert ask(tmp_path, **asked) == [20.0, 0, 0]
    files = {path: path.read_bytes() for path in kept.rglob("*.nb?")}
    assert len(files) == 4
    for path in (*files, begun):
        path.unlink()
    (held,) = kept.rglob("low*.turn")
    with ThreadPoolExecutor() as pool:
        with turn(held):
            answer = pool.submit(ask, tmp_path, **asked)
            while not begun.exists():
                assert not answer.done()
                time.sleep(0.01)
            # Long enough for compiling them.
            time.sleep(3.0)
            assert not list(kept.rglob("*.nb?"))
            for path, content in files.items():
                path.write_bytes(content)
        assert answer.result() == [20.0, 1, 1]


def test_what_is_not_kept_is_told_where_nothing_is_to_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert_compiled_and_kept()


def _double(value: float) -> float:
    return 2.0 * value


def assert_compiled_and_kept() -> None:
    """What is kept, if anything, is not to be had; it is compiled, and then it is."""
    with cache.only_what_is_kept(), pytest.raises(cache.NotKept):
        cache.compiled("f8(f8)")(_double)
    assert cache.compiled("f8(f8)")(_double)(4.0) == 8.0
    with cache.only_what_is_kept():
        assert cache.compiled("f8(f8)")(_double)(4.0) == 8.0


def test_a_numba_with_another_cache_compiles_in_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> None:
        raise AttributeError("numba's Dispatcher has no enable_caching")

    monkeypatch.setattr(cache, "_folder_cache", missing)
    with caplog.at_level("INFO", logger=cache.__name__), cache.only_what_is_kept():
        # Nobody else could keep it either.
        double = cache.compiled("f8(f8)")(lambda value: 2.0 * value)
    assert double(4.0) == 8.0
    assert "not kept on disk" in caplog.text


def test_a_full_disk_costs_only_that_nothing_is_kept(tmp_path: Path) -> None:
    parts = make_parts(tmp_path)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))\n"
    (parts / "low.py").write_text(limited + LOW.format(constant="1.0"))
    (parts / "high.py").write_text(HIGH)
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    assert ask(tmp_path, **kept) == [20.0, 0, 0]
    assert ask(tmp_path, **kept) == [20.0, 0, 0]


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"not a pickle"])
def test_a_damaged_file_is_compiled_again_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, content: bytes) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert cache.compiled("f8(f8)")(_double)(4.0) == 8.0
    (damaged,) = tmp_path.rglob(f"*.{ending}")
    damaged.write_bytes(content)
    assert_compiled_and_kept()


def test_machine_code_with_one_wrong_bit_is_compiled_again_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, numba runs it, or LLVM aborts the process, and every later one."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert cache.compiled("f8(f8)")(_double)(4.0) == 8.0
    (damaged,) = tmp_path.rglob("*.nbc")
    content = bytearray(damaged.read_bytes())
    content[content.index(b"\x7fELF") + 0x28] ^= 0x10  # where the table of sections begins
    damaged.write_bytes(content)
    assert_compiled_and_kept()


def test_a_fault_of_the_cache_that_is_not_about_folders_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(cache, "_folder_cache", broken)
    with pytest.raises(RuntimeError, match="something else"):
        cache.compiled("f8(f8)")(lambda value: value)


def test_without_compilation_the_function_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert cache.compiled("i8(i8,i8)")(layout.float_row) is layout.float_row


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_compiled_code_depends_on_nothing_outside_its_folder(file: Path) -> None:
    # The digest covers the folder: a number taken from elsewhere would be frozen into the code that is kept.
    imported = [node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    ours = [module for module in imported if module and module.startswith("autosched")]
    assert [module for module in ours if not module.startswith("autosched.search.compiled.")] == []
