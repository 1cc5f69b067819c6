"""What may be measured: only operators that can run at once, and none that launches nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, Failure, Samples, SoloRecord
from autosched.core.variants import Lowering
from autosched.costmodel.select_pairs import select_pairs
from autosched.datasets.candidates import group_candidates, pair_candidates
from autosched.datasets.choices import contending, independence, launches_nothing
from autosched.datasets.facts import KernelFacts, kernel_facts
from autosched.datasets.probes import probe_choices


class Heads(nn.Module):
    """Views beside products, nothing of which waits for the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [torch.mm(x, x), torch.mm(x.t(), x), torch.relu(x.reshape(2, -1)), torch.tanh(x.transpose(0, 1).unsqueeze(0))]
        return torch.stack([item.flatten().sum() for item in made])


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return capture(Heads().eval(), (torch.randn(8, 8),), lowering=Lowering.ATEN).program.graph


def facts(graph: OpGraph) -> dict[tuple[str, int], KernelFacts]:
    return {(operator.signature, 1): kernel_facts(operator, graph, 1, 5.0, None) for operator in graph.operators}


def test_operators_that_only_look_at_memory_launch_nothing(graph: OpGraph) -> None:
    idle = {operator.kind for operator in graph.operators if launches_nothing(operator, graph)}
    working = {operator.kind for operator in graph.operators if not launches_nothing(operator, graph)}
    assert {"aten::view", "aten::unsqueeze"} <= idle
    assert {"aten::mm", "aten::relu", "aten::tanh", "aten::sum"} <= working
    assert not idle & working


def test_an_operator_that_writes_what_it_was_given_launches_something(graph: OpGraph) -> None:
    # Its result, too, is memory that was there: as that of an operator in place.
    view = next(operator for operator in graph.operators if launches_nothing(operator, graph))
    assert not launches_nothing(dataclasses.replace(view, mutates=view.reads), graph)


def test_no_view_is_measured_beside_anything(graph: OpGraph) -> None:
    idle = {operator.index for operator in graph.operators if launches_nothing(operator, graph)}
    free = independence(graph)
    # Without the rule there would be such pairs, of views alone too.
    assert any(free[a, b] for a in idle for b in idle)
    samples = Samples(5.0, 5.0, 5.0, 5.0, 5.0, 9)
    solo: list[list[SoloRecord | Failure]] = [[SoloRecord(item.signature, 1, samples, Contamination())] for item in graph.operators]
    chosen = select_pairs(graph, solo, widths=(1,), max_pairs=1000)
    chosen += pair_candidates(graph, facts(graph), (1,)) + probe_choices(graph, facts(graph), (1,))
    groups = group_candidates(graph, facts(graph), 50, np.random.default_rng(0))
    assert chosen
    assert groups
    assert not idle & {index for choice in chosen for index in (choice.first, choice.last)}
    assert not idle & {index for choice in groups for index in choice.operators}


def test_working_operators_may_meet_as_before(graph: OpGraph) -> None:
    working = [operator.index for operator in graph.operators if not launches_nothing(operator, graph)]
    assert np.array_equal(contending(graph)[np.ix_(working, working)], independence(graph)[np.ix_(working, working)])


@pytest.mark.parametrize(
    ("target", "idle"), [("inductor::allocate", True), ("aten::empty_like.default", True), ("aten::ones_like.default", False)]
)
def test_an_operator_that_only_takes_memory_launches_nothing(graph: OpGraph, target: str, idle: bool) -> None:
    working = next(operator for operator in graph.operators if operator.kind == "aten::relu")
    calls = tuple(dataclasses.replace(call, target=target) for call in working.calls)
    assert launches_nothing(dataclasses.replace(working, calls=calls), graph) is idle
