"""Modules that do nothing but call another one, under whose name every parameter then has another name."""

from __future__ import annotations

_HOLDS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def wrapped_in(model: object) -> tuple[str, str]:
    """What wraps a model (``torch.compile``, or a class), and the attribute that is the module itself; both empty if nothing does.

    By name: the class of what ``torch.compile`` returns lies in a module that takes seconds to import.
    """
    kind = type(model).__name__
    if kind not in _HOLDS or not type(model).__module__.startswith("torch."):
        return "", ""
    return "torch.compile" if kind == "OptimizedModule" else kind, _HOLDS[kind]
