"""What a model takes: containers, keywords, numbers, and tensors laid out in odd ways."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from experiments.coverage_cases.odd.common import Linear, Point, Registered, case_list

CASES = case_list()


@CASES.model("keyword-arguments", kwargs=lambda: {"scale": torch.tensor(2.0), "shift": None})
class Keywords(Linear):
    def forward(self, x: Any, *, scale: Any = None, shift: Any = None) -> Any:
        y = self.layer(x) * scale
        return y if shift is None else y + shift


@CASES.model("variadic", lambda: (torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8)), kwargs=lambda: {"extra": torch.randn(8)})
class Variadic(Linear):
    def forward(self, *items: Any, **named: Any) -> Any:
        return self.layer(sum(items)) + named["extra"]


@CASES.model("numbers-and-flags", lambda: (torch.randn(4, 8), 3, 0.5, True, "gelu", None))
class NumbersAndFlags(Linear):
    def forward(self, x: Any, times: int, scale: float, flag: bool, kind: str, nothing: Any) -> Any:
        for _ in range(times):
            x = getattr(functional, kind)(self.layer(x)) * scale
        return x if flag else -x


@CASES.model("nested-inputs", lambda: ({"a": torch.randn(4, 8), "b": [torch.randn(8), (torch.randn(4, 8),)]},))
class NestedInputs(Linear):
    def forward(self, batch: Any) -> Any:
        return self.layer(batch["a"]) + batch["b"][0] + batch["b"][1][0]


@CASES.model("namedtuple-input", lambda: (Point(torch.randn(4, 8), torch.randn(4, 8)),))
class NamedtupleInput(Linear):
    def forward(self, point: Any) -> Any:
        return self.layer(point.left) - point.right


@CASES.model("dataclass-input", lambda: (Registered(torch.randn(4, 8), 2.0),))
class DataclassInput(Linear):
    def forward(self, box: Any) -> Any:
        return self.layer(box.value) * box.scale


@CASES.model("unused-input", lambda: (torch.randn(4, 8), torch.randn(3)))
class UnusedInput(Linear):
    def forward(self, x: Any, unused: Any) -> Any:
        return self.layer(x)


def _shared() -> tuple[Any, ...]:
    x = torch.randn(4, 8)
    return x, x[1:3], x


@CASES.model("inputs-that-share-memory", _shared)
class SharedInputs(Linear):
    def forward(self, x: Any, part: Any, again: Any) -> Any:
        return self.layer(x) + again, part * 2


@CASES.model("transposed-input", lambda: (torch.randn(8, 4).t(),))
class TransposedInput(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x + 1, x.reshape(-1)


@CASES.model("sliced-input", lambda: (torch.randn(8, 16)[::2, ::2],))
class SlicedInput(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x * 2, x.flatten()


@CASES.model("expanded-input", lambda: (torch.randn(1, 8).expand(4, 8),))
class ExpandedInput(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), x * 2
