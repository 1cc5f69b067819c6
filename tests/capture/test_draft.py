"""What observing a draft holds and leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from autosched.capture.draft import Node
from autosched.capture.export import draft_of
from autosched.capture.passes.batch_norm import fold_batch_norm
from autosched.capture.passes.constants import fold_constants
from autosched.capture.rewrite import rewrite_draft


class Normed(nn.Module):
    """Four convolutions, each with a normalisation whose factors become part of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[batch, 4, height, width]``."""
        return self.layers(x)


def test_observing_drops_what_the_prologue_alone_reads() -> None:
    draft = draft_of(Normed().eval(), (torch.randn(1, 4, 12, 12),))
    rewrite_draft(draft, "cpu")
    made = {value for node in draft.prologue for value in node.outputs}
    read = {value for node in draft.nodes for value in node.reads()}
    assert made - read, "the rewriting leaves nothing that only the prologue reads"
    bodies = set(map(id, draft.nodes))
    held: list[set[int]] = []

    def around(node: Node, tensors: Mapping[int, torch.Tensor], run: Callable[[], list[object]]) -> list[object]:
        if id(node) in bodies:
            held.append(set(tensors) & (made - read))
        return run()

    draft.observe(around=around)
    assert held
    assert not any(held)
    # What is gone was noted all the same: passes ask for it.
    assert made <= set(draft.specs)


def test_observing_holds_one_packed_weight_at_a_time() -> None:
    draft = draft_of(Normed().eval(), (torch.randn(1, 4, 12, 12),))
    rewrite_draft(draft, "cpu")
    packed = {node.reads()[1] for node in draft.nodes if "convolution" in node.kind}
    assert packed <= {value for node in draft.prologue for value in node.outputs}
    assert len(packed) == 4
    held: list[int] = []

    def around(node: Node, tensors: Mapping[int, torch.Tensor], run: Callable[[], list[object]]) -> list[object]:
        held.append(len(packed & set(tensors)))
        return run()

    draft.observe(around=around)
    assert max(held) == 1
    assert packed <= set(draft.specs)


class Chained(nn.Module):
    """What the first call reads is made of what only the last call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[3]``."""
        doubled = self.weight * 2
        return x * (doubled + 1) + doubled


def test_what_the_prologue_makes_of_what_it_makes_is_made_in_that_order() -> None:
    model, x = Chained().eval(), torch.randn(3)
    draft = draft_of(model, (x,))
    assert fold_constants(draft) == 2
    (output,) = draft.observe().values()
    with torch.no_grad():
        torch.testing.assert_close(output, model(x))


def test_observing_twice_answers_the_same() -> None:
    model = Normed().eval()
    x = torch.randn(1, 4, 12, 12)
    draft = draft_of(model, (x,))
    fold_constants(draft)
    fold_batch_norm(draft)
    first, again = draft.observe(), draft.observe()
    with torch.no_grad():
        expected = model(x)
    for made in (first, again):
        (output,) = made.values()
        assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5)
