"""A randomly wired network: each stage is a Watts-Strogatz graph WS(32 nodes, 4 neighbours, rewiring 0.75), made acyclic.

*Source:* Xie, Kirillov, Girshick, He, "Exploring randomly wired neural networks for image recognition", ICCV 2019, section 3 (node:
weighted sum, ReLU, separable convolution, batch norm; edges point from the lower to the higher node; one input and one output node for
each stage). Channels are small, so that the graph and not its convolutions decides the time on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Unit(nn.Module):
    """One node: sum of its inputs weighted by a learned gate each, ReLU, 3x3 separable convolution, batch norm."""

    def __init__(self, inputs: int, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.randn(inputs)) if inputs > 1 else None
        self.depthwise = nn.Conv2d(channels_in, channels_in, 3, stride, 1, groups=channels_in, bias=False)
        self.pointwise = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Tensors of equal shape ``[batch, channels_in, h, w]`` to one of ``[batch, channels_out, h / stride, w / stride]``."""
        total = tensors[0]
        if self.gates is not None:
            gates = torch.sigmoid(self.gates)
            total = tensors[0] * gates[0]
            for position, tensor in enumerate(tensors[1:], start=1):
                total = total + tensor * gates[position]
        made: Tensor = self.norm(self.pointwise(self.depthwise(torch.relu(total))))
        return made


class Stage(nn.Module):
    """One random graph: nodes without predecessor read the stage's input with stride 2, those without successor are averaged."""

    def __init__(self, nodes: int, channels_in: int, channels_out: int, seed: int) -> None:
        super().__init__()
        import networkx

        wired = networkx.connected_watts_strogatz_graph(nodes, 4, 0.75, seed=seed)
        before: list[list[int]] = [[] for _ in range(nodes)]
        for a, b in wired.edges:
            before[max(a, b)].append(min(a, b))
        self.before = [sorted(items) for items in before]
        used = {item for items in self.before for item in items}
        self.last = [node for node in range(nodes) if node not in used]
        self.units = nn.ModuleList(
            Unit(max(1, len(items)), channels_out if items else channels_in, channels_out, 1 if items else 2) for items in self.before
        )

    def forward(self, tensor: Tensor) -> Tensor:
        """``[batch, channels_in, height, width]`` to ``[batch, channels_out, height/2, width/2]``."""
        made: list[Tensor] = []
        for unit, items in zip(self.units, self.before, strict=True):
            made.append(unit(*(made[item] for item in items)) if items else unit(tensor))
        total = made[self.last[0]]
        for node in self.last[1:]:
            total = total + made[node]
        return total / len(self.last)


class RandWire(nn.Module):
    """Input float32 ``[batch, 3, 224, 224]``, output float32 ``[batch, classes]``."""

    def __init__(self, nodes: int = 32, channels: tuple[int, ...] = (24, 48, 96), classes: int = 1000, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels[0] // 2, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels[0] // 2),
            nn.ReLU(),
            nn.Conv2d(channels[0] // 2, channels[0], 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels[0]),
        )
        widths = (channels[0], *channels)
        self.stages = nn.Sequential(*(Stage(nodes, widths[i], widths[i + 1], seed + i) for i in range(len(channels))))
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, image: Tensor) -> Tensor:
        """Stem, stages, mean over the image, classifier."""
        scores: Tensor = self.head(torch.relu(self.stages(self.stem(image))).mean(dim=(2, 3)))
        return scores


def make_randwire(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs."""
    return RandWire(), (torch.randn(batch, 3, 224, 224),)
