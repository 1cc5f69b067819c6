"""Grouping calls into operators: views move into their readers, pointwise chains become one operator, no branch waits for another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.graph import ValueRole
from tests.conformance.apply import Apply
from tests.conformance.programs import assert_computes


def check(model: nn.Module, *inputs: torch.Tensor) -> Captured:
    captured = capture(model.eval(), inputs)
    captured.program.graph.validate()
    assert_computes(captured.program, captured.constants, model, inputs)
    return captured


def test_a_view_is_made_inside_each_reader():
    def run(m, x):
        halves = torch.softmax(x, 1).chunk(2, 1)
        return torch.softmax(halves[0].t(), 0), torch.softmax(halves[1].unsqueeze(0), 0)

    graph = check(Apply(run), torch.randn(4, 6)).program.graph
    assert len(graph) == 3
    assert [len(operator.calls) for operator in graph.operators] == [1, 3, 3]
    owner = graph.operators[0].writes[0]
    inner = [value for value in graph.values if value.role is ValueRole.INTERNAL]
    assert inner
    assert all(value.storage == owner for value in inner)
    assert len(graph.edges) == 2


def test_a_view_that_leaves_the_model_stays_an_operator():
    graph = check(Apply(lambda m, x: (torch.softmax(x, 1).t(), x.t())), torch.randn(3, 4)).program.graph
    assert len(graph) == 3


def test_a_chain_and_an_epilogue_become_one_operator():
    captured = check(Apply(lambda m, x: torch.tanh(m.lin(x) * 2 + 1).square(), lin=nn.Linear(4, 4)), torch.randn(2, 4))
    assert len(captured.program.graph) == 1
    assert captured.program.graph.operators[0].calls[0].target == "aten::linear.default"


def test_a_fork_is_kept():
    def run(m, x):
        base = torch.softmax(x, 1)
        return m.left(torch.relu(base)), m.right(torch.tanh(base))

    graph = check(Apply(run, left=nn.Linear(4, 4), right=nn.Linear(4, 4)), torch.randn(2, 4)).program.graph
    sides = [operator.index for operator in graph.operators if operator.kind == "aten::linear"]
    assert graph.independent(*sides)


def test_a_long_branch_does_not_wait_for_the_other_before_an_addition():
    def run(m, x):
        return m.left(x) + m.right(x)

    size = 256
    graph = check(Apply(run, left=nn.Linear(size, size), right=nn.Linear(size, size)), torch.randn(128, size)).program.graph
    products = [operator.index for operator in graph.operators if "linear" in operator.kind]
    assert graph.independent(*products)
    assert len(graph) == 3


def test_the_pointwise_part_of_an_lstm_cell_is_one_operator():
    from autosched.zoo_models.lstm import Cell

    cell = Cell(8)
    graph = check(Apply(lambda m, x, h, c: m.cell(x, h, c), cell=cell), *(torch.randn(2, 8) for _ in range(3))).program.graph
    assert len(graph) == 3
    assert max(len(operator.calls) for operator in graph.operators) >= 9


def test_what_is_read_of_a_buffer_and_what_it_becomes_are_grouped_like_anything_else():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.ones(3))

        def forward(self, x):
            seen = self.state + x
            self.state.copy_(torch.tanh(x) * 2)
            return seen * 3

    program = capture(Counts().eval(), (torch.zeros(3),)).program
    assert sorted(len(operator.calls) for operator in program.graph.operators) == [2, 2]
    assert not any(operator.mutates for operator in program.graph.operators)
    assert program.writes[0].value in program.graph.outputs


@st.composite
def recipes(draw):
    """A random model: each step reads one or two earlier values."""
    kinds = ["relu", "add", "mul", "softmax", "mm", "chunk", "t", "view"]
    steps = draw(st.integers(3, 14))
    return [
        (
            draw(st.sampled_from(kinds)),
            draw(st.integers(0, i)),
            draw(st.integers(0, i)),
        )
        for i in range(steps)
    ], draw(st.sets(st.integers(1, steps), min_size=1, max_size=3))


def _follow(recipe):
    def run(m, x):
        made = [x]
        for kind, a, b in recipe[0]:
            left, right = made[a], made[b]
            made.append(
                {
                    "relu": lambda left=left: torch.relu(left),
                    "add": lambda left=left, right=right: left + right,
                    "mul": lambda left=left, right=right: left * right,
                    "softmax": lambda left=left: torch.softmax(left, 1),
                    "mm": lambda left=left: m.lin(left),
                    "chunk": lambda left=left: torch.cat(left.chunk(2, 1)[::-1], 1),
                    "t": lambda left=left: left.t(),
                    "view": lambda left=left: left.reshape(2, 8).reshape(4, 4),
                }[kind]()
            )
        return tuple(made[index] for index in sorted(recipe[1]))

    return run


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=25)
@given(recipes())
def test_random_models_compute_the_same(recipe):
    torch.manual_seed(0)
    check(Apply(_follow(recipe), lin=nn.Linear(4, 4)), torch.randn(4, 4))
