"""What is computed of the elements that a mask selects, and put back, is scheduled; how many they are decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph
from autosched.core.program import Program
from autosched.core.variants import Lowering
from autosched.device.cuda.screen import require_capturable
from autosched.runtime.kernels import bind

X = torch.linspace(-3.0, 3.0, 2 * 5 * 4).reshape(2, 5, 4)
Z = torch.linspace(1.0, 2.0, 2 * 5 * 4).reshape(2, 5, 4)
ROWS = torch.tensor([[True, False, True, True, False], [False, False, True, False, False]])
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], Any]


class Selecting(nn.Module):
    """Changes a copy of ``x`` as it is told."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.embedding = nn.Embedding(1, 4)
        self.bias = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        self.change(y, mask, z, self)
        return y


def _adds(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] += 1.5


def _adds_an_embedding(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] = 0.0
    y[mask] += model.embedding.weight
    y[~mask] += model.bias


def _sets(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] = 0
    y[:, mask[1]] = model.bias
    y[~mask] = model.embedding.weight


def _of_itself(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[y > 0] *= 2


def _of_several(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] = torch.relu(y[mask] * 2) + z[mask].sqrt()


def _from_elsewhere(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] = z[mask]


def _behind(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[:, mask[0]] -= model.bias


def _one_number_each(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[:, mask[0]] *= z[:, :1]


def _of_unselected_it_is_infinite(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[y != 0] = 1.0 / y[y != 0]
    y[y > 0] = y[y > 0].log()


def _of_integers(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    whole = y.long()
    whole[mask] -= 7
    y += whole


_KNOWN = [_adds, _adds_an_embedding, _sets, _of_itself, _of_several, _from_elsewhere, _behind, _one_number_each, _of_integers]


def _masks() -> list[torch.Tensor]:
    return [ROWS, ROWS.roll(1), ~ROWS, torch.ones_like(ROWS), torch.zeros_like(ROWS)]


def _answer(program: Program, constants: dict[int, torch.Tensor], x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return bind(program, constants).run([x, mask, Z])[0]


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN])
@pytest.mark.parametrize("change", [*_KNOWN, _of_unselected_it_is_infinite])
def test_however_many_are_selected_it_is_what_the_model_makes(change: Change, lowering: Lowering) -> None:
    model = Selecting(change).eval()
    captured = capture(model, (X, ROWS, Z), lowering=lowering)
    for mask in _masks():
        for x in (X, -X, torch.zeros_like(X)):
            with torch.no_grad():
                expected = model(x, mask, Z)
            assert torch.equal(_answer(captured.program, captured.constants, x, mask), expected)


@pytest.mark.parametrize("change", _KNOWN)
def test_a_cuda_graph_need_not_wait_for_how_many_are_selected(change: Change) -> None:
    require_capturable(capture(Selecting(change).eval(), (X, ROWS, Z), target="cuda").program.graph)


def test_what_a_mask_puts_into_a_buffer_stays_what_may_be_done_in_place() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(2, 5, 4))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            self.memory[mask] = 1.0
            return x + 1

    program = capture(Remembering().eval(), (X, ROWS), lowering=Lowering.ATEN).program
    # The latter from PyTorch 2.15 on.
    assert {"aten::index_put", "aten::masked_fill"} & {operator.kind for operator in program.graph.operators}


def _as_many(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] += mask.sum() * y[mask].shape[0]


def _by_their_mean(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] -= y[mask].mean()


def _with_others(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] = y[~mask][:1] + z[mask]


def _divides_integers(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    whole = y.long()
    whole[whole != 0] = 12 // whole[whole != 0]
    y += whole


def _sorts(y: torch.Tensor, mask: torch.Tensor, z: torch.Tensor, model: Any) -> None:
    y[mask] = y[mask].sort(0).values


@pytest.mark.parametrize("change", [_as_many, _by_their_mean, _with_others, _divides_integers, _sorts])
def test_what_is_not_computed_one_by_one_of_the_same_elements_is_refused(change: Change) -> None:
    with pytest.raises(UnsupportedGraph, match=r"depends on the data|cannot be captured"):
        capture(Selecting(change).eval(), (X, ROWS, Z))


def test_selected_elements_that_are_returned_as_well_are_refused() -> None:
    class Returning(Selecting):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, z: torch.Tensor) -> Any:
            y = x.clone()
            found = y[mask]
            y[mask] = found * 2
            return y, found

    with pytest.raises(UnsupportedGraph, match=r"aten::index at .* depends on the data"):
        capture(Returning(_adds).eval(), (X, ROWS, Z))


def test_one_selection_may_be_put_in_several_places() -> None:
    class Twice(Selecting):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            y, other = x.clone(), z.clone()
            found = y[mask]
            y[mask] = found * 2
            other[mask] = found + 1
            return y + other

    model = Twice(_adds).eval()
    captured = capture(model, (X, ROWS, Z))
    with torch.no_grad():
        for mask in _masks():
            assert torch.equal(_answer(captured.program, captured.constants, X, mask), model(X, mask, Z))
