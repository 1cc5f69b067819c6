"""What ``torch.compile(model, backend="autosched", options={...})`` and ``autosched.compile`` may be told."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autosched.core.custom_operators import parse_namespaces
from autosched.core.errors import UsageError

EFFORTS = ("quick", "balanced", "full")
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How a model gets its schedule.

    Args:
        tune: tune at the first call with this effort if the cache has nothing; ``None`` to take the default schedule then.
        budget_s: seconds for tuning, instead of the preset's.
        device: ``cpu``, ``cuda`` or ``cuda:N`` to insist on where the model is; ``auto`` for wherever that is.
        strict: raise where the model would otherwise run as it came.
        custom_operators: namespaces of operators outside PyTorch that may be captured and run.
    """

    tune: str | None = None
    budget_s: float | None = None
    device: str = "auto"
    strict: bool = False
    custom_operators: tuple[str, ...] = ()


def parse_options(options: Mapping[str, Any] | None) -> CompileOptions:
    """Check every option.

    Raises:
        UsageError: naming the option, its value and what is expected.
    """
    given = dict(options or {})
    known = ("tune", "budget_s", "device", "strict", "custom_operators")
    if unknown := sorted(str(name) for name in given.keys() - set(known)):
        raise UsageError(f"option {unknown[0]!r} is not known to the backend 'autosched'; expected one of {', '.join(known)}")
    tune = given.get("tune")
    if tune is not None and tune not in EFFORTS:
        raise UsageError(f"option tune is {tune!r}; expected one of {', '.join(EFFORTS)}, or nothing for not tuning")
    budget = given.get("budget_s")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget < math.inf):
        raise UsageError(f"option budget_s is {budget!r}; expected a number of seconds that is not negative")
    if budget is not None and tune is None:
        raise UsageError("option budget_s says how long to tune, but option tune is not given; expected both, or neither")
    device = str(given.get("device", "auto"))  # also a torch.device
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"option device is {device!r}; expected auto, cpu, cuda, or cuda:N for one of several GPUs")
    strict = given.get("strict", False)
    if not isinstance(strict, bool):
        raise UsageError(f"option strict is {strict!r}; expected True or False")
    namespaces = parse_namespaces(given.get("custom_operators", ()))
    return CompileOptions(tune, float(budget) if budget is not None else None, device, strict, namespaces)
