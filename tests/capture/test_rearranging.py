"""Chains of reshapes, permutations and copies become one copy, or none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autosched.capture.arrangement import arrangement_of
from autosched.capture.draft import Draft, Node
from autosched.capture.export import capture, draft_of
from autosched.capture.passes.cpu_convolution import pack_cpu_convolutions
from autosched.capture.passes.rearranging import join_rearrangements
from autosched.core.program import Ref
from autosched.core.specs import spec_of
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind
from tests.conformance.apply import Apply

Body = Callable[[torch.Tensor], object]


def rewritten(model: nn.Module, x: torch.Tensor, expected: int) -> Draft:
    """The draft after the pass, observed; outputs must be eager's."""
    draft = draft_of(model.eval(), (x,))
    pack_cpu_convolutions(draft)
    draft.observe()
    assert join_rearrangements(draft) == expected
    made = draft.observe()
    with torch.no_grad():
        wanted = torch.utils._pytree.tree_leaves(model(x))
    for leaf, reference in zip(draft.output_leaves, wanted, strict=True):
        assert isinstance(leaf, Ref)
        torch.testing.assert_close(made[leaf.value].clone(), reference)
    return draft


def of(body: Body) -> nn.Module:
    return Apply(lambda m, x: body(x))


def copies(draft: Draft) -> list[str]:
    """The calls that copy, in order."""
    kinds = ("clone", "contiguous", "reshape", "view", "native_channel_shuffle")
    found = [node for node in draft.nodes if node.kind.partition("::")[2] in kinds]
    return [node.kind.partition("::")[2] for node in found if draft.storage[node.outputs[0]] == node.outputs[0]]


class Patches(nn.Module):
    """Pixels as tokens, those at the same place of each patch together, and back, as MobileViT spells it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 8, 1)
        self.norm, self.linear = nn.LayerNorm(24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        batch, channels, height, width = x.shape
        x = x.reshape(batch * channels * height // 2, 2, width // 2, 2).transpose(1, 2)
        x = x.reshape(batch, channels, height * width // 4, 4).transpose(1, 3).reshape(batch * 4, height * width // 4, channels)
        x = x + self.linear(self.norm(x))
        x = x.contiguous().view(batch, 4, height * width // 4, channels).transpose(1, 3)
        x = x.reshape(batch * channels * height // 2, width // 2, 2, 2).transpose(1, 2).reshape(batch, channels, height, width)
        return self.after(x)


@pytest.mark.parametrize("batch", [1, 2])
def test_tokens_are_rows_and_pictures_channels_last_after_one_copy_each(batch: int) -> None:
    draft = rewritten(Patches(), torch.randn(batch, 3, 8, 12), 2)
    assert copies(draft) == ["clone", "clone"]
    norm, convolution = (next(n for n in reversed(draft.nodes) if word in n.kind) for word in ("layer_norm", "convolution"))
    assert draft.specs[norm.reads()[0]].strides == (24 * 24, 24, 1)
    assert draft.specs[convolution.reads()[0]].strides == (24 * 96, 1, 24 * 12, 24)


class Shuffles(nn.Module):
    """Two blocks, each half as wide as what it reads, with a shuffle of channels after each, as in ShuffleNet."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.first, self.blocks = nn.Conv2d(3, 12, 3), nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            kept, changed = x.chunk(2, 1)
            x = torch.cat([kept, block(changed)], 1)
            batch, channels, height, width = x.shape
            x = x.view(batch, self.groups, channels // self.groups, height, width).transpose(1, 2).contiguous()
            x = x.view(batch, channels, height, width)
        return x.relu()


@pytest.mark.parametrize("groups", [2, 3])
def test_channels_are_shuffled_channels_last(groups: int) -> None:
    draft = rewritten(Shuffles(groups), torch.randn(2, 3, 7, 9), 2)
    assert copies(draft) == ["native_channel_shuffle"] * 2
    assert all(draft.specs[node.outputs[0]].strides[1] == 1 for node in draft.nodes if "convolution" in node.kind or "shuffle" in node.kind)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_numbers_of_every_kind_are_shuffled(dtype: torch.dtype) -> None:
    model = of(lambda x: x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2).float() + 1)
    x = torch.arange(2 * 6 * 5 * 4).view(2, 6, 5, 4).to(dtype).to(memory_format=torch.channels_last)
    found = capture(model, (x,))
    assert torch.equal(bind(found.program, found.constants, "cpu").run((x,))[0], model(x))


JOINED: dict[str, tuple[Body, tuple[int, ...], list[str]]] = {
    "a picture of rows": (lambda x: x.relu().permute(0, 3, 1, 2).contiguous().relu(), (2, 4, 6, 8), []),
    "windows": (
        lambda x: x.relu().view(2, 3, 2, 2, 8).transpose(1, 2).reshape(4, 6, 8).transpose(1, 2).contiguous().transpose(1, 2).relu(),
        (2, 3, 4, 8),
        ["clone"],
    ),
    "channels of a part of a picture, shuffled": (
        lambda x: x.permute(0, 3, 1, 2).relu()[:, :6].unflatten(1, (2, 3)).transpose(1, 2).contiguous().flatten(1, 2).relu(),
        (2, 4, 5, 8),
        ["clone"],
    ),
    "channels of a picture, shuffled, which becomes one row": (
        lambda x: x.permute(0, 3, 1, 2).relu().unflatten(1, (2, 4)).transpose(1, 2).contiguous().view(2, 8, 1, 10).relu(),
        (2, 2, 5, 8),
        ["clone"],
    ),
    "as it lay, after one copy": (
        lambda x: x.relu().permute(2, 1, 0).contiguous().transpose(0, 1).reshape(16, 3).relu(), (3, 4, 4), ["clone"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_chains_that_are_joined(name: str) -> None:
    body, shape, wanted = JOINED[name]
    assert copies(rewritten(of(body), torch.randn(shape), 1)) == wanted


def copied_in_parts(x: torch.Tensor) -> object:
    picture = x.relu().permute(0, 3, 1, 2).contiguous()
    return [picture[:, place : place + 6].flatten(1).relu() for place in range(3)]


OTHERS: dict[str, tuple[Body, tuple[int, ...]]] = {
    "no copy": (lambda x: x.relu().view(2, 3, 4).transpose(0, 1).relu(), (6, 4)),
    "one copy that is needed": (lambda x: x.relu().t().contiguous().relu(), (6, 4)),
    "one that leaves the model": (lambda x: x.relu().permute(0, 3, 1, 2).contiguous(), (2, 4, 6, 8)),
    "one of which a part does": (lambda x: x.relu().permute(0, 3, 1, 2).contiguous()[0], (2, 4, 6, 8)),
    "as it was laid out": (lambda x: x.relu().permute(0, 3, 1, 2).clone().relu(), (2, 4, 6, 8)),
    "factors that do not divide": (lambda x: x.relu().t().reshape(3, 8).t().contiguous().relu(), (6, 4)),
    "one number in many places": (lambda x: x.relu().expand(4, 6).t().contiguous().t().relu(), (1, 6)),
    "matrices": (lambda x: x.relu().permute(0, 3, 1, 2).contiguous() @ x[0, 0, :, :3], (2, 4, 6, 8)),
    "read twice on the way": (lambda x: (y := x.relu().t().contiguous()).t().relu() + y.relu().t(), (6, 4)),
    "beside what looks at strides": (lambda x: (x.relu().t().contiguous().t().relu(), x.as_strided((2,), (1,)) + 1), (6, 4)),
    "what is then copied in parts, more of it": (copied_in_parts, (2, 4, 6, 8)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    body, shape = OTHERS[name]
    rewritten(of(body), torch.randn(shape), 0)


def test_copies_of_memory_that_changes_stay() -> None:
    draft = draft_of(of(lambda x: x.relu().t().contiguous().t() + 1), (torch.randn(6, 4),))
    changed = Ref(draft.nodes[0].outputs[0])
    draft.nodes.insert(-1, Node(torch.ops.aten.add_.Tensor, (changed, changed), {}, (-1,), "changes"))
    draft.observe()
    assert join_rearrangements(draft) == 0


def test_nothing_is_left_of_a_chain_that_changes_nothing() -> None:
    draft = rewritten(of(lambda x: x.abs().t().contiguous().t().relu()), torch.randn(6, 4), 1)
    assert [node.kind for node in draft.nodes] == ["aten::abs", "aten::relu"]


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("make", [Patches, Shuffles])
def test_a_model_returns_what_it_did_laid_out_as_before(make: Callable[[], nn.Module], lowering: Lowering) -> None:
    model, x = make().eval(), torch.randn(1, 3, 10, 12)
    found = capture(model, (x,), lowering=lowering)
    assert {item.name: item.applied for item in found.rewrites}["join_rearrangements"] == 2
    with torch.no_grad():
        [made], wanted = bind(found.program, found.constants, "cpu").run((x,)), model(x)
    torch.testing.assert_close(made, wanted)
    assert made.stride() == wanted.stride()


Step = tuple[str, tuple[int, ...]]
STEPS: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "permute": lambda x, dims: x.permute(dims),
    "transpose": lambda x, dims: x.transpose(*dims),
    "reshape": lambda x, shape: x.reshape(shape),
    "clone": lambda x, nothing: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x, nothing: x.contiguous(),
}


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[torch.Tensor, list[Step]]:
    """A tensor in any order, perhaps a part of another, and what is to be done with it."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    order, gap = draw(st.permutations(range(len(shape)))), draw(st.sampled_from([0, 0, 1]))
    x = torch.randn([shape[place] + gap for place in order]).permute([order.index(place) for place in range(len(order))])
    for place, size in enumerate(shape):
        x = x.narrow(place, 0, size)
    steps: list[Step] = []
    for kind in draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=7)):
        dims: tuple[int, ...] = ()
        if kind == "permute":
            dims = tuple(draw(st.permutations(range(len(shape)))))
            shape = [shape[place] for place in dims]
        elif kind == "transpose":
            one, other = dims = draw(st.tuples(*[st.integers(-len(shape), len(shape) - 1)] * 2))
            shape[one], shape[other] = shape[other], shape[one]
        elif kind == "reshape":
            left, shape = math.prod(shape), []
            for _ in range(draw(st.integers(0, 3))):
                shape.append(draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])))
                left //= shape[-1]
            shape.append(left)
            dims = tuple(shape)
        steps.append((kind, dims))
    return x, steps


@settings(max_examples=200, deadline=None)
@given(rearrangements())
def test_random_chains_give_the_same_and_copy_no_more(chain: tuple[torch.Tensor, list[Step]]) -> None:
    x, steps = chain

    def body(x: torch.Tensor) -> torch.Tensor:
        x = x.abs()
        for kind, dims in steps:
            x = STEPS[kind](x, dims)
        return x.relu()

    draft = draft_of(of(body).eval(), (x,))
    before = len(copies(draft))
    joined = join_rearrangements(draft)
    [made] = draft.observe().values()
    assert torch.equal(made.clone(), body(x))
    assert len(copies(draft)) <= (1 if joined else before)


@settings(max_examples=500, deadline=None)
@given(rearrangements())
def test_an_arrangement_is_what_pytorch_makes(chain: tuple[torch.Tensor, list[Step]]) -> None:
    x, steps = chain
    arranged, copied = arrangement_of(spec_of(x)), 0
    for kind, dims in steps:
        before, x = x, STEPS[kind](x, dims)
        copied += x.data_ptr() != before.data_ptr()
        assert arranged is not None
        rank = len(arranged.dimensions)
        if kind == "permute":
            arranged = arranged.permuted(dims)
        elif kind == "transpose":
            order = torch.arange(rank)
            order[list(dims)] = order[list(reversed(dims))]
            arranged = arranged.permuted(order.tolist())
        elif kind == "reshape":
            arranged = arranged.reshaped(dims)
        elif kind == "clone" or not arranged.lies(range(rank)):
            arranged = arranged.cloned()
        if arranged is None:
            return
    assert arranged is not None
    assert (arranged.shape(), arranged.copied) == (list(x.shape), copied)
    dense = [x.permute(order).is_contiguous() for order in itertools.permutations(range(x.ndim))]
    assert dense == [arranged.lies(order) for order in itertools.permutations(range(x.ndim))]
    assert not copied or x.permute(arranged.order()).is_contiguous()
