"""Modules that do nothing but call another one, under whose name every parameter then has another name; and what spreads weights."""

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


def spread_over_processes(model: Any) -> str:
    """Which weight or part of a model is spread over several processes, and as what; empty if none is.

    A process then has a share of each weight, and the model talks to the others at each call. By name, as above.
    """
    for name, module in model.named_modules():
        if _is_of(type(module), "FullyShardedDataParallel", "torch.distributed."):
            return f"{'part ' + name if name else 'the model'} is a FullyShardedDataParallel"
        for table in (module._parameters, module._buffers):
            # A scripted module keeps them elsewhere than in a dictionary.
            for key, tensor in table.items() if isinstance(table, dict) else ():
                if _is_of(type(tensor), "DTensor", "torch.distributed."):
                    return f"weight {name}{'.' if name else ''}{key} is a DTensor"
    return ""


def _is_of(kind: type, name: str, package: str) -> bool:
    return any(each.__name__ == name and each.__module__.startswith(package) for each in kind.__mro__)
