"""DeepFM: 64 embedding look-ups, a factorisation machine and a small multi-layer perceptron; a recommender of many tiny operators.

*Source:* Guo, Tang, Ye, Li, He, "DeepFM: a factorization-machine based neural network for CTR prediction", IJCAI 2017, section 2.
Sizes: 32 sparse fields, field i with ``100 (i + 1)`` entries, 16 dense features, embeddings of 8, layers of 256 and 128.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FIELDS, _DENSE, _WIDTH = 32, 16, 8


class DeepFM(nn.Module):
    """Inputs int64 ``[batch, 32]`` and float32 ``[batch, 16]``, output float32 ``[batch, 1]`` in 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [100 * (field + 1) for field in range(_FIELDS)]
        self.first = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        self.second = nn.ModuleList(nn.Embedding(size, _WIDTH) for size in sizes)
        self.dense_first = nn.Linear(_DENSE, 1)
        self.deep = nn.Sequential(
            nn.Linear(_FIELDS * _WIDTH + _DENSE, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """First-order terms, pairwise terms as half of (square of the sum minus sum of the squares), and the deep part."""
        columns = [sparse[:, field] for field in range(_FIELDS)]
        linear = torch.cat([table(column) for table, column in zip(self.first, columns, strict=True)], dim=1).sum(dim=1, keepdim=True)
        vectors = [table(column) for table, column in zip(self.second, columns, strict=True)]
        stacked = torch.stack(vectors, dim=1)
        pairwise = 0.5 * (stacked.sum(dim=1).square() - stacked.square().sum(dim=1)).sum(dim=1, keepdim=True)
        deep = self.deep(torch.cat([*vectors, dense], dim=1))
        return torch.sigmoid(linear + self.dense_first(dense) + pairwise + deep)


def make_deepfm(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs."""
    return DeepFM(), (torch.randint(0, 100, (batch, _FIELDS)), torch.randn(batch, _DENSE))
