"""Inductor's max-autotune on a CPU: products by C++ templates, their weights blocked for a number of threads, kept and taken again."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured
from autosched.core.errors import IncompatibleArtifact
from autosched.core.graph import ValueRole
from autosched.core.program_json import decode_program, encode_program
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor import kept as inductor_kept
from autosched.runtime.inductor.bind import first_difference
from autosched.runtime.inductor.modes import Mode, mode_of
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.plan import make_plan
from autosched.runtime.widths import WidePrograms
from tests.conformance.compiling import compiling

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Two(nn.Module):
    """Two products."""

    def __init__(self, columns: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, columns), nn.Linear(columns, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(torch.relu(self.up(x)))
        return made


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiling(tmp_path_factory.mktemp("cache"), threads=2):
        yield


@pytest.fixture(scope="module")
def chosen() -> tuple[nn.Module, Captured]:
    """Chosen by timing, for real."""
    torch.manual_seed(0)
    model = Two().eval()
    return model, _captured(model, Mode(Lowering.MAX_AUTOTUNE))


@pytest.fixture(scope="module")
def templated(chosen: tuple[nn.Module, Captured]) -> tuple[nn.Module, Captured]:
    """The same, but with the template wherever there is one, whatever is faster here."""
    model, found = chosen
    return model, _in_templates(model, found)


def _captured(model: nn.Module, mode: Mode) -> Captured:
    found = capture_inductor(model, (torch.randn(16, 128),), mode=mode)
    assert isinstance(found, Captured), found.reason
    return found


def _in_templates(model: nn.Module, chosen: Captured) -> Captured:
    choices = tuple((question, "cpp_CppMicroGemmFP32Vec") for question, _ in chosen.program.choices)
    forced = _captured(model, Mode(Lowering.MAX_AUTOTUNE, choices=choices))
    if forced.program.choices != choices:
        pytest.skip(f"this processor has other templates: {forced.program.choices}")
    return forced


def test_every_choice_is_noted_and_travels(chosen: tuple[nn.Module, Captured]) -> None:
    program = chosen[1].program
    assert program.lowering == "max_autotune"
    assert len(program.choices) == 2
    assert all(question.startswith("packed_linear float32[16, ") and answer for question, answer in program.choices)
    assert decode_program(encode_program(program)) == program
    assert mode_of(program, "cpu") == Mode(Lowering.MAX_AUTOTUNE, True, program.choices)


def test_binding_takes_what_was_chosen_and_compiles_nothing(templated: tuple[nn.Module, Captured], monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(*args: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(inductor_compile, "_compile", compiler)
    model, found = templated
    before = inductor_kept.counts.found
    bound = bind(found.program, found.constants)
    assert inductor_kept.counts.found == before + 1
    inputs = random_inputs(found.program, 3)
    with torch.no_grad():
        torch.testing.assert_close(bound.run(inputs)[0], model(*inputs), rtol=1e-4, atol=1e-5)


def test_a_template_is_one_launch_with_its_epilogue_and_its_work(templated: tuple[nn.Module, Captured]) -> None:
    operators = templated[1].program.graph.operators
    assert [operator.name.startswith("cpp_tem_fused") for operator in operators] == [True, True]
    assert [operator.flops for operator in operators] == [2 * 16 * 128 * 32] * 2


class Halves(nn.Module):
    """Products with each half of one weight, which itself lies behind another in its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 128)[32:] / 11.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weight.chunk(2)
        return torch.relu(nn.functional.linear(x, first)) + nn.functional.linear(x, second)


def test_a_weight_is_blocked_from_where_it_lies_in_its_storage() -> None:
    """Inductor blocked what the storage begins with: halves of a weight, as in attention to another sequence, had no max-autotune."""
    torch.manual_seed(1)
    model = Halves().eval()
    found = _in_templates(model, _captured(model, Mode(Lowering.MAX_AUTOTUNE)))
    inputs = random_inputs(found.program, 3)
    # Of new weights that lie elsewhere, as in a file that was read at once, and of those that were compiled.
    for weight in (model.weight, nn.Parameter(torch.randn(70, 128)[6:] / 11.0)):
        model.weight = weight
        constants = {binding.value: weight.detach() for binding in found.program.bindings}
        assert len(constants) == 1
        with torch.no_grad():
            torch.testing.assert_close(bind(found.program, constants).run(inputs)[0], model(*inputs), rtol=1e-4, atol=1e-5)


def test_each_width_has_the_weights_of_its_own(templated: tuple[nn.Module, Captured]) -> None:
    # Which weights are blocked otherwise for two threads than for one is up to the length of the processor's vectors.
    narrow = Two(columns=20).eval()
    also = _in_templates(narrow, _captured(narrow, Mode(Lowering.MAX_AUTOTUNE)))
    blocked_otherwise = [_weights_of_each_width(model, each) for model, each in (templated, (narrow, also))]
    assert any(blocked_otherwise)


def _weights_of_each_width(model: nn.Module, found: Captured) -> list[int]:
    """Which are other ones for two threads, after a look at what is computed."""
    graph = found.program.graph
    programs = WidePrograms(found.program, found.constants)
    inputs = random_inputs(found.program, 4)
    with torch.no_grad():
        wanted = model(*inputs)
    for widths in ((1, 1), (2, 2), (1, 2), (2, 1)):
        plan = make_plan(graph, dataclasses.replace(sequential(graph), width=widths))
        torch.testing.assert_close(programs.for_plan(plan).run(inputs)[0], wanted, rtol=1e-4, atol=1e-5)
    one, two = programs.at(1).constants, programs.at(2).constants
    differing = [value for value in range(len(one)) if isinstance(one[value], torch.Tensor) and one[value].shape != two[value].shape]
    assert differing == [value for index in range(len(graph)) for value in programs.packed_reads(index, one)]
    return differing


def test_a_constant_may_be_laid_out_otherwise_only_for_one_reader(templated: tuple[nn.Module, Captured]) -> None:
    program = templated[1].program
    graph = program.graph
    read = [value for operator in graph.operators for value in operator.reads]
    (alone, *_) = [value.index for value in graph.values if value.role is ValueRole.CONSTANT and read.count(value.index) == 1]

    def otherwise(value: int) -> object:
        values = list(graph.values)
        values[value] = dataclasses.replace(values[value], spec=dataclasses.replace(values[value].spec, shape=(1, 2, 3)))
        return dataclasses.replace(program, graph=dataclasses.replace(graph, values=tuple(values)))

    assert first_difference(program, otherwise(alone)) == ""  # type: ignore[arg-type]
    made = graph.operators[0].writes[0]
    assert f"value {made}" in first_difference(program, otherwise(made))  # type: ignore[arg-type]


def test_what_differs_of_an_operator_of_one_name_is_said(templated: tuple[nn.Module, Captured]) -> None:
    program = templated[1].program
    first, *others = program.graph.operators

    def said(**other: object) -> str:
        graph = dataclasses.replace(program.graph, operators=(dataclasses.replace(first, **other), *others))  # type: ignore[arg-type]
        return first_difference(program, dataclasses.replace(program, graph=graph))

    kind, call = first.kind, first.calls[0]
    other, alike = (dataclasses.replace(call, target=target) for target in ("inductor::other.0", f"{call.target}0"))
    assert said(reads=(99,)) == f"operator 0 ({kind}) reads values {list(first.reads)} there, [99] here"
    assert said(mutates=(99,)) == f"operator 0 ({kind}) mutates values {list(first.mutates)} there, [99] here"
    assert said(calls=(other,)) == f"operator 0 is {kind} there, inductor::other here"
    assert said(calls=(alike,)) == f"operator 0 is {kind} there and here, with other arguments"


def test_a_mode_is_in_the_key_of_what_is_kept(templated: tuple[nn.Module, Captured]) -> None:
    found = templated[1]
    source = decode_program(found.program.source.encode())
    pairs = zip(source.bindings, found.program.bindings, strict=True)
    bound = bind(source, {theirs.value: found.constants[ours.value] for theirs, ours in pairs}, "cpu")
    inputs = random_inputs(source, 0)
    modes = [Mode(), Mode(frozen=False), *(Mode(Lowering.MAX_AUTOTUNE, choices=choices) for choices in ((), found.program.choices))]
    keys = [inductor_kept.key_of(bound, [], inputs, inductor_compile._options(mode), mode) for mode in modes]
    assert len(set(keys)) == len(keys)
    assert all(keys)


def test_other_launches_than_the_programs_are_refused(templated: tuple[nn.Module, Captured]) -> None:
    _, found = templated
    library = tuple((question, "_mkl_linear") for question, _ in found.program.choices)
    with pytest.raises(IncompatibleArtifact, match="Inductor writes other code here"):
        bind(dataclasses.replace(found.program, choices=library), found.constants)
