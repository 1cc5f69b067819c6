"""Graphs that are made functional without tracing again are what PyTorch's own way makes of them, or are left to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import export
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from autosched.capture.build import build_program
from autosched.capture.export import capture
from autosched.capture.export_reader import ExportReader
from autosched.capture.functional import make_functional
from autosched.core.program import Program
from autosched.runtime.kernels import bind
from autosched.runtime.trees import output_tensors, packed_outputs

aten = torch.ops.aten
# From PyTorch 2.15 on, export knows what contiguous() leaves as it is, and nothing copies what goes through dropout that is switched off.
TOLD = torch.__version__ >= (2, 15)


class Of(nn.Module):
    """A model of one function, with two parameters and a buffer."""

    seen: torch.Tensor

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(self, *inputs)


def exported(model: nn.Module, *inputs: torch.Tensor) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return export(model.eval(), inputs, strict=False)


def program(graph: torch.export.ExportedProgram, model: nn.Module, *inputs: torch.Tensor) -> Program:
    draft = ExportReader(graph, model).read(inputs, {})
    draft.remove_dead()
    draft.observe()
    return build_program(draft, "aten")[0]


def residual(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = functional.relu(x @ model.weight, inplace=True)
    y += x
    y *= 2
    return functional.hardtanh(y, 0.0, 6.0, inplace=True)


def rows_added(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    y += model.bias
    best, _ = y.max(1)
    return best.div_(3, rounding_mode="floor")


def views_between(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    z = y.view(2, 2, 4).transpose(0, 1).reshape(4, 4) + y.unflatten(1, (2, 2)).flatten(1)
    return z.relu_().t().contiguous().t().contiguous().reshape(-1, 2).t().reshape(-1, 4)


def whole_numbers(model: Of, x: torch.Tensor) -> torch.Tensor:
    index = torch.arange(4, device=x.device).clone()
    index += 1
    index.mul_(2).clamp_(max=3)
    return x[index].masked_fill_(x > 0, 1.5)


def other_dtypes(model: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = x.to(torch.float16)
    return half.to(x.dtype), x.to(x.dtype) + 1, x.to("cpu", torch.float64), half.to(device="cpu", dtype=torch.float16) * 2, x.to("cpu") - 1


def sizes_of_others(model: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = x.chunk(2, 1)
    rows = torch.broadcast_to(model.bias, (4, 4)).reshape_as(x)
    return model.bias.expand_as(x) + x, first * second, torch.cat(x.chunk(3)), rows * 2, model.weight.T + x


def returned(model: Of, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ model.weight
    return functional.dropout(x, 0.5, False), y.flatten(0, 0), y.reshape(16), x.contiguous(), torch.tensor([1.0, 2.0]), x.detach()


def dropped(model: Of, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(functional.dropout(x + 1, 0.5, False), 0.5, False, True) * 2


def in_half(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = (x @ model.weight).bfloat16()
    y += 0.5
    return y.add_(y.t().contiguous().t().contiguous()).relu_()


@pytest.mark.parametrize(
    "function",
    [residual, rows_added, views_between, whole_numbers, other_dtypes, sizes_of_others, *([] if TOLD else [returned]), dropped, in_half],
    ids=lambda item: item.__name__,
)
def test_what_is_made_is_what_pytorch_makes(function: Callable[..., object]) -> None:
    model, x = Of(function), torch.randn(4, 4)
    fast, slow = exported(model, x), exported(model, x).run_decompositions({})
    assert make_functional(fast.graph)
    fast.graph.lint()
    made, expected = program(fast, model, x), program(slow, model, x)
    assert not any(call.target.split(".")[0].endswith("_") for operator in made.graph.operators for call in operator.calls)
    assert made.graph.hash == expected.graph.hash
    assert made.output_leaves == expected.output_leaves


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d(4), (3, 4)), (nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3))])
def test_batch_norms_are_those_of_inference(norm: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = nn.Sequential(norm, nn.ReLU(inplace=True)), torch.randn(shape)
    fast, slow = exported(model, x), exported(model, x).run_decompositions({})
    assert make_functional(fast.graph)
    assert program(fast, model, x).graph.hash == program(slow, model, x).graph.hash


def read_later(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    view = y.view(16)
    y += 1
    return view * 2


def a_part(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    y[0] += 1
    return y


def the_input(model: Of, x: torch.Tensor) -> torch.Tensor:
    return x.flatten().add_(1)


def the_buffer(model: Of, x: torch.Tensor) -> torch.Tensor:
    model.seen += x.sum(0)
    return model.seen * 2


def through_what_may_copy(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    same = functional.dropout(y, 0.5, False).contiguous().to(torch.float32)
    same.relu_()
    return y * 2


def part_of_a_list(model: Of, x: torch.Tensor) -> torch.Tensor:
    first, second = (x + 1).chunk(2)
    first.add_(second)
    return torch.cat([first, second])


def wider(model: Of, x: torch.Tensor) -> torch.Tensor:
    return (x + 1).half().add_(x)


def with_gaps(model: Of, x: torch.Tensor) -> torch.Tensor:
    return (x + 1)[:, ::2].add_(1.0)


def laid_out_otherwise(model: Of, x: torch.Tensor) -> torch.Tensor:
    return (x + 1).add_((x * 2).t())


def copied_into(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y.copy_(x)
    return y + 1


def real_part(model: Of, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(x).real + 1


def without_gradients(model: Of, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * 2


def as_many_as_there_are(model: Of, x: torch.Tensor) -> torch.Tensor:
    return functional.instance_norm(x.view(1, 4, 4)) + functional.batch_norm(x, model.seen, model.seen + 1, training=True)


def hidden_view(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    view = torch.einsum("ij->ji", y)
    y += 1
    return view * 2


def part_of_a_hidden_view(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    torch.meshgrid(y[0], indexing="ij")[0].mul_(3)
    return torch.einsum("ij->i", y)


def one_of_two(model: Of, x: torch.Tensor) -> torch.Tensor:
    return x.reshape_as(x @ model.weight).add_(1)


def of_the_type_it_had(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    same = y.type_as(x)
    y += 1
    return same * 2


def through_what_drops_nothing(model: Of, x: torch.Tensor) -> torch.Tensor:
    y = x @ model.weight
    same = functional.alpha_dropout(y, 0.5, False)
    y += 1
    return same * 2


def unmarked_changes(model: Of, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = torch.native_batch_norm(x, None, None, model.seen, model.seen, True, 0.1, 1e-5)[0]
    return normed


def a_copy(model: Of, x: torch.Tensor) -> torch.Tensor:
    return x.to(x.dtype, copy=True)


def dropped_at_random(model: Of, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, True)


def turned(model: Of, x: torch.Tensor) -> torch.Tensor:
    return x.movedim(0, 1) * 2


def turned_by_a_sum(model: Of, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij->ji", x) * 2


def sparse(model: Of, x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse() @ x


NOT_PLAIN = [
    read_later, a_part, the_input, the_buffer, part_of_a_list, wider, with_gaps, laid_out_otherwise, copied_into, real_part,
    without_gradients, as_many_as_there_are, hidden_view, part_of_a_hidden_view, one_of_two, of_the_type_it_had,
    through_what_drops_nothing, unmarked_changes, a_copy, dropped_at_random, turned, turned_by_a_sum, sparse,
    *([] if TOLD else [through_what_may_copy]),
]  # fmt: skip


@pytest.mark.parametrize("function", NOT_PLAIN, ids=lambda item: item.__name__)
def test_what_is_not_plain_is_left_as_it_is(function: Callable[..., object]) -> None:
    graph = exported(Of(function), torch.randn(4, 4)).graph
    before = str(graph)
    assert not make_functional(graph)
    assert str(graph) == before


def returned_twice(model: Of, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ model.weight
    same = functional.dropout(functional.dropout(y, 0.5, False), 0.0, True)
    y[0] += 1
    return y, same


@pytest.mark.parametrize(
    "function", [hidden_view, part_of_a_hidden_view, through_what_may_copy, returned_twice], ids=lambda item: item.__name__
)
def test_what_is_written_is_seen_through_what_hides_that_it_is_no_copy(function: Callable[..., object]) -> None:
    model, x = Of(function).eval(), torch.randn(4, 4)
    captured = capture(model, (x,), rewrite=False)
    bound = bind(captured.program, captured.constants)
    with torch.no_grad():
        expected = model(x)
    for made, wanted in zip(output_tensors(packed_outputs(captured.program, bound.run([x]))), tree_leaves(expected), strict=True):
        torch.testing.assert_close(made.clone(), wanted)


# What shares memory with a matrix, by operators that say so and by such as do not.
SHARING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as_strided": lambda y: y.as_strided((2, 2), (1, 2)),
    "atleast_3d": lambda y: torch.atleast_3d([y])[0],
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, torch.zeros(2, 1, 1))[0],
    "chunk": lambda y: y.chunk(2, -1)[1],
    "contiguous": lambda y: y.contiguous(),
    "detach": lambda y: y.detach(),
    "diagonal": lambda y: y.diagonal(),
    "dropout": lambda y: functional.dropout(y, 0.5, False),
    "dropout2d": lambda y: functional.dropout2d(y[:, :, None, None], 0.5, False),
    "alpha_dropout": lambda y: functional.alpha_dropout(y, 0.5, False),
    "einsum": lambda y: torch.einsum("ii->i", y),
    "expand": lambda y: y.expand(2, 4, 4),
    "flatten": lambda y: y.flatten(),
    "float": lambda y: y.float(),
    "meshgrid": lambda y: torch.meshgrid(y[0], y[1], indexing="ij")[0],
    "movedim": lambda y: y.movedim(0, 1),
    "ravel": lambda y: y.ravel(),
    "real": lambda y: torch.view_as_real(torch.view_as_complex(y.unflatten(1, (2, 2)))),
    "reshape": lambda y: y.t().reshape(4, 2, 2),
    "split": lambda y: y.split([1, 3], 1)[1],
    "squeeze": lambda y: y[:, :1].squeeze(1),
    "sum_to_size": lambda y: y.sum_to_size(4, 4),
    "tensor_split": lambda y: y.tensor_split(3)[1],
    "type_as": lambda y: y.type_as(torch.zeros(1)),
    "unbind": lambda y: y.unbind(1)[2],
    "unfold": lambda y: y.unfold(0, 2, 1),
    "view_as": lambda y: y.view_as(torch.zeros(16)),
}


@pytest.mark.parametrize("written", ["owner", "sharer"])
def test_whatever_shares_memory_sees_what_is_written_to_it(written: str) -> None:
    def write(model: Of, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for name, share in SHARING.items():
            owner = x @ model.weight
            sharer = share(owner)
            # Of what is expanded nothing may be written in place.
            (owner if written == "owner" or 0 in sharer.stride() or name == "unfold" else sharer).mul_(2.0)
            found[name] = owner, sharer
        return found

    model, x = Of(write).eval(), torch.randn(4, 4)
    captured = capture(model, (x,), rewrite=False)
    answer = packed_outputs(captured.program, bind(captured.program, captured.constants).run([x]))
    with torch.no_grad():
        expected = model(x)
    assert isinstance(expected, dict)
    made = dict(zip(expected, zip(*[iter(output_tensors(answer))] * 2, strict=True), strict=True))
    apart = [name for name in expected if not all(map(torch.equal, (item.clone() for item in made[name]), expected[name]))]
    assert apart == []


@pytest.mark.parametrize("expanded", [
    lambda y: y.expand(1, 4, 4), lambda y: y.expand(-1, -1), lambda y: y.t().expand_as(y), lambda y: torch.broadcast_to(y, (1, 1, 4, 4))[0],
])  # fmt: skip
def test_what_is_written_through_an_expansion_that_repeats_nothing_is_what_was_written(
    expanded: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def write(model: Of, x: torch.Tensor) -> torch.Tensor:
        expanded(x)[..., 1:].fill_(0.3)
        return x * 1

    x = torch.randn(4, 4)
    x[0], x[1, :2] = float("-inf"), 1e9
    captured = capture(Of(write).eval(), (x.clone(),), rewrite=False)
    bound = bind(captured.program, captured.constants)
    made = bound.run([x.clone()])
    with torch.no_grad():
        expected = write(Of(write), x)
    assert [torch.equal(item, expected) for item in made] == [True, True]


def test_the_type_that_it_had_is_no_operator() -> None:
    graph = exported(Of(lambda model, x: (x @ model.weight).type_as(model.bias) + x.sum_to_size(4, 4)), torch.randn(4, 4)).graph
    assert make_functional(graph)
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.matmul.default, aten.add.Tensor]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Flatten()])
def test_nothing_of_an_empty_batch_is_guessed(layer: nn.Module) -> None:
    assert not make_functional(exported(layer, torch.randn(0, 4)).graph)
