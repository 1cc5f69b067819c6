"""Modules that do nothing but call another one, under whose name every parameter then has another name."""

from __future__ import annotations

from typing import Any

_HOLDS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def wrapped_in(model: object) -> tuple[str, str]:
    """What wraps a model (``torch.compile``, or a class), and the attribute that is the module itself; both empty if nothing does.

    By name: the class of what ``torch.compile`` returns lies in a module that takes seconds to import.
    """
    kind = type(model).__name__
    if kind not in _HOLDS or not type(model).__module__.startswith("torch."):
        return "", ""
    return "torch.compile" if kind == "OptimizedModule" else kind, _HOLDS[kind]


def loaded_in(model: Any) -> str | None:
    """Where in a module a loaded schedule is in the place of ``forward``: the first such part's name, empty for the module itself.

    By name as well: what is captured knows nothing of what runs.
    """
    for name, module in model.named_modules():
        kind = type(vars(module).get("forward"))
        if kind.__name__ == "LoadedModel" and kind.__module__.startswith("autosched."):
            return str(name)
    return None
