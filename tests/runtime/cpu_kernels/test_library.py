"""The library of kernels is built by every compiler that is looked for."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.runtime.cpu_kernels import library, steps
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.no_memory import lacks_memory
from autosched.runtime.plan import make_plan
from tests.conformance.own_kernels import bound_with


@pytest.mark.parametrize("command", ["g++", "clang++"])
def test_a_compiler_understands_the_kernels(command: str) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"no {command}")
    recipe = library.kernels_recipe()
    command_line = [command, *recipe.compile, "-fsyntax-only", *map(str, recipe.sources)]
    made = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_that_lack_memory_fail_as_operators_do(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the process: of a server, too, whose calls would have run the model."""
    x = torch.randn(1, 20, 9, 9).contiguous(memory_format=torch.channels_last)
    found = capture(nn.MaxPool2d(3), (x,), lowering=Lowering.REWRITTEN)
    way = steps.WAYS[Variant.OWN_POOLING]

    def numbers(*given: object) -> torch.Tensor:
        made = way.numbers(*given)
        made[4] = 2**50  # pixels of a line, for which there is no memory to work in
        return made

    monkeypatch.setattr(steps, "POOLING", dataclasses.replace(way, numbers=numbers))
    monkeypatch.setattr(steps, "_difference", lambda *given: "")
    bound, [_] = bound_with(found, Variant.OWN_POOLING, threads)
    executor = LaneExecutor(bound, make_plan(found.program.graph, sequential(found.program.graph, width=threads)), LanePool())
    assert executor.engine.value == "native"
    for run in (bound.run, executor.run, bound.run):
        # The latter from lanes, from PyTorch 2.15 on.
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            run([x])
        assert lacks_memory(caught.value)
