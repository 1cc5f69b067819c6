"""The lowering ``inductor``, compiled for real on the CPU: numerics, any legal schedule, two widths, and bundles that carry no code."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosched.capture.export import Captured, capture
from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UsageError
from autosched.core.program import Ref
from autosched.core.program_json import decode_program, encode_program
from autosched.core.records import Engine
from autosched.core.variants import Lowering
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.pipeline import inductor_capture
from autosched.pipeline.inductor_capture import capture_inductor, estimated_flops
from autosched.runtime.bundle.program_check import check_program
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.inductor import bind as inductor_bind
from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor.bind import Recording
from autosched.runtime.inductor.common import Refused
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.lane_pool import LanePool
from autosched.runtime.lanes import LaneExecutor
from autosched.runtime.load import load
from autosched.runtime.plan import make_plan
from autosched.runtime.trees import output_tensors, unflatten_inputs, unflatten_outputs
from autosched.runtime.widths import WidePrograms
from tests.conformance.bundles import evidence_for
from tests.conformance.compiling import compiling
from tests.conformance.graphs import random_placement

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class _Branches(nn.Module):
    """Convolutions in branches that are concatenated, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.left = nn.Conv2d(16, 16, 1)
        self.right = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.stem(x)))
        wide = torch.cat([functional.relu(self.left(y)), functional.relu(self.right(y)), functional.max_pool2d(y, 3, 1, 1)], 1)
        return self.head(wide.mean((2, 3)))


class _Mixture(nn.Module):
    """Embeddings with a factorisation term, attention, several results of one operator, views and scatters, containers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 16) for _ in range(4))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)

    def forward(self, ids: torch.Tensor, *, weights: torch.Tensor) -> dict[str, object]:
        fields = torch.stack([table(ids[:, place]) for place, table in enumerate(self.tables)], 1)
        crossed = 0.5 * (fields.sum(1) ** 2 - (fields**2).sum(1)).sum(1, keepdim=True)
        mixed = self.layer(fields)
        values, places = torch.topk(weights, 3, dim=1)
        scattered = torch.cumsum(weights, 1).scatter_add(1, places, values)
        first, second = torch.sort(weights, 1)[0].split(3, 1)
        return {
            "score": crossed,
            "mixed": mixed[:, 1:3],
            "picked": (values, places),
            "same": weights,
            "more": [scattered, first.t(), second],
        }


def _models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]:
    torch.manual_seed(5)
    branches, mixture = _Branches().eval(), _Mixture().eval()
    with torch.no_grad():
        branches.norm.running_mean.normal_()
        branches.norm.running_var.uniform_(0.5, 2.0)
    return {
        "branches": (branches, (torch.randn(2, 3, 16, 16),), {}),
        "mixture": (mixture, (torch.randint(0, 20, (4, 4)),), {"weights": torch.randn(4, 5)}),
    }


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiling(tmp_path_factory.mktemp("cache"), threads=1):
        yield


def _captured(name: str) -> tuple[nn.Module, Captured]:
    model, args, kwargs = _models()[name]
    found = capture_inductor(model, args, kwargs)
    assert not isinstance(found, Refused), found.reason
    return model, found


_BOUND: dict[str, BoundProgram] = {}


def _bound(found: Captured) -> BoundProgram:
    """Bound once for all tests: every binding compiles again."""
    if found.program.graph.hash not in _BOUND:
        _BOUND[found.program.graph.hash] = bind(found.program, found.constants)
    return _BOUND[found.program.graph.hash]


@pytest.fixture(scope="module")
def branches() -> tuple[nn.Module, Captured]:
    """The convolutional model, and what was captured of it."""
    return _captured("branches")


@pytest.fixture(scope="module", params=["branches", "mixture"])
def captured(request: pytest.FixtureRequest) -> tuple[nn.Module, Captured]:
    """A model, and what was captured of it."""
    found: tuple[nn.Module, Captured] = request.getfixturevalue("branches") if request.param == "branches" else _captured("mixture")
    return found


def test_it_computes_what_the_model_does(captured: tuple[nn.Module, Captured]) -> None:
    model, found = captured
    program = found.program
    check_program(program)
    assert program.lowering == "inductor"
    assert all(operator.calls[0].target.startswith("inductor::") for operator in program.graph.operators)
    bound = _bound(found)
    for seed in (1, 2):
        inputs = random_inputs(program, seed)
        args, kwargs = unflatten_inputs(program, inputs)
        with torch.no_grad():
            wanted = output_tensors(model(*args, **kwargs))
        got = output_tensors(unflatten_outputs(program, bound.run(inputs)))
        assert len(got) == len(wanted)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_any_legal_schedule_gives_the_same_bits(captured: tuple[nn.Module, Captured]) -> None:
    _, found = captured
    graph = found.program.graph
    bound = _bound(found)
    inputs = random_inputs(found.program, 4)
    wanted = bound.run(inputs)
    pool = LanePool()
    rng = random.Random(11)
    for _ in range(30):
        schedule = random_placement(rng, graph, 2, extra_edges=1)
        got = LaneExecutor(bound, make_plan(graph, schedule), pool).run(inputs)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_a_program_needs_the_same_code_here(captured: tuple[nn.Module, Captured], monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = captured
    travelled = decode_program(encode_program(found.program))
    inputs = random_inputs(travelled, 6)
    got, wanted = bind(travelled, found.constants).run(inputs), _bound(found).run(inputs)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    with pytest.raises(ArtifactCorrupt, match="compiled from"):
        bind(dataclasses.replace(travelled, source="{}"), found.constants)
    with pytest.raises(ArtifactCorrupt, match="compiled from"):
        bind(dataclasses.replace(travelled, bindings=travelled.bindings[:-1]), found.constants)
    here = Recording(found.program, _bound(found).kernels, {})
    monkeypatch.setattr(inductor_bind, "record", lambda *given, **options: here)
    operators = travelled.graph.operators
    first = dataclasses.replace(operators[0], calls=(dataclasses.replace(operators[0].calls[0], target="inductor::other.0"),))
    for graph in (
        dataclasses.replace(travelled.graph, operators=operators[:-1]),
        dataclasses.replace(travelled.graph, operators=(first, *operators[1:])),
        dataclasses.replace(travelled.graph, outputs=travelled.graph.outputs[::-1] + travelled.graph.inputs),
    ):
        with pytest.raises(IncompatibleArtifact, match="other code"):
            bind(dataclasses.replace(travelled, graph=graph), found.constants)


def test_costs_are_plausible(captured: tuple[nn.Module, Captured]) -> None:
    _, found = captured
    source = decode_program(found.program.source.encode())
    plain = sum(operator.flops for operator in source.graph.operators)
    assert 0.5 * plain <= sum(operator.flops for operator in found.program.graph.operators) <= 2 * plain
    assert all(operator.bytes_written > 0 for operator in found.program.graph.operators)
    values = found.program.graph.values
    assert all(operator.flops == estimated_flops(operator, values) for operator in found.program.graph.operators)
    for operator in found.program.graph.operators:
        if operator.name.startswith("_mkl_linear"):
            # MKL packs a weight of a kilobyte into megabytes, which nobody reads.
            given, _, weight = operator.reads[:3]
            assert operator.bytes_read == values[given].spec.bytes + values[weight].spec.bytes


def test_operators_of_two_widths_in_one_plan(branches: tuple[nn.Module, Captured]) -> None:
    _, found = branches
    programs = WidePrograms(found.program, found.constants)
    narrow, wide = programs.at(1), programs.at(2)
    assert torch.get_num_threads() == 1
    schedule = random_placement(random.Random(1), found.program.graph, 1)
    widths = tuple(1 + index % 2 for index in range(len(found.program.graph)))
    bound = programs.for_plan(make_plan(found.program.graph, dataclasses.replace(schedule, width=widths)))
    assert all(
        kernel is (narrow, wide)[width - 1].kernels[index] for index, (kernel, width) in enumerate(zip(bound.kernels, widths, strict=True))
    )
    inputs = random_inputs(found.program, 3)
    for mine, theirs in zip(bound.run(inputs), narrow.run(inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_what_a_process_has_switched_on_for_its_own_models_is_not_in_the_code(
    branches: tuple[nn.Module, Captured], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch._inductor.config as inductor_config

    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    _, found = branches
    with inductor_config.patch(max_autotune=True, max_autotune_gemm=True, coordinate_descent_tuning=True):
        bind(found.program, found.constants)


def test_what_inductor_cannot_do_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    model, args, kwargs = _models()["branches"]

    def explode(*given: object, **options: object) -> None:
        raise RuntimeError("no compiler today\nand a long trace")

    monkeypatch.setattr(inductor_compile, "_compile", explode)
    found = capture_inductor(model, args, kwargs)
    assert isinstance(found, Refused)
    assert found.reason.endswith("RuntimeError: no compiler today")


def test_reading_an_input_by_strides_of_the_models_own_is_a_reason() -> None:
    class Windows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.as_strided((4, 2), (1, 1)).sum(1)

    found = capture_inductor(Windows().eval(), (torch.randn(5),))
    assert isinstance(found, Refused)
    assert "as_strided" in found.reason


def test_circular_padding_which_begins_with_memory_that_nobody_has_written() -> None:
    model, x = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular").eval(), torch.randn(1, 2, 6, 6)
    found = capture_inductor(model, (x,))
    assert isinstance(found, Captured)
    bound = bind(found.program, found.constants)
    for fill in (float("nan"), 1e30):
        # Whatever lies in freed memory of that size.
        freed = [torch.full((1, 2, 8, 8), fill) for _ in range(8)]
        del freed
        with torch.no_grad():
            torch.testing.assert_close(bound.run([x])[0], model(x))


def test_an_output_that_is_dense_in_the_model_alone_is_made_dense() -> None:
    class Table(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            table = torch.arange(4.0).expand(2, 4)
            return x + 1, table, table + torch.zeros(2, 4)

    model, x = Table().eval(), torch.randn(2, 4)
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    got, wanted = load(_bundle(found, 2), model, strict=True)(x), model(x)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
    assert got[1].data_ptr() != got[2].data_ptr()


def test_what_is_written_back_dense_in_the_model_alone_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.copy_(torch.arange(4.0).expand(2, 4) + torch.zeros(2, 4))
            return x + self.kept

    # As where Inductor overwrites nothing itself.
    monkeypatch.setattr(inductor_capture, "forms_of", lambda source: (False,))
    found = capture_inductor(Kept().eval(), (torch.randn(2, 4),))
    assert isinstance(found, Refused)
    assert "expanded tensor" in found.reason


def test_launches_that_compute_something_else_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = _models()["branches"]
    original = inductor_bind.function_text

    def forgetful(unit: object, place: object) -> str:
        text = original(unit, place)  # type: ignore[arg-type]
        return text.replace("'relu'", "'none'")

    monkeypatch.setattr(inductor_bind, "function_text", forgetful)
    found = capture_inductor(model, args, kwargs)
    assert isinstance(found, Refused)
    assert "something else" in found.reason


def _bundle(found: Captured, lanes: int) -> bytes:
    graph, key = found.program.graph, cpu_device_key()
    schedule = random_placement(random.Random(2), graph, lanes)
    return encode_bundle(make_bundle(found.program, schedule, evidence_for(len(graph), key, graph.hash), {}, key, software_key()))


def test_a_bundle_loads_and_computes_what_the_model_does(branches: tuple[nn.Module, Captured]) -> None:
    _, found = branches
    # A model of its own: its weights change below.
    model, _, _ = _models()["branches"]
    loaded = load(_bundle(found, 2), model, strict=True)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)
        # Weights that change are folded and packed again.
        model.head.weight.mul_(2.0)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_bundle_without_a_compiler_runs_the_model_as_it_came(
    branches: tuple[nn.Module, Captured], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, found = branches
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))

    def explode(*given: object, **options: object) -> None:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr(inductor_compile, "_compile", explode)
    with pytest.warns(FallbackWarning, match="no compiler today"):
        loaded = load(_bundle(found, 1), model)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


class _Constants(nn.Module):
    """Returns what depends on its parameters alone, which Inductor computes once."""

    anchors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("anchors", torch.rand(6, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        anchors = self.anchors * 8
        return self.layer(x), self.scale.exp(), anchors, anchors[1:].t(), anchors.clone()


@pytest.mark.usefixtures("native")
def test_what_a_caller_writes_to_an_output_is_in_no_later_one() -> None:
    model, x = _Constants().eval(), torch.randn(2, 4)
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    bound = _bound(found)
    plan = make_plan(found.program.graph, random_placement(random.Random(3), found.program.graph, 1))
    assert LaneExecutor(bound, plan).engine is Engine.NATIVE
    loaded = load(_bundle(found, 1), model, strict=True)
    with torch.no_grad():
        wanted = model(x)
        for _ in range(2):
            got = loaded(x)
            assert len({output.data_ptr() for output in got}) == len(got)
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine, theirs)
                mine.mul_(3)


class _Given(nn.Module):
    """Returns its parameters as they are, and tensors of no elements, for which Inductor launches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        none = x[:0] * 2
        return self.layer(x) * self.scale, self.scale, self.layer.weight, none, none.t(), self.scale


def test_parameters_and_what_has_no_elements_may_be_returned() -> None:
    model, x = _Given().eval(), torch.randn(2, 4)
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    loaded = load(_bundle(found, 2), model, strict=True)
    with torch.no_grad():
        got, wanted = loaded(x), model(x)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()
        assert [item.data_ptr() for item in got[1:3]] == [item.data_ptr() for item in wanted[1:3]]
        model.scale.mul_(2.0)
        torch.testing.assert_close(loaded(x)[0], model(x)[0])


class _Turned(nn.Module):
    """Batch norm of a transposed tensor, which Inductor leaves transposed; returned alone, twice, and with what was made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = x.transpose(1, 2)
        normed, shared = self.norm(turned), self.other(turned)
        return normed, normed.relu(), shared, shared[:, 1:]


@pytest.mark.usefixtures("native")
def test_outputs_have_the_strides_that_the_models_have() -> None:
    model, x = _Turned().eval(), torch.randn(3, 6, 4)
    with torch.no_grad():
        wanted = model(x)
    assert wanted[0].is_contiguous()
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    plan = make_plan(found.program.graph, random_placement(random.Random(3), found.program.graph, 2))
    assert LaneExecutor(_bound(found), plan).engine is Engine.NATIVE
    got = load(_bundle(found, 2), model, strict=True)(x)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [item.stride() for item in got[:2]] == [item.stride() for item in wanted[:2]]
    assert got[3].data_ptr() - got[2].data_ptr() == 4 * got[2].stride(1)


class _Rows(nn.Module):
    """Returns windows of its parameters and of a buffer, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.rand(6, 4))
        self.register_buffer("mask", torch.rand(3, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.table[2:]
        return self.layer(x) @ rows.t(), rows, rows.t()[1:, ::2], self.layer.weight.view(-1), self.mask[:1].expand(5, 4), rows


@pytest.mark.usefixtures("native")
def test_views_of_parameters_may_be_returned() -> None:
    model, x = _Rows().eval(), torch.randn(2, 4)
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    plan = make_plan(found.program.graph, random_placement(random.Random(3), found.program.graph, 2))
    assert LaneExecutor(_bound(found), plan).engine is Engine.NATIVE
    loaded = load(_bundle(found, 2), model, strict=True)
    with torch.no_grad():
        for _ in range(2):
            got, wanted = loaded(x), model(x)
            for mine, theirs in zip(got, wanted, strict=True):
                torch.testing.assert_close(mine, theirs)
                assert mine.stride() == theirs.stride()
            assert [item.data_ptr() for item in got[1:]] == [item.data_ptr() for item in wanted[1:]]
            # Other weights in the place of these: other memory.
            model.table = nn.Parameter(torch.rand(6, 4))


def test_a_view_of_a_parameter_in_another_dtype_is_a_reason() -> None:
    class Bits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(6, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 2, self.table.view(torch.int32)

    found = capture_inductor(Bits().eval(), (torch.randn(2, 4),))
    assert isinstance(found, Refused)
    assert "view of a weight as another" in found.reason


class _Masked(nn.Module):
    """Multiplies by a mask that hides nothing, which Inductor leaves out."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * torch.ones(()), x.sin(), x[1:]


def test_a_tensor_of_the_callers_is_returned_only_where_the_model_returns_it() -> None:
    model, x = _Masked().eval(), torch.randn(2, 4)
    found = capture_inductor(model, (x,))
    assert not isinstance(found, Refused), found.reason
    loaded, before = load(_bundle(found, 2), model, strict=True), x.clone()
    with torch.no_grad():
        own, _, window = loaded(x)
        assert window.data_ptr() == x[1:].data_ptr()
        x.zero_()
    assert torch.equal(own, before)


class _Passing(nn.Module):
    """Returns what it is given beside a convolution, for whose layout Inductor copies what it returns of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 2, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.conv(x), x, mask


def test_what_is_returned_as_it_was_given_is_not_copied() -> None:
    model, x, mask = _Passing().eval(), torch.randn(1, 4, 8, 8), torch.ones(3)
    found = capture_inductor(model, (x, mask))
    assert not isinstance(found, Refused), found.reason
    graph = found.program.graph
    assert [leaf.value in graph.inputs for leaf in found.program.output_leaves if isinstance(leaf, Ref)] == [False, True, True]
    made = sum(graph.values[value].spec.elements for operator in graph.operators for value in operator.writes)
    with torch.no_grad():
        wanted = model(x, mask)
        # The packed input, the bias, and the result in both layouts.
        assert made < 2 * x.numel() + 2 * wanted[0].numel()
        got = load(_bundle(found, 2), model, strict=True)(x, mask)
    assert [item.data_ptr() for item in got[1:]] == [x.data_ptr(), mask.data_ptr()]
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)


def test_capture_leaves_it_to_those_who_may_compile() -> None:
    model, args, kwargs = _models()["branches"]
    with pytest.raises(UsageError, match="inductor_capture"):
        capture(model, args, kwargs, lowering=Lowering.INDUCTOR)


def test_the_model_has_one_key_in_every_lowering(branches: tuple[nn.Module, Captured]) -> None:
    _, found = branches
    model, args, kwargs = _models()["branches"]
    assert found.structure == capture(model, args, kwargs).structure != ""


def test_code_that_differs_between_widths_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.pipeline import inductor_capture as inductor

    model, args, kwargs = _models()["branches"]
    real = inductor.record
    seen: list[int] = []

    def recorded(*given: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        found = real(*given, **options)  # type: ignore[arg-type]
        if len(seen) == 2:
            assert not isinstance(found, Refused)
            graph = dataclasses.replace(found.program.graph, operators=found.program.graph.operators[:-1])
            return dataclasses.replace(found, program=dataclasses.replace(found.program, graph=graph))
        return found

    monkeypatch.setattr(inductor, "record", recorded)
    torch.set_num_threads(2)
    try:
        found = capture_inductor(model, args, kwargs)
    finally:
        torch.set_num_threads(1)
    assert seen == [2, 1]
    assert isinstance(found, Refused)
    assert "for 2 threads than for one" in found.reason
