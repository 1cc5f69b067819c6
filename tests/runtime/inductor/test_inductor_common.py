"""Which of the modules that Inductor writes are the code of a graph; and a process in which Inductor cannot read its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

import pytest

from autosched.runtime.inductor.common import first_line, modules_into, unusable
from autosched.runtime.regions.compile import missing_compiler

_GRAPH = "def call(args):\n    return args\n"
# What the compiler writes to time a template with an operator fused into it, seen in PyTorch 2.11 and 2.13.
_HARNESS = "def call(args):\n    pass\n\ndef benchmark_all_configs(args):\n    pass\n"


def test_a_module_that_times_one_kernel_is_not_the_code_of_a_graph() -> None:
    from torch._inductor.codecache import PyCodeCache

    before = vars(PyCodeCache)["load_by_key_path"]
    found: list[ModuleType] = []
    with modules_into(found):
        PyCodeCache.load(_HARNESS)
        PyCodeCache.load("kernel = 1\n")
        made = PyCodeCache.load(_GRAPH)
    assert found == [made]
    assert vars(PyCodeCache)["load_by_key_path"] is before


def test_what_another_thread_compiles_meanwhile_is_its_own() -> None:
    from torch._inductor.codecache import PyCodeCache

    found: list[ModuleType] = []
    theirs: list[ModuleType] = []
    with modules_into(found):
        mine = PyCodeCache.load(_GRAPH)
        other = threading.Thread(target=lambda: theirs.append(PyCodeCache.load(f"other = 1\n{_GRAPH}")))
        other.start()
        other.join()
    assert found == [mine]
    assert len(theirs) == 1


_WITHOUT_UTF8 = """
import sys
sys.path.append(sys.argv[1])
from autosched.runtime.inductor.common import unusable
from autosched.runtime.regions.compile import missing_compiler
why = unusable()
assert not why or missing_compiler("cpu") == unusable() == why, "it says something else the second time"
try:
    import torch._inductor.lowering
    assert not why, why
except Exception:
    assert why.endswith("set PYTHONUTF8=1"), "nothing is said of what cannot be imported"
print("done")
"""


def test_where_inductor_cannot_read_its_own_files_that_is_said_each_time() -> None:
    assert unusable() == ""
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-P", "-c", _WITHOUT_UTF8, str(Path(__file__).resolve().parents[3])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr


def test_where_there_is_no_folder_for_temporary_files_that_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of Inductor's is imported then, which would fail half-way; and there is a compiler."""

    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    unusable.cache_clear()
    try:
        with monkeypatch.context() as read_only:
            read_only.setattr(tempfile, "gettempdir", refuse)
            assert unusable() == missing_compiler("cpu")
            assert "temporary files" in unusable()
    finally:
        unusable.cache_clear()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("kernel.cpp:1:10: fatal error: Python.h: No such file\ncompilation terminated.", ": fatal error: Python.h: No such file"),
        ("kernel.cpp: In function 'f':\nkernel.cpp:3:1: error: no 'x' here\nkernel.cpp:4:1: error: more", ": error: no 'x' here"),
        ("g++: fatal error: Killed signal terminated program cc1plus", ": fatal error: Killed signal terminated program cc1plus"),
        ("", ""),
    ],
)
def test_of_a_compiler_that_failed_its_own_error_is_said(output: str, said: str) -> None:
    from torch._inductor.exc import CppCompileError, InductorError

    inner = CppCompileError(["g++", "kernel.cpp", "-Werror=no"], output)
    assert first_line(inner) == f"CppCompileError: C++ compile error{said}"
    assert first_line(InductorError(inner, None)) == f"InductorError: CppCompileError: C++ compile error{said}"


def test_of_other_errors_the_first_line_is_said() -> None:
    assert first_line(ValueError("\n  one \nerror: two")) == "ValueError: one"
