"""Expressions of code that Inductor wrote, as data: literals, and which registered operator a call means.

What is not known for certain is :class:`Unrecognised`. Private interfaces: the names that generated code uses, as in PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from autosched.core.program import Argument, NonFinite, TorchLiteral
from autosched.runtime.inductor.source import Unrecognised, dotted, shown

Schema = Any
"""PyTorch's ``FunctionSchema``, which has no public name."""

# Under these names generated code calls a library with an output argument.
_LIBRARY: Mapping[str, tuple[object, str]] = {
    "mm": (torch.mm, "aten::mm.out"),
    "bmm": (torch.bmm, "aten::bmm.out"),
    "addmm": (torch.addmm, "aten::addmm.out"),
    "baddbmm": (torch.baddbmm, "aten::baddbmm.out"),
    "_int_mm": (torch._int_mm, "aten::_int_mm.out"),
    "convolution": (torch.convolution, "aten::convolution.default"),
}


def literal_of(expression: ast.expr) -> Argument:
    """An argument without tensors that is neither a list nor a tuple.

    Raises:
        Unrecognised: if it is anything else.

    >>> literal_of(ast.parse("-2.5", mode="eval").body), literal_of(ast.parse("torch.float32", mode="eval").body)
    (-2.5, TorchLiteral(kind='dtype', name='float32'))
    """
    match expression:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as number):
            return _float(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=bool())):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = literal_of(operand)
            if isinstance(inner, float | NonFinite):
                return _float(-float(inner.name if isinstance(inner, NonFinite) else inner))
        case ast.Name(id="inf" | "nan" as name):
            return _float(float(name))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="inf" | "-inf" | "nan" as name)], keywords=[]):
            return _float(float(name))
        case ast.Call(func=function) if dotted(function) in ("device", "torch.device"):
            return TorchLiteral("device", "cpu") if _is_cpu(expression) else _refuse(expression)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            found = getattr(torch, name, None)
            if (kind := _kind(found)) is not None:
                return TorchLiteral(kind, str(found).removeprefix("torch."))
        case _:
            pass
    return _refuse(expression)


def dtype_of(expression: ast.expr) -> str:
    """The name of a dtype, as in ``TensorSpec``."""
    found = literal_of(expression)
    if isinstance(found, TorchLiteral) and found.kind == "dtype":
        return found.name
    raise Unrecognised(f"{shown(expression)} is not a dtype")


def library_of(name: str, namespace: Mapping[str, Any]) -> str:
    """What ``extern_kernels.name`` calls, as ``Call.target``.

    Raises:
        Unrecognised: if it is not known, or another function has been put there.
    """
    function, target = _LIBRARY.get(name, (None, ""))
    if function is None or getattr(namespace.get("extern_kernels"), name, None) is not function:
        raise Unrecognised(f"extern_kernels.{name} is no operator that is known here")
    return target


def is_bias_addmm(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether ``extern_kernels.name`` is Inductor's function that drops the broadcast dimension of a bias before ``addmm``."""
    function = getattr(namespace.get("extern_kernels"), name, None)
    return name == "bias_addmm" and getattr(function, "__module__", "") == "torch._inductor.kernel.mm"


def operator_of(callee: str, namespace: Mapping[str, Any]) -> str:
    """The overload that ``torch.ops.ns.name.overload``, or ``aten.name``, means, as ``Call.target``.

    Raises:
        Unrecognised: if it is no operator, or one of several overloads.
    """
    root, *rest = callee.split(".")
    found: Any = namespace.get(root)
    try:
        for part in rest:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if isinstance(found, torch._ops.OpOverloadPacket):
        names = found.overloads()  # type: ignore[no-untyped-call]
        if len(names) != 1:
            raise Unrecognised(f"{callee} is one of {len(names)} overloads")
        found = getattr(found, names[0])
    if not isinstance(found, torch._ops.OpOverload):
        raise Unrecognised(f"{callee} is no registered operator")
    return f"{found.namespace}::{found._opname}.{found._overloadname}"


def schema_of(target: str) -> Schema:
    """The schema of an operator that :func:`operator_of` or :func:`library_of` found."""
    namespace, _, rest = target.partition("::")
    name, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema


def _is_cpu(call: ast.Call) -> bool:
    """Whether ``device(...)`` is the CPU."""
    given = [ast.unparse(item) for item in call.args] + [ast.unparse(item.value) for item in call.keywords if item.arg == "type"]
    return given == ["'cpu'"] and len(call.args) + len(call.keywords) == 1


def _kind(found: object) -> Literal["dtype", "layout", "memory_format"] | None:
    if isinstance(found, torch.dtype):
        return "dtype"
    if isinstance(found, torch.layout):
        return "layout"
    return "memory_format" if isinstance(found, torch.memory_format) else None


def _float(number: float) -> float | NonFinite:
    if math.isfinite(number):
        return number
    return NonFinite("nan" if math.isnan(number) else "inf" if number > 0 else "-inf")


def _refuse(expression: ast.expr) -> Argument:
    raise Unrecognised(f"{shown(expression)} is no literal that is known here")
