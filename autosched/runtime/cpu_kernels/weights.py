"""Weights as the kernels multiply with them.

Of Winograd's algorithm, F(m x m, 3 x 3) computes a tile of m x m results from n = m + 2 numbers in each dimension as
``A' [(G g G') * (B' d B)] A`` (Lavin and Gray, arXiv:1509.09308, equation 8). What is made of the weights ``g`` is made here, once; of the
input ``d`` and of the products, in ``transforms.h``.
"""

from __future__ import annotations

import torch

# G of the paper's sections 4.1 and 4.2, by m.
_TRANSFORMS: dict[int, list[list[float]]] = {
    2: [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
    4: [
        [1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1],
    ],
}  # fmt: skip


def transformed(weight: torch.Tensor, outputs: int, lanes: int, groups: int = 1) -> torch.Tensor:
    """``weight`` as ``products.h`` reads it.

    Args:
        weight: float32 ``[features, channels of a group, 3, 3]``.
        outputs: of a tile, in one dimension: 2 or 4.
        lanes: numbers in a vector.

    Returns:
        float32, one dimension: of one group after the other, for each of the ``(outputs + 2)**2`` products of a tile, blocks of
        ``2 * lanes`` features (the last one may be of ``lanes``), each ``[channels, features of the block]``. Features that are missing in
        the last vector are zeros.
    """
    if groups > 1:
        return torch.cat([transformed(part, outputs, lanes) for part in weight.chunk(groups)])
    features, channels = weight.shape[:2]
    rule = torch.tensor(_TRANSFORMS[outputs], dtype=torch.float64, device="cpu")
    # Computed in float64: this is done once, and what is lost here is lost in every call.
    both = torch.kron(rule, rule) @ weight.to(torch.float64).reshape(features * channels, 9).t()
    points = both.to(torch.float32).reshape(-1, features, channels).transpose(1, 2)
    return in_blocks(points, lanes)


def summed(weight: torch.Tensor, lanes: int, *, groups: int, turned: bool) -> torch.Tensor:
    """``weight`` as ``summed.h``, ``each_channel.h`` or ``grouped.h`` reads it.

    Args:
        weight: float32 ``[features, channels of a group, rows, columns]``.
        lanes: numbers in a vector.
        turned: whether the channels of a pixel lie apart from each other; not of several groups.

    Returns:
        float32, one dimension: of a group for each channel and feature ``[rows, columns, channels]``; of several groups otherwise, see
        :func:`_grouped`; else blocks of features, of what is multiplied with one pixel after the other or, turned, with one channel after
        the other.
    """
    if weight.shape[:2] == (groups, 1) and groups > 1:
        return weight.squeeze(1).permute(1, 2, 0).reshape(-1)
    if groups > 1:
        return _grouped(weight, lanes, groups)
    order = (1, 2, 3, 0) if turned else (2, 3, 1, 0)
    return in_blocks(weight.permute(order).reshape(1, -1, weight.shape[0]), lanes)


def _grouped(weight: torch.Tensor, lanes: int, groups: int) -> torch.Tensor:
    """Blocks of two vectors of features, the last one of one if they are odd: each ``[rows, channels of a group, columns, features]``.

    Vectors hold several groups where whole ones of as many features as channels fill them, else each group begins a vector of its own.
    Features that are missing in a vector are zeros.
    """
    features, shape = weight.shape[0] // groups, weight.shape[1:]
    narrow = features == shape[0] and features < lanes and lanes % features == 0
    rows = weight.reshape(1 if narrow else groups, -1, *shape)
    padded = torch.zeros(rows.shape[0], -(-rows.shape[1] // lanes) * lanes, *shape, dtype=torch.float32, device="cpu")
    padded[:, : rows.shape[1]] = rows
    # Vectors, features of a vector, channels, rows, columns.
    pairs = torch.split(padded.reshape(-1, lanes, *shape), 2)
    return torch.cat([pair.permute(3, 2, 4, 0, 1).reshape(-1) for pair in pairs])


def of_halves(weight: torch.Tensor, lanes: int, *, pairs: bool) -> torch.Tensor:
    """``weight`` in sixteen bits, ``[features, channels]``, as ``half_products.h`` reads it: in blocks, see :func:`transformed`.

    Args:
        lanes: float32 numbers in a vector.
        pairs: whether two channels of a feature are side by side: they are even in number.
    """
    moved = weight.contiguous().view(torch.int32 if pairs else torch.int16)
    return in_blocks(moved.t().unsqueeze(0), lanes)


def of_bytes(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """``weight`` in eight bits, ``[features, channels]``, as ``byte_products.h`` reads it: four channels of a feature side by side.

    Args:
        lanes: float32 numbers in a vector.

    Returns:
        int32, one dimension: blocks as of :func:`transformed`; behind them -128 times the sum of each feature, for whole vectors of them.
    """
    features = weight.shape[0]
    sums = torch.zeros(-(-features // lanes) * lanes, dtype=torch.int32, device="cpu")
    sums[:features] = weight.sum(1, dtype=torch.int32) * -128
    return torch.cat([in_blocks(weight.contiguous().view(torch.int32).t().unsqueeze(0), lanes), sums])


def in_blocks(factors: torch.Tensor, lanes: int) -> torch.Tensor:
    """``factors``, ``[products, channels, features]``, as ``products.h`` reads them: see :func:`transformed`.

    Args:
        lanes: numbers in a vector.
    """
    products, channels, features = factors.shape
    padded = -(-features // lanes) * lanes
    whole = torch.zeros(products, channels, padded, dtype=factors.dtype, device="cpu")
    whole[:, :, :features] = factors
    edge = padded // (2 * lanes) * (2 * lanes)
    blocks = whole[:, :, :edge].reshape(products, channels, -1, 2 * lanes).transpose(1, 2)
    return torch.cat([blocks.reshape(products, -1), whole[:, :, edge:].reshape(products, -1)], dim=1).reshape(-1)
