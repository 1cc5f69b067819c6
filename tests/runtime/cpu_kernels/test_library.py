"""The library of kernels is built by every compiler that is looked for."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from autosched.runtime.cpu_kernels import library
from autosched.runtime.instructions import RunKernel
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.native.build import native_library
from autosched.runtime.native.code import NativeCode, NativeStep
from autosched.runtime.native.lanes import NativeProgram
from autosched.runtime.no_memory import lacks_memory


@pytest.mark.parametrize("command", ["g++", "clang++"])
def test_a_compiler_understands_the_kernels(command: str) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"no {command}")
    recipe = library.kernels_recipe()
    command_line = [command, *recipe.compile, "-fsyntax-only", str(recipe.source)]
    made = subprocess.run(command_line, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def _needs_much(threads: int) -> torch.Tensor:
    """The geometry of a picture so wide that nobody has the memory to pool its lines in, as ``Pooled`` has it in ``pooling.h``."""
    size, strides, taps, rest = (1, 16, 8, 1 << 52), (0, 1, 0, 0), (2, 2, 2, 2, 1, 1, 0, 0), (4, 4, 0, 0, 0)
    return torch.tensor((threads, *size, *strides, *taps, *rest))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("kernel")
def test_a_kernel_without_memory_to_work_in_is_an_error_and_not_the_end(threads: int) -> None:
    found, lanes = library.kernel_library(), native_library()
    assert isinstance(found, library.Library)
    assert lanes is not None
    given = torch.zeros(64), torch.zeros(64), _needs_much(threads)
    with pytest.raises(MemoryError, match="pooling"):
        found.pooling.call(*(each.data_ptr() for each in given))
    step = NativeStep(0, threads, (RunKernel("pooling", found.pooling.address, (), found, given),))
    program = NativeProgram(lanes, NativeCode((((step,),),), 1, 1000.0, (), outputs=()))
    with torch.inference_mode(), pytest.raises((MemoryError, RuntimeError)) as error:
        program.run([], None, LanePool())
    assert lacks_memory(error.value)
