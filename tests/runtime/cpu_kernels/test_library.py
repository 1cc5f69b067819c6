"""The library of kernels is built by every compiler that is looked for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from autosched.runtime.cpu_kernels import library


@pytest.mark.parametrize("command", ["g++", "clang++"])
def test_a_compiler_understands_the_kernels(command: str, tmp_path: Path) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"no {command}")
    command_line = [command, "-std=c++20", "-fPIC", "-c", str(library._SOURCE), "-o", str(tmp_path / "kernels.o")]
    made = subprocess.run(command_line, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
