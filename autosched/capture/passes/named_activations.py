"""Activations that a model spells out, found by what they compute and called by their names, as kernels and other passes know them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.nn import functional

from autosched.capture.arguments import map_refs
from autosched.capture.draft import Draft, Node
from autosched.core.program import Ref

aten = torch.ops.aten
# What spellings end in, what they have to contain, and what else they are made of.
_LAST = frozenset({"aten::mul", "aten::div"})
_CURVED = frozenset(
    f"aten::{name}"
    for name in ("tanh", "erf", "sigmoid", "exp", "log", "log1p", "softplus", "clamp", "clamp_min", "relu", "relu6", "hardtanh")
)
_PLAIN = _CURVED | _LAST | {"aten::add", "aten::sub", "aten::rsub", "aten::neg", "aten::pow", "aten::reciprocal"}
_MOST_CALLS = 12
# Constants are written with ten digits and more.
_CLOSE = 1e-8
_Numbers = Callable[[torch.Tensor], torch.Tensor]
_KNOWN: tuple[tuple[OpOverload[..., Any], dict[str, object], _Numbers], ...] = (
    (aten.gelu.default, {}, functional.gelu),
    (aten.gelu.default, {"approximate": "tanh"}, lambda x: functional.gelu(x, approximate="tanh")),
    (aten.silu.default, {}, functional.silu),
    (aten.hardswish.default, {}, functional.hardswish),
    (aten.mish.default, {}, functional.mish),
)


def name_activations(draft: Draft) -> int:
    """``gelu``, ``silu``, ``hardswish`` and ``mish`` of several calls, each of one tensor and numbers, become one; returns how many.

    transformers spells GELU by the hyperbolic tangent in GPT-2 and many others. A spelling is known by its results on numbers in float64.
    In sixteen bits the call rounds once, and the model at every step.
    """
    finder = _Finder(draft)
    named = 0
    for node in draft.nodes:
        found = finder.ending_at(node)
        if found is not None:
            source, place = found
            op, kwargs, _ = _KNOWN[place]
            node.op, node.args, node.kwargs = op, (Ref(source),), dict(kwargs)
            named += 1
    if named:
        draft.remove_dead()
    return named


@dataclass(slots=True)
class _Finder:
    draft: Draft
    users: dict[int, list[Node]] = field(init=False)
    producers: dict[int, Node] = field(init=False)
    places: dict[Node, int] = field(init=False)
    leaving: set[int] = field(init=False)
    # By what is called, with which numbers: the place in ``_KNOWN``, or None.
    known: dict[tuple[object, ...], int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.users, self.producers = self.draft.users(), self.draft.producers()
        self.places = {node: place for place, node in enumerate(self.draft.nodes)}
        self.leaving = set(self.draft.output_values())

    def ending_at(self, last: Node) -> tuple[int, int] | None:
        """What the activation whose last call is ``last`` reads, and its place in ``_KNOWN``.

        Calls are added from the last one back, always the latest of those that make what is read, until one tensor is read.
        """
        if last.kind not in _LAST or not self._fits(last, last):
            return None
        calls, read = [last], set(last.reads())
        while len(calls) < _MOST_CALLS:
            if len(read) == 1 and any(call.kind in _CURVED for call in calls):
                [source] = read
                place = self._known_as(calls[::-1], source)
                if place is not None:
                    return source, place
            makers = [self.producers[value] for value in read if value in self.producers]
            latest = max(makers, key=lambda node: self.places.get(node, -1), default=None)
            if latest is None or not self._fits(latest, last) or not self._alone(latest, calls):
                return None
            calls.append(latest)
            read = (read - set(latest.outputs)) | set(latest.reads())
        return None

    def _fits(self, node: Node, last: Node) -> bool:
        """Whether each number that it makes comes from one number in the same place."""
        if node.kind not in _PLAIN or node.mutates() or len(node.outputs) != 1 or node.outputs[0] < 0 or node not in self.places:
            return False
        specs = self.draft.specs
        made = specs[last.outputs[0]]
        alike = all((specs[value].dtype, specs[value].shape) == (made.dtype, made.shape) for value in (*node.reads(), node.outputs[0]))
        return alike and made.dtype in ("float32", "float64", "bfloat16", "float16")

    def _alone(self, node: Node, calls: list[Node]) -> bool:
        [made] = node.outputs
        return made not in self.leaving and all(user in calls for user in self.users.get(made, ()))

    def _known_as(self, calls: list[Node], source: int) -> int | None:
        order = {source: 0} | {call.outputs[0]: place for place, call in enumerate(calls, 1)}

        def numbered(argument: object) -> object:
            return map_refs(argument, lambda value: Ref(order[value]))

        key = tuple((call.target, repr(numbered(call.args)), repr(numbered([*call.kwargs, *call.kwargs.values()]))) for call in calls)
        if key not in self.known:
            self.known[key] = _place_of(calls, source)
        return self.known[key]


def _place_of(calls: list[Node], source: int) -> int | None:
    """Which of ``_KNOWN`` the calls compute of numbers that become ``source``."""
    far = torch.tensor([-1e4, -300.0, -40.0, 40.0, 300.0, 1e4], dtype=torch.float64, device="cpu")
    numbers = torch.cat([torch.linspace(-12, 12, 1201, dtype=torch.float64, device="cpu"), far])
    values = {source: numbers}
    for call in calls:
        args = [values[item.value] if isinstance(item, Ref) else item for item in call.args]
        kwargs = {name: values[item.value] if isinstance(item, Ref) else item for name, item in call.kwargs.items()}
        values[call.outputs[0]] = call.op(*args, **kwargs)
    made = values[calls[-1].outputs[0]]
    for place, (_, _, function) in enumerate(_KNOWN):
        if bool(((made - function(numbers)).abs() <= _CLOSE * (1 + numbers.abs())).all()):
            return place
    return None
