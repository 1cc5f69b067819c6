"""Widths at which operators run: how many there are on how many cores, and that code for the whole model is compiled for just those."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autosched.core.errors import IncompatibleArtifact
from autosched.core.program import Program
from autosched.core.records import Failure, SoloRecord
from autosched.core.variants import Lowering
from autosched.device import cpu, worker_main
from autosched.device.ahead import NotCompiled
from autosched.device.cpu import CpuDevice
from autosched.device.cpu_measure import CpuMeasurer
from autosched.device.cpu_solo import measure_solo
from autosched.device.host import whole_widths, widths_within
from autosched.device.worker_messages import OpenRequest
from autosched.pipeline import inductor_capture, preparing
from autosched.pipeline.inductor_capture import inductor_source, lower_inductor
from autosched.pipeline.original import Original
from autosched.runtime.inductor.common import Refused
from autosched.runtime.kernels import BoundProgram, random_inputs
from autosched.runtime.widths import WidePrograms
from tests.conformance.programs import branches_program, chain_program


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 8, 12, 32, 48, 64, 96, 128])
def test_every_number_of_cores_has_one_thread_all_of_them_and_few_others(cores: int) -> None:
    every, few = widths_within(cores), whole_widths(cores)
    assert every[0] == few[0] == 1
    assert every[-1] == few[-1] == cores
    assert list(every) == sorted(set(every))
    assert len(every) <= 8
    assert set(few) <= set(every)
    assert len(few) == min(3, len(every))


def test_code_for_the_whole_model_is_compiled_for_the_widths_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On eight cores it was compiled for one and for all of PyTorch's threads, and for the others within the measurements."""
    monkeypatch.setattr(cpu, "physical_cores", lambda: 8)
    monkeypatch.setattr(preparing, "physical_cores", lambda: 8)
    asked: list[tuple[int, ...]] = []

    def ahead(source: Program, constants: object, device: object, threads: Any, *rest: object) -> NotCompiled:
        asked.append(tuple(threads))
        return NotCompiled("asked is enough")

    monkeypatch.setattr(preparing, "compile_ahead", ahead)
    original = Original(nn.Linear(8, 8).eval(), (torch.randn(4, 8),), None)
    device = CpuDevice()
    preparing.capture_as(Lowering.INDUCTOR, original, device, limit_s=30.0)
    program, constants = chain_program()
    whole = dataclasses.replace(program, lowering="inductor")
    with device.open(whole, constants, timeout_s=10.0) as few, device.open(program, constants, timeout_s=10.0) as every:
        assert asked == [few._widths[::-1]] == [(8, 4, 1)]
        assert every._widths == (1, 2, 4, 8)


def test_it_is_written_for_as_many_threads_as_it_will_have_whatever_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def lowered(*given: object, **options: object) -> Refused:
        found.append(torch.get_num_threads())
        return Refused("seen")

    monkeypatch.setattr(inductor_capture, "_lowered", lowered)
    source, home = inductor_source(Original(nn.Linear(8, 8).eval(), (torch.randn(4, 8),), None).draft())
    before = torch.get_num_threads()
    lower_inductor(source, home, threads=before + 3)
    lower_inductor(source, home)
    assert set(found) == {before + 3, before}
    assert found[0] == before + 3
    assert torch.get_num_threads() == before


def test_the_measuring_process_has_all_of_it_compiled_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers show no progress: within a measurement they would look like one that hangs, and their time like the operators'."""
    program, constants = chain_program()
    bound: list[tuple[int, bool]] = []
    compiling: list[bool] = [False]

    class Watched(WidePrograms):
        def at(self, width: int) -> BoundProgram:
            bound.append((width, compiling[0]))
            if width == 3:
                raise IncompatibleArtifact("the program", ["other launches"])
            return super().at(width)

    class Channel:
        plugin = None

        def beat(self, item: int) -> None: ...

        @contextlib.contextmanager
        def working(self, limit_s: float) -> Iterator[None]:
            compiling[0] = True
            yield
            compiling[0] = False

    monkeypatch.setattr(worker_main, "read_program", lambda *files: (dataclasses.replace(program, source="a program"), constants))
    monkeypatch.setattr(worker_main, "WidePrograms", Watched)
    monkeypatch.setattr(worker_main, "do_without", lambda why: None)
    service = worker_main._Service(Channel())  # type: ignore[arg-type]
    assert not list(service.handle(OpenRequest("", "", 0, widths=(1, 3, 4))))
    assert [width for width, within in bound if within] == [1, 3, 4]


class _NotAtThree(WidePrograms):
    """A program whose code is other launches at width 3."""

    def __init__(self, program: Program, constants: Mapping[int, torch.Tensor]) -> None:
        super().__init__(program, constants)

    def at(self, width: int) -> BoundProgram:
        if width == 3:
            raise IncompatibleArtifact("the program", ["Inductor writes other code here"])
        return super().at(width)


def test_a_width_at_which_the_program_cannot_be_had_is_out_and_the_others_are_timed() -> None:
    program, constants = branches_program(branches=2, depth=1, size=8)
    measurer = CpuMeasurer(_NotAtThree(program, constants), random_inputs(program, 0), lambda item: None)
    found: dict[int, list[object]] = {0: [], 1: [], 2: []}
    for _, place, record, failure in measure_solo(measurer, [(1, 0), (3, 0), (2, 0)], 2, (), 0):
        found[place].append(record if record is not None else failure)
    count = len(program.graph)
    assert [len(column) for column in found.values()] == [count] * 3
    assert all(isinstance(item, SoloRecord) for place in (0, 2) for item in found[place])
    assert all(isinstance(item, Failure) and "other code" in item.detail for item in found[1])
