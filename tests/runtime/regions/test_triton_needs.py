"""Where Triton can compile no launcher, that is said before anything is tried, and a job goes on with what needs none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from autosched.core.variants import Lowering
from autosched.pipeline.granularity import considered
from autosched.runtime.regions.compile import missing_compiler


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A Triton that has a compiler, or has not; ``CudaUtils`` is what it builds first."""
    missing_compiler("cpu")  # PyTorch looks for Triton where it is imported first
    names = ("triton", "triton.backends", "triton.backends.nvidia", "triton.backends.nvidia.driver")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delenv("CC", raising=False)
    return sys.modules[names[-1]]


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


def fails() -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")


def test_without_a_c_compiler_nothing_is_compiled_for_a_gpu(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    triton.__dict__["CudaUtils"] = fails
    assert missing_compiler("cuda") == "Triton compiles nothing here: there is no C compiler: install gcc or clang, or name one in CC"
    found = considered(None, rewrite=True, kind="cuda")
    assert found.lowerings == (Lowering.REWRITTEN,)
    assert all("install gcc" in row.why for row in found.skipped)


def test_what_was_compiled_before_runs_without(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    triton.__dict__["CudaUtils"] = object
    assert missing_compiler("cuda") == ""


def test_with_all_that_is_needed_nothing_is_built_to_find_out(triton: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    triton.__dict__["CudaUtils"] = fails
    assert missing_compiler("cuda") == ""
