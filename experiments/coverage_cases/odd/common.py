"""What the hand-written models stand on."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import torch
from torch import nn

from experiments.coverage_cases.case_list import CaseList

Point = namedtuple("Point", ["left", "right"])


@dataclasses.dataclass
class Boxed:
    value: torch.Tensor
    other: torch.Tensor | None = None


@dataclasses.dataclass
class Registered:
    value: torch.Tensor
    scale: float


torch.export.register_dataclass(Registered, serialized_type_name="experiments.coverage_cases.odd.Registered")


class Linear(nn.Module):
    """What most of the cases stand on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)


def rows() -> tuple[Any, ...]:
    """The positional arguments of most of the cases: four rows of eight numbers."""
    return (torch.randn(4, 8),)


def case_list() -> CaseList:
    """An empty list for the cases of one file."""
    return CaseList("odd", rows)
