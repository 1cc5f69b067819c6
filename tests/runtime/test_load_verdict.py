"""Verdicts: every field of the key that differs gives one line and the documented grade; and when outputs agree."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
import torch

from autosched.core.custom_operators import trusting
from autosched.core.program import Call
from autosched.core.program_json import encode_program
from autosched.runtime.bundle.format import Bundle, printable
from autosched.runtime.cores import usable_cores
from autosched.runtime.host_key import cpu_device_key, numerics_key, software_key
from autosched.runtime.numerics import compare, tolerance
from autosched.runtime.verdict import Compatibility, check_bundle
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs


@pytest.fixture
def bundle() -> Bundle:
    return two_branches_bundle(TwoBranches().eval())


def test_where_it_was_made_a_bundle_is_exact(bundle: Bundle) -> None:
    verdict = check_bundle(bundle, cpu_device_key(), software_key(), TwoBranches())
    assert verdict.compatibility is Compatibility.EXACT
    assert verdict.lines == ()


@pytest.mark.parametrize(("rows", "leaves_open", "fits"), [(4, False, True), (5, True, True), (5, False, False)])
@pytest.mark.parametrize("guards", [False, True])
def test_an_exported_program_for_other_shapes_is_told_by_its_inputs(
    bundle: Bundle, rows: int, leaves_open: bool, fits: bool, guards: bool
) -> None:
    args, kwargs = two_branches_inputs(rows=rows)
    size = {0: torch.export.Dim("rows", min=2, max=64)}
    sizes = {"x": size, "more": {"shift": size, "flag": None}} if leaves_open else None
    exported = torch.export.export(TwoBranches().eval(), args, kwargs, dynamic_shapes=sizes)
    verdict = check_bundle(bundle, cpu_device_key(), software_key(), exported.module(check_guards=guards))
    lines = [f"input {place}: [4, 8] there, and the exported program takes [5, 8]" for place in (0, 1)]
    assert verdict.lines == (() if fits else tuple(lines))
    assert (verdict.compatibility is Compatibility.INCOMPATIBLE) is not fits


def test_every_field_of_the_device_matters(bundle: Bundle) -> None:
    device = bundle.key.device
    edited = [dataclasses.replace(device, kind="cuda"), dataclasses.replace(device, name="x"), dataclasses.replace(device, details=())]
    for position, (name, value) in enumerate(device.details):
        details = list(device.details)
        details[position] = (name, value + "!")
        edited.append(dataclasses.replace(device, details=tuple(details)))
    for other in edited:
        verdict = check_bundle(bundle, other, software_key())
        assert verdict.compatibility is Compatibility.INCOMPATIBLE
        assert len(verdict.lines) == (len(device.details) if other.details == () else 1)


def test_every_version_degrades(bundle: Bundle) -> None:
    versions = software_key().versions
    for position, (name, value) in enumerate(versions):
        changed = (*versions[:position], (name, value + "!"), *versions[position + 1 :])
        verdict = check_bundle(bundle, cpu_device_key(), dataclasses.replace(software_key(), versions=changed))
        assert verdict.compatibility is Compatibility.DEGRADED
        assert verdict.lines == (f"software {name}: {value} there, {value}! here",)


def test_settings_that_change_numerics_are_incompatible(bundle: Bundle) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        verdict = check_bundle(bundle, cpu_device_key(), software_key())
    finally:
        torch.use_deterministic_algorithms(False)
    assert verdict.compatibility is Compatibility.INCOMPATIBLE
    assert verdict.lines == ("setting deterministic: False there, True here",)


def test_settings_may_be_those_of_another_process(bundle: Bundle) -> None:
    settings = tuple((name, "True" if name == "deterministic" else value) for name, value in numerics_key())
    verdict = check_bundle(bundle, cpu_device_key(), software_key(), numerics=settings)
    assert verdict.lines == ("setting deterministic: False there, True here",)


def _calling(bundle: Bundle, where: str, *targets: str) -> Bundle:
    """The bundle with calls of ``targets`` in one place of its program."""
    program = bundle.program
    calls = tuple(Call(target, (), (), ()) for target in targets)
    first, *others = program.graph.operators
    in_operator = dataclasses.replace(program.graph, operators=(dataclasses.replace(first, calls=(*first.calls, *calls)), *others))
    changed = {
        "prologue": dataclasses.replace(program, prologue=(*program.prologue, *calls)),
        "operator": dataclasses.replace(program, graph=in_operator),
    }
    source, _, part = where.partition(" ")
    if source == "source":
        return dataclasses.replace(bundle, program=dataclasses.replace(program, source=encode_program(changed[part]).decode()))
    return dataclasses.replace(bundle, program=changed[where])


@pytest.mark.parametrize("where", ["prologue", "operator", "source prologue", "source operator"])
def test_a_custom_operator_that_is_not_trusted_is_named_wherever_it_is_called(bundle: Bundle, where: str) -> None:
    verdict = check_bundle(_calling(bundle, where, "mine::scan.default"), cpu_device_key(), software_key())
    assert verdict.compatibility is Compatibility.INCOMPATIBLE
    (line,) = verdict.lines
    assert line.startswith("custom operators: it runs mine::scan.default, and the namespace 'mine' is not trusted here")


def test_of_many_custom_operators_three_are_named(bundle: Bundle) -> None:
    for count, words in ((3, "c.default, and the namespace"), (4, "c.default and 1 more, and the namespace")):
        targets = [f"mine::{name}.default" for name in "abcd"[:count]]
        (line,) = check_bundle(_calling(bundle, "operator", *targets), cpu_device_key(), software_key()).lines
        assert words in line
    assert (
        len(check_bundle(_calling(bundle, "operator", "mine::a.default", "yours::a.default"), cpu_device_key(), software_key()).lines) == 2
    )


def test_a_trusted_operator_that_is_not_registered_here_is_named(bundle: Bundle) -> None:
    with trusting(frozenset({"mine"})):
        (line,) = check_bundle(_calling(bundle, "operator", "mine::scan.default"), cpu_device_key(), software_key()).lines
    assert "mine::scan" in line
    assert "not trusted" not in line


def test_what_keeps_memory_there_and_not_here_degrades(bundle: Bundle) -> None:
    keeping, giving = (software_key().keeping_memory(kept) for kept in (True, False))
    kept = dataclasses.replace(bundle, key=msgspec.structs.replace(bundle.key, software=keeping))
    given = dataclasses.replace(bundle, key=msgspec.structs.replace(bundle.key, software=giving))
    verdict = check_bundle(kept, cpu_device_key(), giving)
    assert verdict.compatibility is Compatibility.DEGRADED
    assert verdict.lines == ("memory: kept between calls there, given back after each here; call autosched.keep_memory() first",)
    for bundled, here in ((kept, keeping), (given, keeping), (given, giving)):
        assert check_bundle(bundled, cpu_device_key(), here).lines == ()


def test_parameters_are_compared_by_name_shape_dtype_and_layout(bundle: Bundle) -> None:
    model = TwoBranches()
    model.left = torch.nn.Linear(8, 9)
    model.right.weight = torch.nn.Parameter(torch.ones(8, 8).t().contiguous().t())
    del model.offset
    verdict = check_bundle(bundle, cpu_device_key(), software_key(), model)
    assert verdict.compatibility is Compatibility.INCOMPATIBLE
    assert verdict.lines == (
        "parameter left.weight: [8, 8] float32 there, [9, 8] float32 here",
        "parameter left.bias: [8] float32 there, [9] float32 here",
        "buffer offset: [8] float32 there, absent here",
        "parameter right.weight: strides (8, 1) there, (1, 8) here",
    )


def test_keys_are_stable_and_read_no_device() -> None:
    assert cpu_device_key() == cpu_device_key()
    assert software_key() == software_key()
    assert numerics_key() == tuple(sorted(numerics_key()))
    assert usable_cores() >= 1
    assert dict(cpu_device_key().details)["cores"] == str(usable_cores())


def test_lines_are_safe_to_print() -> None:
    assert printable("a\x1b[31mb\n") == "a?[31mb?"
    assert len(printable("x" * 10_000)) == 500


def test_outputs_agree_within_the_tolerance_of_their_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        reference = torch.linspace(-4, 4, 101).to(dtype)
        allowed = tolerance(dtype)
        near = (reference.double() * (1 + allowed.relative / 2)).to(dtype)
        far = (reference.double() + 8 * (allowed.relative + allowed.of_scale)).to(dtype)
        assert compare([reference], [reference]).bitwise
        assert compare([near], [reference]).within_tolerance
        agreement = compare([far], [reference])
        assert not agreement.within_tolerance
        assert agreement.max_abs_error > 0
        assert "output 0" in agreement.reason


def test_zero_beside_large_values_is_compared_by_scale() -> None:
    reference = torch.tensor([0.0, 1000.0])
    assert compare([torch.tensor([1e-3, 1000.0])], [reference]).within_tolerance
    assert not compare([torch.tensor([1.0, 1000.0])], [reference]).within_tolerance


@pytest.mark.parametrize("mask", [-1e4, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_what_hides_places_of_an_output_allows_its_neighbours_nothing(mask: float) -> None:
    reference = torch.tensor([mask, 1.0, 0.0, 2.0, mask])
    assert compare([torch.tensor([mask, 1.0 + 1e-4, 1e-4, 2.0, mask])], [reference]).within_tolerance
    for wrong in ([mask, 0.9, 0.0, 2.0, mask], [mask, 1.0, 0.1, 2.0, mask], [mask / 2, 1.0, 0.0, 2.0, mask], [mask, 1.0, 0.0, mask, mask]):
        assert not compare([torch.tensor(wrong)], [reference]).within_tolerance


@pytest.mark.parametrize("mask", [-1024.0, -2000.0, -5000.0, 8191.0])
def test_a_number_that_may_hide_places_allows_its_neighbours_no_more_than_rounding(mask: float) -> None:
    reference = torch.tensor([mask, 0.1, 0.0, mask])
    noise = 26 * 2.0**-24 * abs(mask) * 0.99
    assert compare([torch.tensor([mask, 0.1, noise, mask])], [reference]).within_tolerance
    assert not compare([torch.tensor([mask, 0.1, 0.02, mask])], [reference]).within_tolerance
    # What differs itself was computed, and allows as much as ever.
    assert compare([torch.tensor([mask + 0.1, 0.1, 0.02, mask])], [reference]).within_tolerance


def test_in_half_precision_numbers_are_often_equal_by_chance() -> None:
    reference = torch.tensor([2000.0, 0.1], dtype=torch.float16)
    assert compare([torch.tensor([2000.0, 1.0], dtype=torch.float16)], [reference]).within_tolerance


def test_large_values_that_differ_are_computed_and_count_to_the_scale() -> None:
    reference = torch.tensor([0.0, 1e5, 2e5])
    assert compare([torch.tensor([1.0, 1e5, 2e5 + 1])], [reference]).within_tolerance


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_special_values_must_be_in_the_same_places(special: float) -> None:
    reference = torch.tensor([1.0, special, 2.0])
    assert compare([reference.clone()], [reference]).bitwise
    assert not compare([torch.tensor([1.0, 5.0, 2.0])], [reference]).within_tolerance
    assert not compare([torch.tensor([special, 1.0, 2.0])], [reference]).within_tolerance
    assert not compare([reference], [torch.tensor([1.0, 5.0, 2.0])]).within_tolerance
    assert not compare([-reference], [reference]).within_tolerance


def test_integers_counts_shapes_and_dtypes_must_be_equal() -> None:
    whole = torch.tensor([1, 2])
    assert compare([whole], [whole.clone()]).bitwise
    assert not compare([whole + 1], [whole]).within_tolerance
    assert not compare([whole], [whole, whole]).within_tolerance
    assert not compare([whole.float()], [whole]).within_tolerance
    assert not compare([whole.view(2, 1)], [whole]).within_tolerance
    assert compare([], []).within_tolerance
    assert compare([torch.empty(0)], [torch.empty(0)]).bitwise
    assert compare([torch.tensor([1 + 2j])], [torch.tensor([1 + 2j])]).bitwise
    assert not compare([torch.tensor([1 - 2j])], [torch.tensor([1 + 2j])]).within_tolerance
    assert compare([torch.tensor([True])], [torch.tensor([True])]).bitwise
    assert not compare([torch.tensor([-0.0])], [torch.tensor([0.0])]).bitwise
