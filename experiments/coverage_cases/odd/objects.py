"""Objects that a model takes, changes and returns: dataclasses that nobody registered, and containers that it changes in place."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from experiments.coverage_cases.odd.common import Boxed, Linear, Point, case_list

CASES = case_list()


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    pair: Point
    boxes: list[Boxed]
    name: str = "frozen"


@CASES.model("returns-frozen-dataclass")
class ReturnsFrozen(Linear):
    def forward(self, x: Any) -> Any:
        return {(0, "a"): Frozen(Point(self.layer(x), x + 1), [Boxed(x * 2), Boxed(x * 3, x * 4)])}


@CASES.model("returns-enum")
class ReturnsEnum(Linear):
    def forward(self, x: Any) -> Any:
        return self.layer(x), Colour.RED


@CASES.model("plain-dataclass-input", lambda: (Frozen(Point(torch.randn(4, 8), 2.0), [Boxed(torch.randn(4, 8))]),))
class PlainDataclassInput(Linear):
    def forward(self, given: Any) -> Any:
        return self.layer(given.pair.left) * given.pair.right + given.boxes[0].value, given


@CASES.model("dataclass-changed-and-returned", lambda: (Boxed(torch.randn(4, 8)), [Boxed(torch.randn(8))]))
class ChangedDataclass(Linear):
    def forward(self, box: Any, others: Any) -> Any:
        box.value = self.layer(box.value) + others[0].value
        return {"box": box, "same": others}


@CASES.model("dataclass-changed-and-kept", lambda: (Boxed(torch.randn(4, 8)),))
class KeptDataclass(Linear):
    def forward(self, box: Any) -> Any:
        box.other = self.layer(box.value)
        return box.other + 1


@CASES.model("list-that-grows", lambda: (torch.randn(4, 8), [torch.randn(4, 8)]))
class ListThatGrows(Linear):
    def forward(self, x: Any, history: Any) -> Any:
        history.append(self.layer(x))
        return sum(history)


@CASES.model("dictionary-that-shrinks", lambda: ({"x": torch.randn(4, 8), "scale": torch.randn(8)},))
class DictionaryThatShrinks(Linear):
    def forward(self, inputs: Any) -> Any:
        return self.layer(inputs["x"]) * inputs.pop("scale")


@CASES.model("tuple-keys-input", lambda: ({(0, 1): torch.randn(4, 8), None: torch.randn(8), 7: torch.randn(8)},))
class TupleKeys(Linear):
    def forward(self, table: Any) -> Any:
        return {key: self.layer(value) for key, value in table.items()}
