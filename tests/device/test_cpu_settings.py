"""What is measured on a CPU is measured under the settings of whoever asked, and a rounding that these allow is no error of a schedule."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autosched.core.schedule import sequential
from autosched.device.base import Comparison
from autosched.device.compiled_baseline import CompiledBaseline, from_zoo
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.cpu_session import CpuSession
from autosched.runtime import float32
from autosched.runtime.host_key import numerics_key
from autosched.runtime.widths import WidePrograms
from tests.conformance.precision import rounding
from tests.conformance.programs import branches_program

_TELLS = """
import json
from pathlib import Path
from autosched.runtime.host_key import numerics_key

def wrap_kernel(index, kernel):
    Path({path!r}).write_text(json.dumps(numerics_key("cpu")))
    return kernel

import autosched.device.worker_compile as compiling
compiling._load_model = lambda request: wrap_kernel(0, None)
"""


@pytest.fixture
def other_settings() -> Iterator[tuple[tuple[str, str], ...]]:
    usual = numerics_key("cpu")
    with rounding(conv="bf16"):
        torch.set_float32_matmul_precision("medium")
        torch.backends.mkldnn.enabled = False
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        try:
            changed = numerics_key("cpu")
            assert len(set(changed) - set(usual)) == 5
            yield changed
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.backends.mkldnn.enabled = True
    assert numerics_key("cpu") == usual


def test_schedules_are_measured_under_the_settings_of_the_tuning_process(
    other_settings: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    told = tmp_path / "told.json"
    plugin = tmp_path / "plugin.py"
    plugin.write_text(_TELLS.format(path=str(told)))
    program, constants = branches_program()
    with CpuSession(program, constants, timeout_s=60, max_lanes=1, widths=(1,), plugin=plugin) as session:
        assert isinstance(session.paired([sequential(program.graph)], rounds=1), list)
    assert json.loads(told.read_text()) == [list(item) for item in other_settings]


def test_torch_compile_is_measured_under_them_too(other_settings: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    plugin = tmp_path / "plugin.py"
    plugin.write_text(_TELLS.format(path=str(told)) + "compiling._missing_compiler = lambda: None\n")
    baseline = CompiledBaseline(from_zoo("autosched:toy"), (torch.zeros(1, 3, 32, 32),), {}, [], threads=1, plugin=plugin)
    try:
        baseline.prepare()
    finally:
        baseline.close()
    assert json.loads(told.read_text()) == [list(item) for item in other_settings]


class _Rounds:
    """Products that round as oneDNN's may, on any processor."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, slots: list[Any]) -> None:
        before = [item if item is None else item.clone() for item in slots]
        self._kernel(slots)
        if float32.rounded_as("cpu") is not None:
            for place, item in enumerate(slots):
                if item is not None and (before[place] is None or not torch.equal(before[place], item)):
                    slots[place] = item.bfloat16().float()


def test_a_rounding_that_is_asked_for_is_no_error_of_a_schedule() -> None:
    program, constants = branches_program()

    def rounded(bound: Any) -> Any:
        return dataclasses.replace(bound, kernels=tuple(_Rounds(kernel) for kernel in bound.kernels))

    inputs = [torch.randn(32, 32)]
    programs = WidePrograms(program, constants, rounded)
    wanted = programs.at(1).run(inputs)
    measurer = CpuMeasurer(programs, inputs, lambda item: None)
    schedule = sequential(program.graph)
    with rounding(matmul="bf16"):
        answer = measurer.compare(schedule, [inputs], [wanted]).comparison
        wrong = measurer.compare(schedule, [inputs], [[item * 1.003 for item in wanted]]).comparison
    assert isinstance(answer, Comparison)
    assert isinstance(wrong, Comparison)
    assert answer.within_tolerance
    assert answer.bitwise
    assert answer.max_abs_error > 1e-4
    # Judged without rounding, another function is one.
    assert not wrong.within_tolerance
