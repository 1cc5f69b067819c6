"""Programs whose operators are in variants of our own, as tests of those kernels bind, save and judge them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured
from autosched.core.errors import UsageError
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.schedule import Schedule, sequential
from autosched.export.bundle import make_bundle, write_bundle
from autosched.runtime.bundle.format import read_bundles
from autosched.runtime.host_key import cpu_device_key, numerics_key, software_key
from autosched.runtime.inductor.common import Refused
from autosched.runtime.instructions import instructions_of
from autosched.runtime.kernels import BoundProgram, bind
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.plan import make_plan
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pieces import offered_variants
from autosched.runtime.verdict import Compatibility, check_bundle
from autosched.runtime.widths import WidePrograms
from tests.conformance.bundles import evidence_for
from tests.conformance.interpreter import interpret

CPU = torch.device("cpu")


def library_of(found: Captured) -> RegionLibrary:
    return RegionLibrary(found.program, CPU, "scope")


def having(found: Captured, variant: int) -> list[int]:
    """The operators that have ``variant``."""
    return [index for index, row in enumerate(offered_variants(found.program, "cpu")) if variant in row]


def schedule_with(found: Captured, variant: int, width: int = 1) -> Schedule:
    """All operators one after the other, in ``variant`` those that have it."""
    graph, offered = found.program.graph, having(found, variant)
    chosen = tuple(int(variant) if index in offered else 0 for index in range(len(graph)))
    return dataclasses.replace(sequential(graph, width=width), variant=chosen)


def bound_with(found: Captured, variant: int, width: int = 1) -> tuple[BoundProgram, list[int]]:
    """The program with every operator in ``variant`` that has it, and which those are."""
    plan = make_plan(found.program.graph, schedule_with(found, variant, width))
    return WidePrograms(found.program, found.constants, regions=library_of(found)).for_plan(plan), having(found, variant)


def save_with(path: Path, found: Captured, variant: int) -> int:
    """Write a schedule file in which every operator that can be is in ``variant``, and say how many those are: one or more."""
    graph, device = found.program.graph, cpu_device_key()
    schedule = schedule_with(found, variant)
    assert any(schedule.variant)
    evidence = evidence_for(len(graph), device, graph.hash)
    write_bundle(path, make_bundle(found.program, schedule, evidence, {}, device, software_key(), numerics=numerics_key("cpu")))
    return sum(map(bool, schedule.variant))


def with_value(graph: OpGraph, index: int, *, role: ValueRole | None = None, **changes: Any) -> OpGraph:
    """``graph`` in which one value has another role, or another spec."""
    old = graph.values[index]
    new = dataclasses.replace(old, spec=dataclasses.replace(old.spec, **changes), role=role or old.role)
    return dataclasses.replace(graph, values=tuple(new if value is old else value for value in graph.values))


def error_of(got: torch.Tensor, model: nn.Module, x: torch.Tensor) -> float:
    """Largest error against float64, over the largest number there is."""
    with torch.no_grad():
        wanted = model.double()(x.double())
    model.float()
    return float((got - wanted).abs().max() / wanted.abs().max())


def assert_switched_off_by(variable: str, variant: int, found: Captured, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``variable`` is 0, nothing has ``variant``, operator ``index`` cannot have it, and other words than 0 and 1 are refused."""
    monkeypatch.setenv(variable, "0")
    assert not any(variant in row for row in offered_variants(found.program, "cpu"))
    refused = library_of(found).kernel(index, 1, variant, bind(found.program, found.constants, "cpu"))
    assert isinstance(refused, Refused)
    assert refused.reason == f"switched off by {variable}=0"
    monkeypatch.setenv(variable, "no")
    with pytest.raises(UsageError, match=f"{variable} is 'no'; expected 1, or 0"):
        offered_variants(found.program, "cpu")


def assert_degraded_without(variable: str, kind: str, count: int, path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``variable`` is 0, which it stays, the file's verdict says that ``count`` of ``kind`` are computed by libraries."""
    [bundle] = read_bundles(path)
    monkeypatch.setenv(variable, "0")
    without = check_bundle(bundle, cpu_device_key(), software_key(), model)
    assert without.compatibility is Compatibility.DEGRADED
    said = f"{kind}: {count} by kernels of our own there, by those of libraries here (switched off by {variable}=0)"
    assert said in without.lines


def assert_instructions_and_lanes_agree(bound: BoundProgram, *inputs: torch.Tensor) -> None:
    """Its instructions, interpreted and run by lanes without the interpreter, make what its kernels make of ``inputs``, bit for bit."""
    graph = bound.program.graph
    slots = {slot: tensor for slot, tensor in enumerate(bound.new_slots(list(inputs))) if tensor is not None}
    with torch.inference_mode():
        for made in bound.kernels:
            interpret(instructions_of(made) or pytest.fail("it says nothing"), slots)
    wanted = bound.run(list(inputs))
    assert all(torch.equal(slots[place], tensor) for place, tensor in zip(graph.outputs, wanted, strict=True))
    executor = LaneExecutor(bound, make_plan(graph, sequential(graph)), LanePool())
    assert executor.engine.value == "native"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(executor.run(list(inputs)), wanted, strict=True))
