"""Graphs are made functional by PyTorch as before, and only the composites that they call are looked at."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import exported_program

from autosched.capture.decomposing import decompose


class Changing(nn.Module):
    """Has composites that stay whole, one of them on memory that is changed later, and one that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(self.layer(x)) @ self.layer.weight
        nn.functional.relu6(y[:, 1:3], inplace=True)
        return torch.einsum("ij,kj->ik", y.square_(), x)


def described(program: torch.export.ExportedProgram) -> list[str]:
    return [f"{node.name} {node.target} {node.args} {node.kwargs}" for node in program.graph.nodes]


@pytest.fixture
def overridden(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The composites of each call that PyTorch puts other kernels in the place of."""
    real, seen = exported_program._override_composite_implicit_decomp, []

    def noted(kernels: dict[Any, Any]) -> Any:
        seen.append({str(operator) for operator in kernels})
        return real(kernels)

    monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", noted)
    return seen


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_composites_of_the_graph_alone_are_looked_at_and_stay_whole(overridden: list[set[str]]) -> None:
    everything = exported_program._collect_all_valid_cia_ops
    exported = torch.export.export(Changing().eval(), (torch.randn(4, 8),))
    made, expected = decompose(exported, {}), exported.run_decompositions({})
    assert described(made) == described(expected)
    few, all_ = overridden
    assert few == {"aten.linear.default", "aten.matmul.default", "aten.einsum.default"}
    assert few < all_
    assert exported_program._collect_all_valid_cia_ops is everything


def test_whoever_decomposes_in_another_thread_is_asked_about_all(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = torch.export.export(nn.Linear(2, 2).eval(), (torch.randn(1, 2),))
    counts: list[int] = []

    def count(*_: object) -> None:
        counts.append(len(exported_program._collect_all_valid_cia_ops()))

    def here_and_there(table: object) -> None:
        count()
        other = threading.Thread(target=count)
        other.start()
        other.join()

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda program, table: here_and_there(table))
    decompose(exported, {})
    assert counts[0] == 1
    assert counts[1] > 100
    # What an entry is made of is in no graph.
    decompose(exported, {torch.ops.aten.linear.default: None})
    assert counts[2] == counts[3] > 100


@pytest.mark.parametrize(
    "module", ["torch.export.exported_program._collect_all_valid_cia_ops", "torch._export.utils._is_preservable_cia_op"]
)
def test_without_the_interface_nothing_changes(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = torch.export.export(nn.Linear(2, 2).eval(), (torch.randn(1, 2),))
    monkeypatch.delattr(module)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", lambda program, table: (program, table))
    assert decompose(exported, {}) == (exported, {})
