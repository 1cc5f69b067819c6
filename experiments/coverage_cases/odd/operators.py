"""What a model calls: every kind of product and convolution that rewriting folds or packs, and operators seldom met."""

# ruff: noqa: E501 (many calls a line)
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from experiments.coverage_cases.made import Made
from experiments.coverage_cases.odd.common import case_list

CASES = case_list()


class Blocks(nn.Module):
    """Convolutions, norms and linears of every kind that rewriting folds or packs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.second = nn.Conv2d(8, 8, 3, groups=8, stride=2, padding=1), nn.BatchNorm2d(8, affine=False)
        self.pointwise = nn.Conv2d(8, 16, 1)
        self.up, self.third = nn.ConvTranspose2d(16, 4, 2, 2), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.to(dtype)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.first(x)).relu()
        z = functional.hardswish(self.second(self.depthwise(y))) + functional.avg_pool2d(y, 2)
        w = self.third(self.up(functional.silu(self.pointwise(z))))
        return self.head(w.mean((2, 3))), self.head(w.permute(0, 2, 3, 1)), y, w


def _typed_blocks(dtype: torch.dtype) -> Made:
    return Made(Blocks(dtype), (torch.randn(2, 3, 8, 8, dtype=dtype),))


for _dtype in ("float16", "bfloat16", "float64"):
    CASES.add(f"blocks-{_dtype}", partial(_typed_blocks, getattr(torch, _dtype)))
CASES.model("blocks-without-rows", lambda: (torch.randn(0, 3, 8, 8),))(Blocks)
CASES.model("blocks-channels-last-input", lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),))(Blocks)
CASES.model("blocks-cropped-input", lambda: (torch.randn(2, 5, 12, 12)[:, 1:4, 2:10, 2:10],))(Blocks)


@CASES.model(
    "linears", lambda: (torch.randn(8), torch.randn(2, 3, 8), torch.randn(8, 4), torch.randn(1, 8).expand(5, 8), torch.randn(0, 8))
)
class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.plain, self.narrow = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 1)

    def forward(self, row: Any, cube: Any, turned: Any, spread: Any, none: Any) -> Any:
        found = [layer(item) for layer in (self.layer, self.plain, self.narrow) for item in (row, cube, turned.t(), spread, none)]
        bias = torch.addmm(self.layer.bias, turned.t(), self.layer.weight, beta=0.5, alpha=2)
        return (
            found,
            bias,
            torch.baddbmm(cube[:, :, :1], cube, cube.transpose(1, 2)),
            functional.linear(cube[..., ::2], self.layer.weight[:, ::2]),
        )


@CASES.function("attentions", lambda: (torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.rand(2, 1, 6, 6) > 0.4))
def _attentions(self: Any, query: Any, key: Any, mask: Any) -> Any:
    attend = functional.scaled_dot_product_attention
    wide = key.repeat_interleave(2, 1)
    mask = mask | torch.eye(6, dtype=torch.bool)
    return (
        attend(query, wide, wide), attend(query, wide, wide, mask), attend(query, wide, wide, is_causal=True, scale=0.3),
        attend(query, key, key, enable_gqa=True), attend(query[:, :, :3], wide, wide), attend(query.double(), wide.double(), wide.double()),
        attend(query, wide, wide, torch.zeros(6, 6).masked_fill(~mask[0, 0], float("-inf"))), attend(query.transpose(1, 2), wide.transpose(1, 2), wide.transpose(1, 2)),
    )  # fmt: skip


@CASES.function("sparse-inside")
def _sparse(self: Any, x: Any) -> Any:
    dense = torch.zeros(4, 4)
    dense[1, 2] = 3.0
    return torch.sparse.mm(dense.to_sparse(), x)


@CASES.function("sparse-input", lambda: (torch.eye(4).to_sparse(), torch.randn(4, 8)))
def _sparse_input(self: Any, sparse: Any, x: Any) -> Any:
    return torch.sparse.mm(sparse, x)


@CASES.model("sparse-weight")
class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(8).to_sparse_csr())

    def forward(self, x: Any) -> Any:
        return (self.weight @ x.t()).t()


@CASES.function("sorts-and-picks", lambda: (torch.randn(6, 8),))
def _sorts(self: Any, x: Any) -> Any:
    values, places = x.sort(1)
    top = x.topk(3, 1)
    return (
        values,
        places,
        top,
        x.max(0),
        x.argmax(),
        x.median(1),
        x.cummax(1),
        torch.searchsorted(values, x),
    )


@CASES.function("linear-algebra", lambda: (torch.eye(5) * 3 + torch.rand(5, 5) * 0.1,))
def _algebra(self: Any, x: Any) -> Any:
    symmetric = x @ x.t()
    return (
        torch.linalg.inv(x),
        torch.linalg.cholesky(symmetric),
        torch.linalg.solve(x, x + 1),
        torch.linalg.det(x),
        torch.linalg.norm(x),
        torch.linalg.eigvalsh(symmetric),
        torch.linalg.slogdet(x),
    )


@CASES.function("einsum-and-indexing", lambda: (torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.tensor([2, 0])))
def _einsum(self: Any, a: Any, b: Any, where: Any) -> Any:
    return (
        torch.einsum("bij,bjk->bik", a, b), a[where], a[:, where, 1:], a[..., -1], a[:, None, ::2], a.flip(1), a.roll(1, 2), torch.take_along_dim(a, where.view(2, 1, 1), 0),
        a.gather(0, where.view(2, 1, 1).expand(2, 4, 5)), torch.meshgrid(where, where, indexing="ij"), a.unbind(1), a.split([1, 3], 1), torch.tensor_split(a, 2, 2),
    )  # fmt: skip


@CASES.function("reduces-and-scans", lambda: (torch.randn(3, 4, 5),))
def _reduces(self: Any, x: Any) -> Any:
    return (
        x.std(), x.var(1, unbiased=False), x.logsumexp(2), x.prod(0), x.cumprod(1), x.amax((0, 2)), x.norm(dim=1), x.any(), (x > 0).all(1), x.mean((1, 2), keepdim=True),
        torch.std_mean(x, 1), torch.aminmax(x), x.diff(dim=1), x.histc(5), torch.cdist(x, x),   torch.trapezoid(x),
    )  # fmt: skip
