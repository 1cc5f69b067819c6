"""Models, and parts of models, that another of PyTorch's tools has made: scripted, traced, compiled, exported, quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments.coverage_cases.made import Made
from experiments.coverage_cases.odd.common import case_list, rows

CASES = case_list()


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


class Part(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.layer = part

    def forward(self, x: Any) -> Any:
        return self.layer(x) + 1


def _exported() -> Made:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    images = torch.randn(1, 3, 8, 8)
    return Made(torch.export.export(model, (images,)).module(), (images,), training=True, lively=False)


def _quantized() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    return Made(torch.ao.quantization.quantize_dynamic(model, {nn.Linear}), rows(), lively=False)


CASES.add("scripted", lambda: Made(torch.jit.script(_layers()), rows()))
CASES.add("scripted-part", lambda: Made(Part(torch.jit.script(_layers())), rows()))
CASES.add("traced-part", lambda: Made(Part(torch.jit.trace(_layers().eval(), *rows())), rows()))
CASES.add("compiled", lambda: Made(torch.compile(_layers(), backend="eager"), rows()))
CASES.add("compiled-part", lambda: Made(Part(torch.compile(_layers(), backend="eager")), rows()))
CASES.add("fx-traced", lambda: Made(torch.fx.symbolic_trace(_layers().eval()), rows()))
CASES.add("exported-program", _exported)
CASES.add("data-parallel", lambda: Made(nn.DataParallel(nn.Linear(8, 8)), rows()))
CASES.add("quantized-dynamically", _quantized)
