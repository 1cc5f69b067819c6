"""Named tuples in a model's inputs and outputs, a user's own and those of operators such as ``topk``.

PyTorch takes them all apart, but writes down only those it was told of.

The only file that changes the private tables of PyTorch's pytree by hand.
"""

from __future__ import annotations

from typing import Any

from autosched.core.containers import Opened
from autosched.core.imported import imported_class


def register_namedtuples(tree: Any) -> None:
    """Make every named tuple class among nested tuples, lists and dictionaries one that a structure can be written down with.

    Its name is ``module.qualified name``, under which :func:`register_named` finds it in another process.
    """
    pending = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, Opened):
            pending += item.children
        elif isinstance(item, list | tuple):
            pending += item
            if _is_namedtuple(type(item)):
                _register(type(item))


def register_named(name: str) -> None:
    """Register the named tuple class of that name, if this process has imported its module already; nothing is imported for it."""
    kind = imported_class(name)
    if kind is not None and _is_namedtuple(kind):
        _register(kind)


def _is_namedtuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and (isinstance(getattr(kind, "_fields", None), tuple) or _is_result(kind))


def _is_result(kind: type) -> bool:
    """Whether it is what an operator such as ``topk`` returns."""
    return kind.__module__ == "torch.return_types" and hasattr(kind, "n_fields")


def _register(kind: type) -> None:
    from torch.utils import _pytree as pytree

    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_result(kind):
        # Known to pytree already, all but the name to write down; there is no second registration.
        if kind in pytree.SUPPORTED_NODES and hasattr(pytree, "_SerializeNodeDef"):
            pytree.SUPPORTED_SERIALIZED_TYPES[kind] = pytree._SerializeNodeDef(kind, name, None, None)
            pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind
        return
    known = kind in pytree.SUPPORTED_SERIALIZED_TYPES or name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if not known and hasattr(pytree, "_register_namedtuple"):
        pytree._register_namedtuple(kind, serialized_type_name=name)
