"""Models that change what they have or what they are given, and a comparison of several calls in a row with the model as it came."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autosched.capture.export import Captured, capture
from autosched.core.records import DeviceKey
from autosched.core.schedule import sequential
from autosched.core.variants import WHOLE, Lowering
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.pipeline.inductor_capture import capture_inductor
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.state import version_of
from tests.conformance.bundles import evidence_for

SIZE = 8


class Rotary(nn.Module):
    """Its table is a buffer, and is made at the first call: no state."""

    table: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1], device=x.device).float()
        return x * self.table


class Stateful(nn.Module):
    """A linear layer and buffers of several kinds; subclasses say what becomes of them."""

    memory: torch.Tensor
    hidden: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.register_buffer("memory", torch.zeros(4, SIZE))
        self.register_buffer("hidden", torch.zeros(4, SIZE), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def reset(self) -> None:
        """As it began: one buffer in place, one by another tensor."""
        self.memory.zero_()
        self.hidden = torch.zeros(4, SIZE)
        self.count.zero_()


class ReadBeforeAndAfter(Stateful):
    """Reads a buffer before and after it changes it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.memory * 1
        self.memory.mul_(0.5).add_(x)
        self.count += 1
        return self.layer(before), self.memory.sum(), self.count * 2


class Recurrent(Stateful):
    """Puts another tensor in a buffer's place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.layer(x) + self.hidden)
        return self.hidden * 2


class ReturnsItsMemory(Stateful):
    """Returns what it changes: whole, in part, as a copy from before; and what it puts in a buffer's place."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        old = self.memory.clone()
        self.memory.add_(x)
        self.hidden = self.layer(x) + self.hidden
        return {
            "whole": self.memory, "row": self.memory[1], "turned": self.memory.t(), "old": old, "copy": self.memory.clone(),
            "hidden": self.hidden, "flat": self.hidden.view(-1), "apart": self.layer(x),
        }  # fmt: skip


class ChangesItsInput(Stateful):
    """Changes an input through a view of it, and returns it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x[1:3].mul_(0.5)
        return self.layer(x), x, x[2]


class KeyValueCache(Stateful):
    """Fills a cache at a position that it counts itself, and attends to what is there."""

    keys: torch.Tensor

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(length, SIZE))
        self.register_buffer("values", torch.zeros(length, SIZE))

    def fill(self, x: torch.Tensor) -> None:
        """Put the first row at the next place."""
        place = self.count.reshape(1)
        self.keys.index_copy_(0, place, self.layer(x[:1]))
        self.values.index_copy_(0, place, x[:1])
        self.count += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fill(x)
        scores = (x @ self.keys.t()).masked_fill(torch.arange(16, device=x.device) >= self.count, float("-inf"))
        return torch.softmax(scores, 1) @ self.values


class LongCache(KeyValueCache):
    """With room for many steps."""

    def __init__(self, length: int = 256) -> None:
        super().__init__(length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fill(x)
        return self.keys.sum() + self.values.sum()


class Remembers(Stateful):
    """A part of a model that keeps what its last input was and returns what it has put another tensor in place of."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before, step = self.hidden, x - self.memory
        self.hidden = torch.tanh(self.layer(x) + self.hidden)
        self.memory = x + 1
        return step, before, self.hidden.t()


class InParts(Stateful):
    """Its parts have the state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Remembers()
        self.rest = nn.Sequential(Recurrent(), Recurrent())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        step, before, after = self.first(x)
        return self.rest(step), before, after, step


STATEFUL: tuple[type[Stateful], ...] = (ReadBeforeAndAfter, Recurrent, ReturnsItsMemory, ChangesItsInput, KeyValueCache, InParts)


def made(kind: Callable[[], Stateful], seed: int = 0) -> Stateful:
    """A model in eval mode."""
    torch.manual_seed(seed)
    return kind().eval()


def example() -> torch.Tensor:
    """An input."""
    return torch.randn(4, SIZE)


def bundled(model: nn.Module, args: tuple[Any, ...], lowering: Lowering = Lowering.REWRITTEN) -> tuple[Captured, Bundle]:
    """The model's operators in order, in a bundle that nobody tuned."""
    captured = captured_in(lowering, model, args)
    device: DeviceKey = cpu_device_key()
    graph = captured.program.graph
    evidence = evidence_for(len(graph), device, graph.hash)
    literals = {item.name: captured.constants[item.value] for item in captured.program.bindings if item.source.value == "literal"}
    return captured, make_bundle(captured.program, sequential(graph), evidence, literals, device, software_key())


def captured_in(lowering: Lowering, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Captured:
    """A model in any lowering, also one that is compiled here."""
    if lowering not in WHOLE:
        return capture(model, args, kwargs, lowering=lowering)
    found = capture_inductor(model, args, kwargs, mode=Mode(lowering))
    assert isinstance(found, Captured), found.reason
    return found


def bundle_bytes(model: nn.Module, args: tuple[Any, ...], lowering: Lowering = Lowering.REWRITTEN) -> bytes:
    """As :func:`bundled`, written."""
    return encode_bundle(bundled(model, args, lowering)[1])


def assert_like_eager(
    run: Callable[..., Any],
    model: Stateful,
    calls: Sequence[Sequence[torch.Tensor]],
    between: Callable[[Stateful, int], None] | None = None,
) -> None:
    """Each call through ``run`` does what it does to a copy of ``model``: outputs, inputs, buffers, and what shares memory with what.

    Where eager mode has counted a change, so that autograd refuses a gradient that needs what was there, one is counted here, too.

    Args:
        run: takes and changes what ``model`` does, and its buffers.
        between: called for both models before each call.
    """
    eager = copy.deepcopy(model)
    for number, given in enumerate(calls):
        mine, theirs = [tensor.clone() for tensor in given], [tensor.clone() for tensor in given]
        if between is not None:
            between(model, number)
            between(eager, number)
        changed, counted = [*mine, *model.buffers()], [*theirs, *eager.buffers()]
        before, should = list(map(version_of, changed)), list(map(version_of, counted))
        with torch.no_grad():
            answer, expected = run(*mine), eager(*theirs)
        for one, begun, other, began in zip(changed, before, counted, should, strict=True):
            assert version_of(one) > begun or version_of(other) == began
        found = [*pytree.tree_leaves(answer), *mine, *model.buffers()]
        wanted = [*pytree.tree_leaves(expected), *theirs, *eager.buffers()]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
        assert _sharing(found) == _sharing(wanted)


def _sharing(tensors: Sequence[torch.Tensor]) -> list[list[bool]]:
    homes = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[home == other for other in homes] for home in homes]
