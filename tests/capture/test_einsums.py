"""Sums of products written as ``einsum`` become matrix products on a CPU: which do, and what they compute then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.variants import Lowering
from autosched.runtime.kernels import bind

SIZES = {"b": 2, "h": 3, "i": 5, "j": 7, "d": 4, "c": 6, "e": 8, "u": 1}
# The equation, the calls that it becomes without those that only view or copy, and whether the second operand is a weight.
SPELLED = {
    "scores": ("bhid,bhjd->bhij", "matmul", False),
    "scores, as words": ("b h i d, b h j d -> b h i j", "matmul", False),
    "heads behind": ("bihd,bjhd->bhij", "matmul", False),
    "values, heads behind": ("bhij,bjhd->bihd", "matmul", False),
    "dots": ("... i d, ... j d -> ... i j", "matmul", False),
    "dots that stand for nothing": ("...id,...dj->...ij", "matmul", False),
    "a table for each row": ("bhid,ijd->bhij", "matmul", False),
    "a vector": ("bid,bd->bi", "matmul", False),
    "several at once, turned": ("bicd,bjdc->jbi", "matmul", False),
    "of one number": ("bhud,bhjd->bhuj", "matmul", False),
    "dots of one alone": ("...id,de->...ie", "linear", True),
    "a layer": ("bid,ed->bie", "linear", True),
    "heads from a layer": ("bid,dhc->bhic", "linear", True),
    "heads into a layer": ("bihc,hcd->bid", "linear", True),
    "a layer to one number": ("bid,d->bi", "linear", True),
    "a layer for a vector": ("d,dhe->he", "linear", True),
    "weights of their own for each": ("bhid,hde->bhie", "matmul", True),
}
LEFT_ALONE = {
    "an outer product": "bi,bj->bij",
    "a diagonal": "bii,bj->bij",
    "a sum of one alone": "bij,bd->bd",
    "a result that is not said": "bij,bjd",
}


class Net(nn.Module):
    """``equation`` of two inputs, or of one and a weight."""

    def __init__(self, equation: str, weight: torch.Tensor | None) -> None:
        super().__init__()
        self.equation = equation
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum(self.equation, x, y if self.weight is None else self.weight) + 1


def operands_of(equation: str, dots: tuple[int, ...] = (2, 3)) -> list[torch.Tensor]:
    torch.manual_seed(0)
    terms = equation.partition("->")[0].replace(" ", "").split(",")
    ahead = [dots if "..." in term else () for term in terms]
    return [torch.randn(*before, *(SIZES[letter] for letter in term if letter != ".")) for term, before in zip(terms, ahead, strict=True)]


def calls_of(found: Captured) -> list[str]:
    calls = [call for operator in found.program.graph.operators for call in operator.calls]
    names = [call.target.removeprefix("aten::").split(".")[0] for call in calls]
    return [name for name in names if name not in ("permute", "reshape", "view", "transpose", "add", "unsqueeze", "squeeze", "clone")]


def run(model: Net, found: Captured, inputs: list[torch.Tensor]) -> None:
    [got] = bind(found.program, found.constants, "cpu").run(inputs)
    with torch.no_grad():
        wanted = model(*inputs)
    assert torch.allclose(got, wanted, atol=1e-5)
    assert got.shape == wanted.shape
    assert got.is_contiguous() or not wanted.is_contiguous()


@pytest.mark.parametrize("name", SPELLED)
def test_it_becomes_a_product(name: str) -> None:
    equation, product, weighs = SPELLED[name]
    one, other = operands_of(equation, () if "nothing" in name else (2, 3))
    model = Net(equation, other if weighs else None).eval()
    found = capture(model, (one, other), lowering=Lowering.REWRITTEN)
    assert calls_of(found) == [product]
    run(model, found, [one, other])


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_sums_stay_as_they_are(name: str) -> None:
    inputs = operands_of(LEFT_ALONE[name])
    if "diagonal" in name:
        inputs[0] = torch.randn(2, 5, 5)
    model = Net(LEFT_ALONE[name], None).eval()
    found = capture(model, tuple(inputs), lowering=Lowering.REWRITTEN)
    assert calls_of(found) == ["einsum"]
    run(model, found, inputs)


def test_sizes_of_one_number_that_are_repeated_stay_as_they_are() -> None:
    inputs = [torch.randn(1, 5, 4), torch.randn(2, 7, 4)]
    model = Net("bid,bjd->bij", None).eval()
    found = capture(model, tuple(inputs), lowering=Lowering.REWRITTEN)
    assert calls_of(found) == ["einsum"]
    run(model, found, inputs)


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.FUSED])
def test_attention_written_so_becomes_one_call(lowering: Lowering) -> None:
    """As many models of research have it; what views the results can do so."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taken = nn.Linear(12, 36)
            self.given = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (3, 4)) for part in self.taken(x).chunk(3, -1))
            weights = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.5).softmax(-1)
            made: torch.Tensor = self.given(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))
            return made

    model, x = Attention().eval(), torch.randn(2, 5, 12)
    found = capture(model, (x,), lowering=lowering)
    targets = [call.target for operator in found.program.graph.operators for call in operator.calls]
    assert targets.count("aten::scaled_dot_product_attention.default") == 1
    assert not {"aten::einsum.default", "aten::matmul.default"} & set(targets)
    assert torch.allclose(bind(found.program, found.constants, "cpu").run([x])[0], model(x), atol=1e-5)


def test_a_mask_that_is_turned_by_one_is_no_reason_to_spell_out_the_others() -> None:
    """As XLNet has it, which takes the mask away."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            scores = torch.einsum("ibnd,jbnd->bnij", x, x + 1.0) - 1e30 * torch.einsum("ijbn->bnij", hidden)
            return torch.einsum("bnij,jbnd->ibnd", scores.softmax(3), x) * 2

    hidden = torch.ones(5, 5).triu(1)[:, :, None, None].expand(5, 5, 2, 1).contiguous()
    model, inputs = Attention().eval(), (torch.randn(5, 2, 3, 4), hidden)
    found = capture(model, inputs, lowering=Lowering.REWRITTEN)
    targets = [call.target for operator in found.program.graph.operators for call in operator.calls]
    assert targets.count("aten::scaled_dot_product_attention.default") == 1
    assert not {"aten::einsum.default", "aten::matmul.default", "aten::bmm.default"} & set(targets)
    assert torch.allclose(bind(found.program, found.constants, "cpu").run(list(inputs))[0], model(*inputs), atol=1e-5)


@pytest.mark.parametrize("equation", ["ij->ji", "ij -> ij", "ij->j", "ii->i", "...j->j...", "ij"])
def test_one_tensor_is_turned_summed_or_cut(equation: str) -> None:
    class Turning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum(equation, x) * 2

    x = torch.randn(4, 4)
    found = capture(Turning(), (x,), lowering=Lowering.REWRITTEN)
    assert torch.equal(bind(found.program, found.constants, "cpu").run([x])[0], Turning()(x))


def test_what_views_the_result_copies_where_it_cannot_view_it() -> None:
    """PyTorch lays this one out by ``bji``, so that the model may view it so."""

    class Viewing(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.einsum("bicd,bjdc->jbi", x, y).transpose(0, 1).view(2, 35) * 2

    model, inputs = Viewing().eval(), operands_of("bicd,bjdc->jbi")
    found = capture(model, tuple(inputs), lowering=Lowering.REWRITTEN)
    assert calls_of(found)[:1] == ["matmul"]
    assert torch.allclose(bind(found.program, found.constants, "cpu").run(inputs)[0], model(*inputs), atol=1e-5)
