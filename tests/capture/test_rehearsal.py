"""A model is called once with real tensors before it is traced, and nothing is left of that but what it keeps outside of itself."""

from __future__ import annotations

import functools
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autosched.capture.dynamo import DynamoGraph, GraphInputs
from autosched.capture.export import capture
from autosched.capture.rehearsal import rehearse

_kept: dict[int, torch.Tensor] = {}


@functools.lru_cache
def _angles(size: int) -> torch.Tensor:
    return torch.arange(size).float().cos()


class Cold(nn.Module):
    """Keeps what it makes at its first call where every model of its class finds it."""

    masks: dict[int, torch.Tensor] = {}  # noqa: RUF012 - as models have it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if size not in _kept:
            _kept[size] = torch.ones(size) * 2
        if size not in self.masks:
            self.masks[size] = torch.ones(size).cumsum(0)
        return x * _kept[size] + self.masks[size] * _angles(size)


@pytest.fixture
def cold() -> Cold:
    _angles.cache_clear()
    _kept.clear()
    Cold.masks.clear()
    return Cold().eval()


def test_what_a_model_keeps_outside_of_itself_has_values_after_capture(cold: Cold) -> None:
    x = torch.randn(2, 4)
    capture(cold, (x,))
    answer = cold(x)
    assert not isinstance(answer, FakeTensor)
    assert torch.equal(answer, x * 2 + torch.arange(1.0, 5.0) * torch.arange(4).float().cos())


def test_a_first_capture_gives_what_a_second_one_gives(cold: Cold) -> None:
    x = torch.randn(2, 4)
    first, second = capture(cold, (x,)), capture(cold, (x,))
    assert first.program.graph.hash == second.program.graph.hash


class Changing(nn.Module):
    """Changes whatever it has, counted by PyTorch or not, and draws a number."""

    cache: torch.Tensor
    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.table = nn.Embedding(4, 4, max_norm=0.1)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(4))
        self.register_buffer("state", torch.zeros(4))
        self.plain = [torch.zeros(4)]
        self.real = 0

    def forward(self, x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        self.real += 1
        seen.append(x)
        self.steps.add_(1)
        self.cache[1:3].add_(x[0, 1:3])
        self.state = self.state + 1
        self.plain[0].mul_(2).add_(1)
        given[0].zero_()
        given.append(x)
        nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        y: torch.Tensor = torch.rand(4).relu_() + self.table(torch.tensor([1]))
        return x + y


seen: list[torch.Tensor] = []


def test_what_a_model_changes_is_given_back() -> None:
    model, x, given = Changing().eval(), torch.randn(2, 4), [torch.ones(4)]
    tensors = [*model.parameters(), *model.buffers(), model.plain[0], x, given[0]]
    before = [tensor.clone() for tensor in tensors]
    still = [tensor._version for tensor in (model.norm.weight, model.table.weight)]
    seen.clear()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rehearse(model, (x, given), {})
    assert len(seen) == 1
    assert torch.equal(torch.rand(2), expected)
    now = [*model.parameters(), *model.buffers(), model.plain[0], x, given[0]]
    assert all(tensor is other for tensor, other in zip(now, tensors, strict=True))
    for tensor, value in zip(now, before, strict=True):
        torch.testing.assert_close(tensor, value, rtol=0, atol=0)
    assert len(given) == 1
    assert model.real == 0
    # Nobody is told of a write to what was only read.
    assert model.norm.weight._version == still[0]


def test_what_cannot_be_called_is_given_back_what_it_changed_before() -> None:
    class Failing(Changing):
        def forward(self, x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
            super().forward(x, given)
            raise RuntimeError("late")

    model = Failing().eval()
    rehearse(model, (torch.randn(2, 4), [torch.ones(4)]), {})
    assert (model.steps.item(), model.real, model.plain[0].sum().item()) == (0, 0, 0)


def test_what_was_filled_through_an_expanded_view_is_given_back() -> None:
    class Fills(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.expand(2, *x.shape).zero_()
            return x + 1

    x = torch.randn(3)
    before = x.clone()
    rehearse(Fills(), (x,), {})
    assert torch.equal(x, before)


class Turns(nn.Module):
    """Gives another shape to views of what it has, and to one thing itself."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("seen", torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.t_()
        return x @ self.weight.detach().t_() + x[:, :2].t_().sum()


def test_what_is_only_seen_in_another_shape_keeps_its_contents() -> None:
    model, x = Turns().eval(), torch.randn(2, 3)
    tensors = [*model.parameters(), *model.buffers(), x]
    before = [tensor.detach().clone() for tensor in tensors]
    rehearse(model, (x,), {})
    for tensor, value in zip(tensors, before, strict=True):
        assert tensor.stride() == value.stride()
        assert torch.equal(tensor, value)


def test_arguments_without_values_are_not_computed_with() -> None:
    seen.clear()
    with FakeTensorMode() as mode:
        rehearse(Changing().eval(), (torch.ones(2, 4), [torch.ones(4)]), {})
    rehearse(Changing().eval(), (mode.from_tensor(torch.ones(2, 4)), [torch.ones(4)]), {})
    assert not seen


def test_a_graph_of_dynamos_is_not_called() -> None:
    # What a hook collects in a list is taken out again after tracing.
    calls: SimpleQueue[Any] = SimpleQueue()
    traced = torch.fx.symbolic_trace(nn.ReLU())
    traced.register_forward_pre_hook(lambda _, args: calls.put(args[0]))
    capture(DynamoGraph(traced, GraphInputs(("x",), (), (), (0,), False), ()), (torch.ones(2),))
    assert not calls.empty()
    while not calls.empty():
        assert isinstance(calls.get(), FakeTensor)


class Recording(nn.Module):
    """Hooks its layers at its first call, and notes that it has, as models of transformers do that return their hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not hasattr(self, "hooked"):
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.hooked = True
        self.seen: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x)
        seen, self.seen = tuple(self.seen), []
        return (x, *seen)


def test_hooks_that_a_first_call_adds_are_not_there_twice_afterwards() -> None:
    model, x = Recording().eval(), torch.randn(2, 4)
    captured = capture(model, (x,))
    assert not any(layer._forward_hooks for layer in model.layers)
    assert len(captured.program.output_leaves) == len(model(x)) == 3


class Angles(nn.Module):
    """Fills a table at its first call, and where a call asks for more of it; as rotary embeddings do."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 4), persistent=False)
        self.filled = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        if length > self.filled:
            self.table[:length] = torch.outer(torch.arange(length), torch.arange(1.0, 5.0)).cos()
            self.filled = length
        return x * self.table[:length]


def test_a_table_that_a_first_call_fills_stays_with_the_number_that_says_so() -> None:
    model, x = Angles().eval(), torch.randn(2, 8, 4)
    expected = Angles()(x)
    captured = capture(model, (x,))
    assert model.filled == 8
    assert torch.equal(model(x), expected)
    # It is read, and not made and written at each call.
    assert not captured.program.writes
    assert [operator.calls[0].target for operator in captured.program.graph.operators] == ["aten::mul.Tensor"]
    assert capture(model, (x,)).program.graph.hash == captured.program.graph.hash


class Scaled(nn.Module):
    """Divides its weights at the first call, for good, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.scaled:
            with torch.no_grad():
                self.inner.weight.div_(2)
            self.scaled = True
        result: torch.Tensor = self.inner(x)
        return result


def test_weights_that_a_first_call_scales_stay_so() -> None:
    model, x = Scaled().eval(), torch.randn(2, 8, 4)
    wanted = x @ model.inner.weight.detach().clone().t() / 2 + model.inner.bias
    captured = capture(model, (x,))
    # Or each call would halve them.
    assert not captured.program.writes
    assert model.scaled
    torch.testing.assert_close(model(x), wanted)


class Fitted(nn.Module):
    """Makes its bias of the first batch, as layers with a data-dependent initialization do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.fitted = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fitted:
            self.bias.data.copy_(-x.mean((0, 1)))
            self.fitted = True
        return x + self.bias


class Centred(nn.Module):
    """Keeps statistics of the first batch."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.seen = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.seen:
            self.mean.copy_(x.mean((0, 1)))
            self.seen = True
        return x - self.mean


class Positions(nn.Module):
    """Counts its calls."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4))
        self.position = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[self.position] = self.position + 1.0
        self.position += 1
        return x + self.cache.sum(0)


class Masked(Angles):
    """Makes something else beside its table, that is not kept with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.filled:
            self.mask = torch.ones(4)
        return super().forward(x) * self.mask


@pytest.mark.parametrize("kind", [Centred, Fitted, Positions, Masked])
def test_what_comes_of_the_example_or_of_every_call_is_given_back(kind: type[nn.Module]) -> None:
    model, x = kind().eval(), torch.randn(2, 8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    rehearse(model, (x,), {})
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == plain
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
