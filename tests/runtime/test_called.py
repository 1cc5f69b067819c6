"""What a model calls is told apart from what it called before, and only where that can be said."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from autosched.runtime.called import Called


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.by = 2.0
        self.literal = 1.0
        self.added: nn.Module | None = None
        self.counts = False
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("no rule for this mode")
        made: torch.Tensor = self.layer(x) * self.by + torch.tensor(self.literal)
        self.by += self.counts
        return made if self.added is None else made + self.added(x)


def _differs(called: Called, model: nn.Module) -> bool:
    x = torch.ones(2, 4)
    with torch.no_grad():
        return called.differs(model, [x], partial(model, x))


def test_other_numbers_differ_and_other_weights_do_not() -> None:
    called, model = Called(), Scaled()
    assert not _differs(called, model)
    model.layer = nn.Linear(4, 4)
    assert not _differs(called, model)
    for name in ("by", "literal"):
        before = getattr(model, name)
        setattr(model, name, 50.0)
        assert _differs(called, model)
        setattr(model, name, before)
        assert not _differs(called, model)


def test_what_is_added_with_weights_of_its_own_is_known_from_then_on() -> None:
    called, model = Called(), Scaled()
    assert not _differs(called, model)
    model.added = nn.Linear(4, 4)
    assert not _differs(called, model)
    model.added = nn.Sequential(nn.Linear(4, 4))
    assert not _differs(called, model)
    model.by = 3.0
    assert _differs(called, model)
    model.added = None
    assert _differs(called, model)
    model.by = 2.0
    assert not _differs(called, model)


def test_a_model_that_never_calls_the_same_is_left_to_the_comparison() -> None:
    called, model = Called(), Scaled()
    model.counts = True
    assert not any(_differs(called, model) for _ in range(3))


def test_so_is_one_that_cannot_be_watched_as_it_runs() -> None:
    called, model = Called(), Scaled()
    assert not _differs(called, model)
    model.fails, model.by = True, 5.0
    assert not _differs(called, model)
    model.fails = False
    assert _differs(called, model)
