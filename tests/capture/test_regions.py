"""The lowering fused: every call in exactly one region, no cycle, branches apart, and the same numbers as the model."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autosched import zoo
from autosched.capture.build import build_program
from autosched.capture.draft import Draft
from autosched.capture.export import capture, draft_of
from autosched.capture.merging import Merging
from autosched.capture.rewrite import rewrite_draft
from autosched.core.graph import OpGraph
from autosched.core.variants import Lowering, Variant
from autosched.runtime.regions.pieces import pieces_of, variants_of
from tests.conformance.apply import Apply
from tests.conformance.oracles import region_faults
from tests.conformance.programs import assert_computes

OWN = [entry.name for entry in zoo.names() if entry.name.startswith("autosched:") and entry.name != "autosched:randwire"]
DEEPER = ("torchvision:densenet201",)  # the blocks of densenet121, more of them: PyTorch takes longer to export it, nothing else differs
OTHERS = [entry.name for entry in zoo.names() if not entry.name.startswith("autosched:") and entry.name not in DEEPER]


def partition(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None, target: str = "") -> Draft:
    draft = draft_of(model, args, kwargs)
    rewrite_draft(draft, target, Lowering.FUSED)
    return draft


def assert_legal(draft: Draft) -> OpGraph:
    """The partition itself, and that nothing a compiler may have touches memory it does not own."""
    assert draft.regions is not None
    assert region_faults(draft, draft.regions) == []
    program, _ = build_program(draft, "fused")
    graph = program.graph
    for operator in graph.operators:
        working = [call for call in operator.calls if any(v >= 0 and graph.values[v].storage == v for v in call.outputs)]
        if operator.mutates:
            assert len(working) <= 1
        for kind in ("cpu", "cuda"):
            if len(variants_of(operator, graph, kind)) > 1:
                given = {graph.values[value].storage for value in operator.reads}
                assert all(graph.values[value].storage not in given for value in operator.writes)
        for piece in pieces_of(operator, graph):
            made = {value for call in piece.calls for value in call.outputs}
            assert set(piece.writes) <= made
            assert not set(piece.reads) & made
    return graph


def check(model: nn.Module, *inputs: torch.Tensor) -> OpGraph:
    draft = partition(model.eval(), inputs)
    program, constants = build_program(draft, "fused")
    program.graph.validate()
    assert_computes(program, constants, model, inputs)
    graph = assert_legal(draft)
    assert graph == program.graph
    return graph


def kinds(graph: OpGraph) -> list[list[str]]:
    return [[call.target.partition("::")[2].partition(".")[0] for call in operator.calls] for operator in graph.operators]


@pytest.mark.parametrize(("name", "target"), [(name, ("cpu", "cuda")[place % 2]) for place, name in enumerate(OWN)])
def test_the_partition_of_a_zoo_model_is_legal(name: str, target: str) -> None:
    made = zoo.load(name)
    graph = assert_legal(partition(made.model, made.args, made.kwargs, target))
    assert any(len(operator.calls) > 1 for operator in graph.operators)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_partition_of_every_other_zoo_model_is_legal(name: str) -> None:
    pytest.importorskip(name.partition(":")[0]) if not name.startswith("torchvision") else None
    made = zoo.load(name)
    assert_legal(partition(made.model, made.args, made.kwargs))


def test_a_normalisation_and_an_activation_written_out_become_one_region() -> None:
    def run(m, x):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        return scaled * torch.sigmoid(scaled)

    model, inputs = Apply(run), torch.randn(64, 512)
    graph = check(model, inputs)
    assert len(graph) == 1
    assert variants_of(graph.operators[0], graph, "cpu") == (Variant.CALLS, Variant.COMPILED)
    captured = capture(model, (inputs,), lowering=Lowering.FUSED)
    assert captured.program.lowering == "fused"
    assert captured.program.graph.hash == graph.hash


def test_lengths_slopes_and_parts_written_into_a_tensor_are_loops_of_one_region() -> None:
    def run(m, x):
        unit = nn.functional.prelu(nn.functional.normalize(x, dim=-1), m.slope.weight)
        made = torch.slice_scatter(torch.concat([unit, x + 1], 1), unit * 2, 1, 0, 16)
        return made * 3

    graph = check(Apply(run, slope=nn.PReLU(16)), torch.randn(4, 16))
    assert len(graph.operators) == 1


def test_an_epilogue_with_a_residual_joins_its_product_and_two_products_stay_two() -> None:
    def run(m, x):
        return torch.relu(m.b(torch.relu(m.a(x))) + x) * 2.0

    graph = check(Apply(run, a=nn.Linear(256, 256), b=nn.Linear(256, 256)), torch.randn(128, 256))
    assert kinds(graph) == [["linear", "relu"], ["linear", "add", "relu", "mul"]]


def test_branches_that_could_run_at_the_same_time_stay_apart() -> None:
    def run(m, x):
        return torch.cat([torch.exp(torch.sin(x[0])).cumsum(0), torch.exp(torch.cos(x[1])).cumsum(0)])

    graph = check(Apply(run), torch.randn(2, 512, 512))
    clusters = [operator for operator in graph.operators if "exp" in " ".join(call.target for call in operator.calls)]
    assert len(clusters) == 2
    assert graph.independent(clusters[0].index, clusters[1].index)


def test_all_starts_are_not_found_again_for_each_region_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    def merges_and_orders(rungs: int) -> tuple[int, int]:
        def run(m, x):
            left, right = x, x + 1.0
            for _ in range(rungs):
                left, right = m.a(left), m.b(right)
                left, right = left + right, left * right
            return left, right

        draft = draft_of(Apply(run, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval(), (torch.randn(1, 8),))
        calls: list[str] = []
        merge, topological = Merging.merge, Merging._topological
        with monkeypatch.context() as patch:
            patch.setattr(Merging, "merge", lambda *args: (calls.append("merge"), merge(*args))[1])
            patch.setattr(Merging, "_topological", lambda *args: (calls.append("order"), topological(*args))[1])
            rewrite_draft(draft, "", Lowering.FUSED)
        assert_legal(draft)
        return calls.count("merge"), calls.count("order")

    (few, orders), (many, orders_of_many) = merges_and_orders(4), merges_and_orders(16)
    assert many > 3 * few
    assert orders_of_many == orders


def test_small_lookups_become_one_region_and_launch_once() -> None:
    def run(m, x):
        return torch.cat([m.table(x[:, index]) for index in range(12)], dim=1)

    graph = check(Apply(run, table=nn.Embedding(50, 8)), torch.randint(0, 50, (2, 12)))
    assert len(graph) == 1


def test_a_region_reads_a_buffer_and_gives_what_it_becomes() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x):
            before = self.seen * 2.0
            self.seen.add_(x.sum(0))
            return before + self.seen

    draft = partition(Counter().eval(), (torch.randn(4, 8),))
    graph = assert_legal(draft)
    [(state, written)] = draft.writes
    assert state in draft.state
    assert written in draft.output_values()
    assert not any(operator.mutates for operator in graph.operators)
    [region] = graph.operators
    assert Variant.COMPILED in variants_of(region, graph, "cpu")


def test_packed_weights_stay_the_librarys_and_the_rest_of_the_region_is_compiled() -> None:
    def run(m, x):
        made = m.conv(x)
        return torch.sigmoid(made) * 3.0 - torch.tanh(made)

    draft = partition(Apply(run, conv=nn.Conv2d(8, 8, 3)).eval(), (torch.randn(1, 8, 16, 16),))
    graph = assert_legal(draft)
    region = next(operator for operator in graph.operators if "conv" in operator.kind)
    pieces = pieces_of(region, graph)
    assert [piece.compiled for piece in pieces] == [False, True]
    assert pieces[0].writes == tuple(value for value in pieces[1].reads if value in pieces[0].writes)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_random_models_compute_the_same_in_regions(seed: int) -> None:
    check(Apply(_random(seed), a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.randn(8, 8), torch.randn(8, 8))


def _random(seed: int):
    """A random graph of pointwise calls, reductions, views and products on 8 x 8 tensors."""
    steps = [
        lambda m, a, b: a + b,
        lambda m, a, b: torch.relu(a) * 0.5,
        lambda m, a, b: a - b.mean(0, keepdim=True),
        lambda m, a, b: torch.softmax(a, 1),
        lambda m, a, b: m.a(a),
        lambda m, a, b: m.b(b).t(),
        lambda m, a, b: torch.cat([a[:4], b[4:]]),
        lambda m, a, b: (a @ b) * 0.1,
        lambda m, a, b: torch.nn.functional.layer_norm(a, (8,)),
    ]

    def run(m, x, y):
        rng = random.Random(seed)
        made = [x, y]
        for _ in range(12):
            made.append(rng.choice(steps)(m, rng.choice(made), rng.choice(made)))
        return made[-1], made[-2] * 2.0

    return run


def test_on_a_gpu_a_product_of_one_row_is_the_librarys_wherever_the_model_lies() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(6, 40, 32))

        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(torch.bmm(x[:, None], self.weights[chosen].transpose(1, 2)))

    def of(target: str) -> list[list[str]]:
        return kinds(assert_legal(partition(Looked().eval(), (torch.randn(2, 32), torch.tensor([4, 1])), None, target)))

    assert [{"index", "bmm"} <= set(calls) for calls in of("cpu")] == [True, False]
    assert [{"bmm", "gelu"} <= set(calls) for calls in of("cuda")] == [False, True]
