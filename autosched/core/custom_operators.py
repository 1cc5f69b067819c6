"""Custom operators, by namespace: which ones a caller trusts, and what one must be like to be scheduled.

A bundle may come from a stranger and may name any operator that some imported package registered. So no operator outside PyTorch's own
namespaces is captured or run unless the caller says that its namespace is trusted, for this call: trust holds within one ``with
trusting(...)`` and its thread, not for the process, so that what one bundle was allowed no other gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from autosched.core.errors import UsageError

BUILT_IN = frozenset({"aten", "prims", "mkldnn", "mkl", "quantized_decomposed", "autosched"})
"""Namespaces whose operators may run from any schedule."""

ON_IMPORT = {"quantized_decomposed": "torch.ao.quantization.fx._decomposed"}
"""Those of them that PyTorch registers only when a module of its own is imported, with that module."""

# What launches of Inductor's code are called in a graph; there are no operators of these names.
_LAUNCHES = "inductor"

_trusted: ContextVar[frozenset[str]] = ContextVar("trusted_namespaces", default=frozenset())


def trusted() -> frozenset[str]:
    """The namespaces that the caller trusts, beside ``BUILT_IN``."""
    return _trusted.get()


@contextmanager
def trusting(namespaces: Iterable[str]) -> Iterator[None]:
    """Within the block, and on this thread, operators of ``namespaces`` may be captured and run.

    Raises:
        UsageError: as :func:`parse_namespaces`.
    """
    before, wanted = _trusted.get(), frozenset(parse_namespaces(namespaces))
    try:
        _trusted.set(wanted)
        yield
    finally:
        _trusted.set(before)


def trust_for_good(namespaces: Iterable[str]) -> None:
    """Trust ``namespaces`` for as long as this thread lives: for a process that serves one job."""
    _trusted.set(frozenset(parse_namespaces(namespaces)))


def parse_namespaces(given: object) -> tuple[str, ...]:
    """``given`` in order, each namespace once.

    Raises:
        UsageError: if it is no collection of names.

    >>> parse_namespaces(["mylib", "other", "mylib"])
    ('mylib', 'other')
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(f"custom_operators is {given!r}; expected a tuple of namespaces. For one, write ('mylib',).")
    found = tuple(given)
    for name in found:
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(f"custom_operators holds {name!r}; expected the namespace of an operator, such as 'mylib' of mylib::norm.")
    return tuple(dict.fromkeys(found))


def is_custom(name: str) -> bool:
    """Whether an operator (``namespace::name``, with or without its overload) is none of PyTorch's own.

    >>> is_custom("mylib::norm.default"), is_custom("aten::mm"), is_custom("inductor::mm.0")
    (True, False, False)
    """
    namespace, separator, _ = name.partition("::")
    return bool(separator) and namespace not in BUILT_IN and namespace != _LAUNCHES


def known_kind(kind: str) -> str:
    """``kind``, or nothing for a custom operator: that one is called ``my_mm`` says nothing of what it does.

    >>> known_kind("aten::mm"), known_kind("mylib::my_mm")
    ('aten::mm', '')
    """
    return "" if is_custom(kind) else kind


def why_unfit(schema: Any) -> str:
    """Why a custom operator cannot be scheduled, or an empty string.

    Args:
        schema: its ``torch.FunctionSchema``.
    """
    if schema.is_mutable:
        return "changes its arguments; expected one that leaves them as they are and returns new tensors"
    if any(item.alias_info is not None for item in (*schema.arguments, *schema.returns)):
        return "returns memory of its arguments; expected new tensors. Return a copy"
    returns = [str(item.type) for item in schema.returns]
    if returns != ["List[Tensor]"] and (not returns or set(returns) != {"Tensor"}):
        return f"returns {', '.join(returns) or 'nothing'}; expected tensors, or one list of them"
    return ""
