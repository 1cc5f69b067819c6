"""Activations that oneDNN applies to a result before writing it."""

from __future__ import annotations

from dataclasses import dataclass

from autosched.capture.draft import Node

_PLAIN = {
    "aten::relu": "relu", "aten::sigmoid": "sigmoid", "aten::tanh": "tanh", "aten::silu": "swish", "aten::hardswish": "hardswish",
    "aten::hardsigmoid": "hardsigmoid",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Activation:
    """oneDNN's name of an activation, its numbers, and its algorithm."""

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


NONE = Activation("none")


def read_activation(node: Node) -> Activation | None:
    """The activation that ``node`` is, or None."""
    if len(node.outputs) != 1 or node.mutates():
        return None
    if node.kind in _PLAIN:
        return Activation(_PLAIN[node.kind])
    if node.kind == "aten::gelu":
        return Activation("gelu", (), str(node.argument("approximate")))
    if node.kind == "aten::leaky_relu":
        return _with_numbers("leaky_relu", node.argument("negative_slope"))
    if node.kind == "aten::hardtanh":
        return _with_numbers("hardtanh", node.argument("min_val"), node.argument("max_val"))
    if node.kind == "aten::relu6":
        return Activation("hardtanh", (0.0, 6.0))
    if node.target == "aten::clamp.default":
        found = _with_numbers("hardtanh", node.argument("min"), node.argument("max"))
        # oneDNN refuses limits in the wrong order, of which PyTorch takes the upper.
        return found if found is not None and found.scalars[0] <= found.scalars[1] else None
    if node.target == "aten::clamp_min.default" and node.argument("min") == 0:
        return Activation("relu")
    return None


def _with_numbers(name: str, *numbers: object) -> Activation | None:
    given = [float(number) for number in numbers if isinstance(number, int | float)]
    return Activation(name, tuple(given)) if len(given) == len(numbers) else None
