"""What an editable install forgives and a wheel does not; and what importing the package may not load."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("xgboost", "optuna", "pandas", "sklearn", "numba", "pyarrow", "torchvision", "timm", "transformers", "rich", "typer")


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    listed = set(settings()["tool"]["setuptools"]["packages"])
    places = {"autosched": ROOT / "autosched", **{f"autosched.{name}": ROOT / name for name in ("costmodel", "search", "datasets")}}
    found = set()
    for package, folder in places.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(folder).parts]))
    assert found == listed


def test_every_dependency_says_which_file_needs_it() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    begin = lines.index("dependencies = [")
    block = lines[begin + 1 : lines.index("]", begin)]
    assert len(block) > 10
    assert [line for line in block if "#" not in line] == []


@pytest.mark.parametrize("statement", ["import autosched", "import autosched; autosched.load", "import autosched.cli"])
def test_importing_loads_neither_the_tuning_stack_nor_cuda(statement: str) -> None:
    heavy = ("torch._inductor", *HEAVY) if "cli" not in statement else tuple(name for name in HEAVY if name not in ("rich", "typer"))
    code = f"{statement}; import sys; bad = sorted(set({heavy!r}) & set(sys.modules)); assert not bad, bad"
    if "load" in statement:
        code += "; import torch; assert not torch.cuda.is_initialized()"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_interpreters_lock_the_import_says_how_to_have_it() -> None:
    code = "import sys; sys._is_gil_enabled = lambda: False; import autosched"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "ImportError: autosched needs the interpreter's lock" in done.stderr
    assert "PYTHON_GIL=1" in done.stderr


def test_looking_at_the_machine_loads_no_library_that_measures_or_learns() -> None:
    heavy = tuple(name for name in HEAVY if name not in ("rich", "typer"))
    code = (
        f"from autosched.doctor import examine; examine(); import sys; bad = sorted(set({heavy!r}) & set(sys.modules)); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_top_level_folders_are_only_importable_as_sub_packages() -> None:
    code = (
        "import importlib.util as u; assert u.find_spec('autosched.search') and not u.find_spec('search') and not u.find_spec('costmodel')"
    )
    # As installed: with the checkout on its path they are there, by whoever put it there.
    installed = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=installed, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_compiled_where_it_is_used_travels_with_the_package() -> None:
    data = settings()["tool"]["setuptools"]["package-data"]
    sources = [path for end in ("cpp", "h") for path in (ROOT / "autosched").rglob(f"*.{end}")]
    assert {"lanes.cpp", "convolutions.cpp", "products.h"} <= {path.name for path in sources}
    for path in sources:
        package = ".".join(path.parent.relative_to(ROOT).parts)
        assert any(path.match(pattern) for pattern in data[package])
