"""Capture without rewriting: one operator for each ATen call, run against eager."""

from pathlib import Path

import pytest
import torch
from torch import nn

from autosched.capture.draft import Draft
from autosched.capture.export import Captured, capture
from autosched.capture.passes.onednn import adds_to_one_pixel
from autosched.core.errors import UnsupportedGraph
from autosched.core.program import ConstantSource, NonFinite, Ref
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind, gather_constants
from autosched.runtime.state import state_of
from autosched.runtime.trees import describe_tree, flatten_inputs
from tests.conformance.apply import Apply


def operator(captured: Captured, target: str):
    found = [item for item in captured.program.graph.operators if any(call.target.startswith(target) for call in item.calls)]
    assert found, f"no operator calls {target}"
    return found[0]


class Mixed(nn.Module):
    """Tied weights, a mutated buffer, a lifted constant, views, multiple outputs, an unused output, an infinite argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.zeros(1))

    def forward(self, image, options):
        mixed = torch.relu(self.norm(self.conv(image)))
        low, high = mixed.split(4, 1)
        self.count.add_(1)
        joined = torch.cat([high, low], 1) + torch.tensor([1.0])
        best, _ = joined.max(1)
        pooled = joined.mean((2, 3)).masked_fill(joined.mean((2, 3)) > 5, float("-inf"))
        return {"sum": self.first(pooled) + self.second(pooled), "best": best, "scale": options["scale"], "view": mixed.permute(0, 2, 3, 1)}


@pytest.fixture(scope="module")
def mixed():
    torch.manual_seed(0)
    model = Mixed().eval()
    args = (torch.randn(2, 3, 8, 8), {"scale": 2.0})
    return model, args, capture(model, args, rewrite=False)


def test_outputs_equal_eager_bit_for_bit(mixed):
    model, args, captured = mixed
    inputs = [*flatten_inputs(captured.program, args), *state_of(captured.program, model)]
    outputs = bind(captured.program, captured.constants).run(inputs)
    with torch.no_grad():
        expected = model(*args)
    for output, wanted in zip(outputs, (expected["sum"], expected["best"], expected["view"], model.count), strict=True):
        assert torch.equal(output, wanted)
    assert outputs[2].stride() == expected["view"].stride()


def test_leaves_hold_tensors_and_literals(mixed):
    _, _, captured = mixed
    program = captured.program
    assert isinstance(program.input_leaves[0], Ref)
    assert program.input_leaves[1] == 2.0
    assert sorted(type(leaf).__name__ for leaf in program.output_leaves) == ["Ref", "Ref", "Ref", "float"]
    assert program.lowering == "aten"
    assert captured.rewrites == ()


def test_constants_keep_the_names_of_the_model(mixed):
    model, _, captured = mixed
    sources = {binding.name: binding.source for binding in captured.program.bindings}
    assert sources["conv.weight"] is ConstantSource.PARAMETER
    assert sources["norm.running_mean"] is ConstantSource.BUFFER
    assert ConstantSource.LITERAL in sources.values()
    # Tied weights are one constant, under a name the model knows.
    assert len({"first.weight", "second.weight"} & set(sources)) == 1
    literals = {item.name: captured.constants[item.value] for item in captured.program.bindings if item.source is ConstantSource.LITERAL}
    again = gather_constants(captured.program, model, literals)
    assert all(again[value].data_ptr() == tensor.data_ptr() for value, tensor in captured.constants.items())


def test_views_share_the_storage_of_what_they_show(mixed):
    graph = mixed[2].program.graph
    split = operator(mixed[2], "aten::split")
    owner = graph.values[operator(mixed[2], "aten::relu").writes[0]].index
    assert [graph.values[value].storage for value in split.writes] == [owner, owner]
    assert split.bytes_read == 0
    assert split.flops == 0


def test_a_buffer_that_is_updated_is_an_input_and_an_output_of_a_graph_that_changes_nothing(mixed):
    program = mixed[2].program
    [state], [write] = program.state, program.writes
    assert (state.source, state.name) == (ConstantSource.BUFFER, "count")
    assert (*program.given, state.value) == program.graph.inputs
    assert write.target == state.value
    assert operator(mixed[2], "aten::add.Tensor").writes == (write.value,)
    assert write.value in program.graph.outputs
    assert not any(item.mutates for item in program.graph.operators)
    assert "count" not in {binding.name for binding in program.bindings}


def test_capturing_leaves_the_model_as_it_was():
    model = Mixed().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, (torch.randn(2, 3, 8, 8), {"scale": 2.0}), rewrite=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
def test_what_depends_on_a_buffer_that_changes_is_never_computed_ahead(lowering):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            made = x @ (self.weight * self.scale)
            self.scale.add_(1)
            return made

    program = capture(Scaled().eval(), (torch.randn(2, 4),), lowering=lowering).program
    assert not any(program.state[0].value in call.reads() for call in program.prologue)
    assert any("mul" in call.target for item in program.graph.operators for call in item.calls)


def test_memory_that_is_changed_under_one_of_two_names_is_refused():
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(2, 4)
            self.register_buffer("whole", whole)
            self.register_buffer("first", whole[0])
            self.register_buffer("other", torch.zeros(4))

        def forward(self, x):
            self.first.add_(x)
            self.other.add_(x)
            return self.first + x

    with pytest.raises(UnsupportedGraph, match="memory that it knows by two names"):
        capture(Halves(), (torch.ones(4),))


def test_an_input_changed_in_place_is_written_back():
    class Changes(nn.Module):
        def forward(self, x, y):
            y[1:].add_(x[1:])
            return y * 2

    program = capture(Changes(), (torch.ones(4), torch.ones(4))).program
    assert program.state == ()
    assert [item.target for item in program.writes] == [program.given[1]]
    assert not any(item.mutates for item in program.graph.operators)


def test_unused_results_and_non_finite_arguments(mixed):
    maximum = operator(mixed[2], "aten::max.dim").calls[0]
    assert maximum.outputs[1] == -1
    assert NonFinite("-inf") in operator(mixed[2], "aten::masked_fill").calls[0].args


def test_flops_and_bytes_of_a_convolution_and_a_product(mixed):
    convolution = operator(mixed[2], "aten::conv2d")
    assert convolution.flops == 2 * (2 * 8 * 8 * 8) * (3 * 3 * 3)
    assert convolution.bytes_read == 4 * (2 * 3 * 8 * 8 + 8 * 3 * 3 * 3 + 8)
    assert convolution.bytes_written == 4 * 2 * 8 * 8 * 8
    assert operator(mixed[2], "aten::linear").flops == 2 * 2 * 8 * 4


def test_sources_name_the_line_of_the_model(mixed):
    file, _, line = operator(mixed[2], "aten::cat").source.rpartition(":")
    assert file.endswith("test_export.py")
    assert not file.startswith("/")
    assert "torch.cat" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_the_hash_depends_on_the_computation_only():
    torch.manual_seed(0)
    args = (torch.randn(2, 3, 8, 8), {"scale": 2.0})
    hashes = {capture(Mixed().eval(), args, rewrite=rewrite).program.graph.hash for rewrite in (False, False, True)}
    assert len(hashes) == 2


def test_keyword_arguments_keep_the_order_of_the_caller():
    class Keywords(nn.Module):
        def forward(self, first, *, left, right):
            return first + 2 * left - right

    kwargs = {"right": torch.randn(3), "left": torch.randn(3)}
    args = (torch.randn(3),)
    captured = capture(Keywords(), args, kwargs)
    inputs = flatten_inputs(captured.program, args, kwargs)
    output = bind(captured.program, captured.constants).run(inputs)[0]
    assert torch.allclose(output, args[0] + 2 * kwargs["left"] - kwargs["right"])


def test_inputs_and_parameters_may_be_outputs():
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, value):
            return value, value.view(2, 2), self.weight, None, 3

    model = Passes()
    value = torch.randn(4)
    for rewrite in (False, True):
        captured = capture(model, (value,), rewrite=rewrite)
        outputs = bind(captured.program, captured.constants).run([value])
        assert torch.equal(outputs[1].flatten(), value)
        assert outputs[2].data_ptr() == model.weight.data_ptr()
        assert captured.program.output_leaves[3:] == (None, 3)


def test_integer_inputs_keep_their_range():
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 4)

        def forward(self, index):
            return self.table(index)

    captured = capture(Picks().eval(), (torch.tensor([3, 7]),))
    assert (captured.program.inputs[0].low, captured.program.inputs[0].high) == (3, 7)
    # Two rows of the table are read, not all of it.
    assert captured.program.graph.operators[0].bytes_read == 2 * 4 * 4 + 2 * 8


def test_python_operators_get_names_a_schedule_may_use():
    class Logic(nn.Module):
        def forward(self, a, b):
            return (a > 0) & (b > 0), (a > 0) | (b > 0)

    captured = capture(Logic(), (torch.randn(3), torch.randn(3)), rewrite=False)
    assert all(not call.target.startswith("aten::__") for item in captured.program.graph.operators for call in item.calls)


def test_reads_before_an_update_see_what_was_there_before():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4))

        def forward(self, value):
            old = self.state * 2
            self.state.copy_(value)
            return old

    model = Counts()
    captured = capture(model, (torch.ones(4),))
    bound = bind(captured.program, captured.constants)
    old, written = bound.run([torch.ones(4), torch.full((4,), 3.0)])
    assert torch.equal(old, torch.full((4,), 6.0))
    assert torch.equal(written, torch.ones(4))
    assert torch.equal(model.state, torch.zeros(4))


def test_a_view_that_the_real_layout_does_not_allow_is_a_copy(monkeypatch):
    """As where a kernel gives another layout than export guessed."""

    class Flattens(nn.Module):
        def forward(self, x):
            return (x * 2).view(-1)

    real, calls = Draft.observe, []

    def observe(draft, **options):
        calls.append([node.kind for node in draft.nodes])
        if "aten::view" in calls[-1]:
            raise RuntimeError("view size is not compatible with input tensor's size and stride")
        return real(draft, **options)

    monkeypatch.setattr(Draft, "observe", observe)
    x = torch.randn(2, 3)
    captured = capture(Flattens(), (x,), rewrite=False)
    assert torch.equal(bind(captured.program, captured.constants).run([x])[0], (x * 2).view(-1))
    assert "aten::reshape" in calls[1]


@pytest.mark.parametrize("name", ["_int_mm", "_weight_int8pack_mm"])
def test_a_product_of_integers_counts_as_one_of_floats_does(name):
    class Product(nn.Module):
        def forward(self, x, weight, scale):
            if name == "_int_mm":
                return torch._int_mm(x.to(torch.int8), weight.t())
            return torch.ops.aten._weight_int8pack_mm(x, weight, scale)

    given = (torch.randn(8, 64, dtype=torch.bfloat16), torch.randint(-9, 9, (32, 64), dtype=torch.int8), torch.rand(32).bfloat16())
    operators = capture(Product(), given, rewrite=False).program.graph.operators
    assert [operator.flops for operator in operators if operator.kind == f"aten::{name}"] == [2 * 8 * 64 * 32]


@pytest.mark.parametrize("residual", [False, True])
def test_a_packed_convolution_whose_weight_has_the_shape_of_its_output_is_counted(residual):
    convolution = nn.Conv2d(4, 4, 1)
    model = Apply(lambda m, x, y: m.convolution(x) + y if residual else m.convolution(x), convolution=convolution)
    # Four pictures of one pixel in four channels.
    given = (torch.randn(4, 4, 1, 1), torch.randn(4, 4, 1, 1))
    operators = capture(model.eval(), given, rewrite=True).program.graph.operators
    assert "mkldnn::_convolution_pointwise" in {call.target.partition(".")[0] for item in operators for call in item.calls}
    # An addition that is not fused counts, too.
    assert sum(operator.flops for operator in operators) == 2 * 16 * 4 + (16 if residual and not adds_to_one_pixel() else 0)


class RawData(nn.Module):
    """Reads and writes by way of ``tensor.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.data.add_(1)
        return x @ self.layer.weight.data + self.calls, (x * 2).data


def test_what_is_read_and_written_as_data_is_captured():
    model = RawData().eval()
    x = torch.randn(2, 4)
    captured = capture(model, (x,), rewrite=False)
    made = bind(captured.program, captured.constants).run([x, torch.full((1,), 5.0)])
    assert torch.allclose(made[0], x @ model.layer.weight + 6)
    assert torch.equal(made[1], x * 2)
    assert len(captured.program.writes) == 1
    assert model.calls.item() == 0
    # The lines are the model's own.
    assert all(Path(item.source.rpartition(":")[0]).name == Path(__file__).name for item in captured.program.graph.operators)


@pytest.mark.parametrize("answer", [lambda y: {"b": y, "a": [y + 1]}, lambda y: [y, {"k": y * 2}, 3]])
def test_a_traced_model_returns_the_containers_that_its_code_spells(answer):
    """As torchvision's feature extractors are: export holds the containers of such a graph in classes of its own."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return answer(x.sin())

    traced, x = torch.fx.symbolic_trace(Net().eval()), torch.randn(2, 4)
    for model in (traced, torch.export.export(traced, (x,)).module()):
        assert capture(model, (x,)).program.output_tree == describe_tree(model(x))[1]
