"""The backend is found by name where the package is installed, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch

import autosched
from autosched import plugin

GROUP = "torch_dynamo_backends"
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"

_LEAN = """
import sys, warnings
import torch
import autosched
from autosched import plugin
heavy = ("xgboost", "optuna", "pandas", "sklearn", "numba", "pyarrow", "scipy")
assert not [name for name in heavy if name in sys.modules], "after import"
assert "autosched.pipeline" not in sys.modules and "torch._dynamo" not in sys.modules, "after import"
# PyTorch's own tracing imports some of these where they are installed.
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
with torch.no_grad():
    torch.compile(model, backend=lambda graph, inputs: graph)(torch.ones(2, 8))
    torch.export.export(model, (torch.ones(2, 8),))
before = set(sys.modules)
with torch.no_grad():
    torch._dynamo.reset()
    torch.compile(model, backend=plugin.autosched)(torch.ones(2, 8))
    autosched.compile(model, (torch.ones(2, 8),))
added = sorted(name for name in heavy if name in sys.modules and name not in before)
assert not added, added
assert "autosched.pipeline" not in sys.modules and "autosched.search" not in sys.modules
assert not torch.cuda.is_initialized()
assert len(plugin.reports()) == 1, plugin.reports()
print("lean")
"""


def test_the_entry_point_names_the_backend() -> None:
    installed = [entry for entry in entry_points(group=GROUP) if entry.name == "autosched"]
    if _PROJECT.is_file():
        written = tomllib.loads(_PROJECT.read_text())["project"]["entry-points"][GROUP]["autosched"]
        installed.append(EntryPoint("autosched", written, GROUP))
    assert installed
    assert all(entry.load() is plugin.autosched for entry in installed)


def test_torch_compile_finds_it_by_name() -> None:
    if not [entry for entry in entry_points(group=GROUP) if entry.name == "autosched"]:
        pytest.skip("the package was installed before it had this entry point; install it again")
    assert "autosched" in torch._dynamo.list_backends()
    model = torch.nn.Linear(4, 4).eval()
    x = torch.ones(2, 4)
    for _ in range(2):  # a second look-up must not register it a second time
        made = torch.compile(model, backend="autosched", options={"strict": True})(x)
        torch.testing.assert_close(made, model(x))
    assert plugin.reports()


def test_compile_is_part_of_the_package() -> None:
    assert "compile" in autosched.__all__
    assert callable(autosched.compile)


def test_the_plugin_loads_no_part_of_the_tuning_stack(tmp_path: Path) -> None:
    environment = {"AUTOSCHED_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LEAN], capture_output=True, text=True, env=environment, cwd=_PROJECT.parent, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "lean"
