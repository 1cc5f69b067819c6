"""The library of kernels is built by every compiler that is looked for."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from autosched.runtime.cpu_kernels import library


@pytest.mark.parametrize("command", ["g++", "clang++"])
def test_a_compiler_understands_the_kernels(command: str) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"no {command}")
    recipe = library.kernels_recipe()
    command_line = [command, *recipe.compile, "-fsyntax-only", str(recipe.source)]
    made = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
