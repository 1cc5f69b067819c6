"""Pictures made of rows of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autosched.capture.draft import Draft
from autosched.capture.export import capture, draft_of
from autosched.capture.passes.channels_last import in_channels_last_order
from autosched.capture.passes.token_pictures import order_token_pictures
from autosched.core.program import Ref
from autosched.runtime.kernels import bind
from tests.conformance.apply import Apply

Body = Callable[[torch.Tensor], object]

PICTURES: dict[str, Body] = {
    "transposed": lambda x: F.interpolate(x.transpose(1, 2).reshape(1, 8, 4, 6), (8, 12)),
    "transposed, counted from the end": lambda x: F.interpolate(x.transpose(-1, -2).view(1, 8, 4, 6), (8, 12)),
    "permuted": lambda x: F.interpolate(x.permute(0, 2, 1).reshape(1, 8, 4, 6), (8, 12)),
}


def observed(body: Body, x: torch.Tensor, expected: int) -> Draft:
    model = Apply(lambda m, x: body(x)).eval()
    draft = draft_of(model, (x,))
    assert order_token_pictures(draft) == expected
    made = draft.observe()
    for leaf, reference in zip(draft.output_leaves, torch.utils._pytree.tree_leaves(model(x)), strict=True):
        assert isinstance(leaf, Ref)
        assert torch.equal(made[leaf.value], reference)
    return draft


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_channels_last_and_so_is_what_is_made_of_it(name: str) -> None:
    draft = observed(PICTURES[name], torch.randn(1, 24, 8), 1)
    [last] = draft.output_values()
    assert in_channels_last_order(draft.specs[last])


OTHERS: dict[str, tuple[Body, tuple[int, ...]]] = {
    "several, which are channels last": (lambda x: x.transpose(1, 2).reshape(2, 8, 4, 6).relu(), (2, 24, 8)),
    "of other channels": (lambda x: x.transpose(1, 2).reshape(1, 4, 8, 6).relu(), (1, 24, 8)),
    "of rows that were copied": (lambda x: x.transpose(1, 2).contiguous().reshape(1, 8, 4, 6).relu(), (1, 24, 8)),
    "of channels that lie apart": (lambda x: x[..., ::2].transpose(1, 2).reshape(1, 4, 4, 6).relu(), (1, 24, 8)),
    "of lines": (lambda x: x.transpose(1, 2).reshape(1, 8, 24).relu(), (1, 24, 8)),
    "not turned": (lambda x: x.transpose(0, 1).reshape(1, 24, 4, 2).relu(), (24, 1, 8)),
    "beside what looks at strides": (lambda x: (x.transpose(1, 2).reshape(1, 8, 4, 6).relu(), x.as_strided((2,), (1,)) + 1), (1, 24, 8)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    body, shape = OTHERS[name]
    observed(body, torch.randn(shape), 0)


def test_a_model_returns_what_it_did_laid_out_as_before() -> None:
    def body(x: torch.Tensor) -> object:
        enlarged = F.interpolate(x.transpose(1, 2).reshape(1, 8, 4, 6), (8, 12), mode="bilinear")
        return enlarged, enlarged.relu().view(1, 8, 96), enlarged.sigmoid()[0]

    x = torch.randn(1, 24, 8)
    model = Apply(lambda m, x: body(x)).eval()
    found = capture(model, (x,))
    with torch.no_grad():
        made = bind(found.program, found.constants, "cpu").run((x,))
    for mine, wanted in zip(made, body(x), strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(mine, wanted)
        assert mine.stride() == wanted.stride()
