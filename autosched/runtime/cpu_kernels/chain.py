"""Which convolutions are computed together with the depthwise one that alone reads them: a few channels, a line at a time.

What lies between, several times as large as what networks for small devices have before and after it (the expansion of an inverted
bottleneck), is then never written to memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autosched.config import own_convolutions_wanted
from autosched.core.graph import Operator, OpGraph, ValueRole
from autosched.core.program import Call
from autosched.runtime.cpu_kernels import direct
from autosched.runtime.cpu_kernels.convolution import Convolution
from autosched.runtime.cpu_kernels.weights import in_blocks, summed

# Those that the kernel has code for, of the second.
_MOST_TALL, _WIDTHS, _STEPS = 7, (3, 5, 7), (1, 2)


@dataclass(frozen=True, slots=True)
class Chain:
    """Two convolutions, of which the second has a group for each channel, and alone reads what the first makes.

    Args:
        before: the call that is the first, which need not run.
    """

    before: tuple[Call, ...]
    first: Convolution
    second: Convolution

    groups = 1

    @property
    def source(self) -> int:
        """The slot that the first reads."""
        return self.first.source

    @property
    def made(self) -> int:
        """The slot that the second makes."""
        return self.second.made

    @property
    def after(self) -> Call | None:
        """An activation that the kernel does not have, which changes the result in place."""
        return self.second.after

    @property
    def beside(self) -> tuple[int, ...]:
        """What is read beside the source: nothing, biases are with the weights."""
        return ()

    @property
    def weights(self) -> tuple[int, ...]:
        """Slots of what is packed in the kernel's own way: of each convolution its weight and, if it has one, its bias."""
        both = ((item.weight, item.bias) for item in (self.first, self.second))
        return tuple(slot for pair in both for slot in pair if slot is not None)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The slots that it does without."""
        return self.weights

    @property
    def turned(self) -> bool:
        """Whether the channels of a pixel that the first reads lie apart from each other."""
        return self.first.turned


def may_be_chain(operator: Operator, graph: OpGraph) -> bool:
    """Whether ``operator`` has two convolutions for the kernel."""
    makers = {value: call for call in operator.calls for value in call.outputs if value >= 0}
    return own_convolutions_wanted() and any(read_chain(call, graph, makers) is not None for call in operator.calls)


def read_chain(call: Call, graph: OpGraph, makers: Mapping[int, Call]) -> Chain | None:
    """What ``call`` computes, with the call that makes what it reads, if the kernel can; slots are values of ``graph``.

    Args:
        makers: of values that no call but ``call`` may read.
    """
    second = direct.read_direct(call, graph)
    before = None if second is None else makers.get(second.source)
    first = None if before is None else direct.read_direct(before, graph)
    if first is None or second is None or before is None or first.groups > 1 or second.groups == 1:
        return None
    features, channels, tall, wide = graph.values[second.weight].spec.shape
    if (features, channels) != (second.groups, 1):
        return None
    if tall > _MOST_TALL or wide not in _WIDTHS or second.stride[1] not in _STEPS or second.dilation != (1, 1):
        return None
    if first.residual is not None or second.residual is not None or first.after is not None:
        return None
    biases = [item.bias for item in (first, second) if item.bias is not None]
    return Chain((before,), first, second) if all(graph.values[slot].role is ValueRole.CONSTANT for slot in biases) else None


def geometry(chain: Chain, graph: OpGraph, width: int) -> torch.Tensor:
    """Numbers in the order of ``Chained`` in ``chain.h``, int64."""
    return torch.cat([direct.geometry(item, graph, width) for item in (chain.first, chain.second)])


def packed(chain: Chain, weights: Sequence[torch.Tensor], lanes: int) -> torch.Tensor:
    """``weights`` as ``chain.h`` reads them.

    Args:
        weights: float32, those of the slots of :attr:`Chain.weights`.
        lanes: numbers in a vector.
    """
    given = dict(zip(chain.weights, weights, strict=True))
    deep = given[chain.second.weight].squeeze(1).permute(1, 2, 0)
    factors = (
        summed(given[chain.first.weight], lanes, groups=1, turned=chain.turned),
        in_blocks(deep.reshape(1, -1, deep.shape[-1]), lanes),
    )
    parts: list[torch.Tensor] = []
    for item, numbers in zip((chain.first, chain.second), factors, strict=True):
        bias = torch.zeros(-(-deep.shape[-1] // lanes) * lanes, dtype=torch.float32, device="cpu")
        if item.bias is not None:
            bias[: deep.shape[-1]] = given[item.bias]
        parts += [numbers, bias]
    return torch.cat(parts)
