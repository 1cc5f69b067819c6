"""Integers that a model refuses in any order are drawn as one number; those that it takes stay random."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autosched.capture.export import capture
from autosched.core.program import Program
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.load import load
from tests.conformance.apply import Apply
from tests.conformance.stateful import bundle_bytes

BOXES = torch.tensor([[[1, 2, 7, 9], [0, 3, 4, 4], [5, 5, 6, 9]]])


class Layout(nn.Module):
    """Looks up words, and the width and height of their boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.extents = nn.Embedding(50, 4), nn.Embedding(10, 4)

    def forward(self, ids: Tensor, boxes: Tensor) -> Tensor:
        width, height = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
        return self.words(ids) + self.extents(width) + self.extents(height)


class Distance(nn.Module):
    """Looks up how far one number is from another, which is never negative."""

    def __init__(self, farthest: int) -> None:
        super().__init__()
        self.table = nn.Embedding(1 + farthest, 4)

    def forward(self, last: Tensor, first: Tensor) -> Tensor:
        return self.table(last - first)


def _ranges(program: Program) -> list[tuple[int, int]]:
    return [(item.low, item.high) for item in program.inputs]


def test_only_what_is_refused_is_held() -> None:
    captured = capture(Layout().eval(), (torch.tensor([[3, 40, 9]]), BOXES))
    assert _ranges(captured.program) == [(3, 40), (0, 0)]
    bound = bind(captured.program, captured.constants)
    for seed in range(5):
        drawn = random_inputs(captured.program, seed)
        assert set(drawn[1].flatten().tolist()) == {0}
        bound.run(drawn)


def test_what_is_taken_in_any_order_stays_random() -> None:
    captured = capture(nn.Embedding(50, 4).eval(), (torch.tensor([[3, 40, 9]]),))
    assert _ranges(captured.program) == [(3, 40)]


def test_the_largest_number_where_the_smallest_does_not_do() -> None:
    numbers = torch.arange(10)
    assert _ranges(capture(Distance(farthest=9).eval(), (numbers, numbers)).program) == [(9, 9), (0, 9)]


def test_all_are_held_where_one_does_not_do() -> None:
    numbers = torch.arange(10)
    assert _ranges(capture(Distance(farthest=3).eval(), (numbers, numbers)).program) == [(0, 0), (0, 0)]


def test_a_lowering_of_regions_knows_it_too() -> None:
    program = capture(Layout().eval(), (torch.tensor([[3, 40, 9]]), BOXES), lowering=Lowering.FUSED).program
    assert _ranges(program) == [(3, 40), (0, 0)]


def test_offsets_of_bags_are_left_to_their_own_order() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 4)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.bag(ids, offsets)

    program = capture(Bags().eval(), (torch.arange(9), torch.tensor([0, 4, 6]))).program
    assert _ranges(program) == [(0, 8), (0, 6)]


class Clicks(nn.Module):
    """Takes two categories and a measure as the columns of one matrix of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.head = nn.Embedding(10, 4), nn.Embedding(40, 4), nn.Linear(9, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(rows[:, 0].long()), self.items(rows[:, 1].long()), rows[:, 2:]], dim=1))


def _clicks(rows: int = 20) -> Tensor:
    return torch.stack([torch.arange(rows) % 10, torch.arange(rows) * 2 % 40, torch.linspace(0, 1, rows)], dim=1)


def test_floats_that_become_indices_are_drawn_as_whole_numbers_that_every_table_has() -> None:
    captured = capture(Clicks().eval(), (_clicks(),))
    assert _ranges(captured.program) == [(0, 9)]
    bound = bind(captured.program, captured.constants)
    for seed in range(5):
        (drawn,) = random_inputs(captured.program, seed)
        assert drawn.dtype is torch.float32
        assert set(drawn.flatten().tolist()) <= set(range(10))
        assert len(drawn.unique()) > 1
        bound.run([drawn])


def test_a_few_floats_that_may_be_indices_by_chance_are_drawn_as_whole_numbers_too() -> None:
    model = nn.Sequential(Apply(lambda m, x: x.long()), nn.Embedding(10, 4))
    for last in (4.0, 6.0, 9.0):
        assert _ranges(capture(model.eval(), (torch.tensor([0.0, last]),)).program) == [(0, int(last))]


def test_floats_that_become_indices_within_any_table_stay_as_they_are() -> None:
    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 4)

        def forward(self, rows: Tensor) -> Tensor:
            return self.table((rows > 0).float().long())

    program = capture(Signs().eval(), (torch.randn(4, 3),)).program
    assert _ranges(program) == [(0, 0)]
    assert program.inputs[0].std > 0


def test_a_model_that_makes_indices_of_floats_is_loaded() -> None:
    model = Clicks().eval()
    loaded = load(bundle_bytes(model, (_clicks(),)), model)
    assert loaded.report().scheduled, loaded.report().reason
    other = _clicks().flip(0)
    with torch.no_grad():
        assert torch.allclose(loaded(other), model(other))
    assert loaded.report().calls == 1
