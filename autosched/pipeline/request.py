"""What can be known to be wrong with a request before a model is built, which for a large one takes longer than reading the message."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosched.core.errors import UsageError
from autosched.core.variants import lowering_named
from autosched.costmodel.persist import read_card
from autosched.device.base import Device
from autosched.device.registry import AUTO as ANY_DEVICE
from autosched.device.registry import device_named, index_of, place_of
from autosched.pipeline.budget import budget_for
from autosched.pipeline.granularity import AUTO
from autosched.pipeline.replaying import PREFIX
from autosched.runtime.current_device import home_of
from autosched.search.strategy import STRATEGIES

if TYPE_CHECKING:
    import torch

    from autosched.device.compiled_baseline import ModelSource

TUNED = "tuned"
"""The device loop, where strategies are named."""


def check_request(
    device: str,
    effort: str,
    budget_s: float | None = None,
    lowering: str | None = None,
    strategies: Sequence[str] | None = None,
    cost_model: Path | None = None,
) -> None:
    """Look at the options of ``tune`` and ``compare``; a replay's folder is looked at when it is read.

    Raises:
        UsageError: an effort, a budget or a lowering that there is not.
        UnknownName: a device or a strategy that there is not.
        DeviceMissing: a device that this machine does not have.
        ArtifactError: a folder that holds no cost model, or a damaged one.
    """
    budget_for(effort, budget_s)
    if lowering not in (None, AUTO):
        lowering_named(str(lowering))
    require_strategies(names_of_strategies(strategies))
    if cost_model is not None:
        read_card(cost_model)
    if not device.startswith(PREFIX):
        device_named(device)


def require_strategies(names: Sequence[str] | None) -> None:
    """Find out before a minute is spent on capture that a strategy is misspelt, or that two have one name.

    Raises:
        UnknownName, UsageError: naming it.
    """
    STRATEGIES.names()
    for name in names or ():
        if name != TUNED:
            STRATEGIES.get(name)


def names_of_strategies(given: object) -> tuple[str, ...] | None:
    """The names that ``compare`` was given, one by itself or several; whether there are such strategies is looked at elsewhere.

    Raises:
        UsageError: if they are no names, or none.

    >>> names_of_strategies("beam"), names_of_strategies(["sequential", "beam"])
    (('beam',), ('sequential', 'beam'))
    """
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    if not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"strategies is {given!r}; expected a list of names, such as ['sequential', 'beam'], or None for all")
    return names


def folder_of(cost_model: str | os.PathLike[str] | None) -> Path | None:
    """The folder that ``tune`` was told to take a cost model from.

    Raises:
        UsageError: if that is no path.
    """
    if cost_model is not None and not isinstance(cost_model, str | os.PathLike):
        raise UsageError(f"cost_model is {cost_model!r}; expected the path of a folder written by 'autosched train'")
    return Path(cost_model) if cost_model is not None else None


def name_of(name: object, model: torch.nn.Module) -> str:
    """The name that the report gives the model: by default that of its class.

    Raises:
        UsageError: if it is no text.
    """
    if not isinstance(name, str | None):
        raise UsageError(f"name is {name!r}; expected text")
    return name or type(model).__name__


def dtype_of(dtype: object) -> str | None:
    """The dtype that the report gives the model.

    Raises:
        UsageError: if it is no text: a file would not take it, which would be found out when the job is over.
    """
    if not isinstance(dtype, str | None):
        raise UsageError(f"dtype is {dtype!r}; expected its name, such as 'bfloat16', or None for float32")
    return dtype


def source_of(source: object) -> ModelSource | None:
    """Where another process builds the model.

    Raises:
        UsageError: if it is something else.
    """
    from autosched.device.compiled_baseline import ModelSource

    if not isinstance(source, ModelSource | None):
        raise UsageError(f"source is {source!r}; expected a ModelSource, or None")
    return source


def where_to_measure(device: str, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """``device``; where that names no GPU in particular and the model is on one, that one."""
    if device not in (ANY_DEVICE, "cuda"):
        return device
    home = home_of(model, args, kwargs)
    return str(home) if home.type == "cuda" else device


def moved_note(device: Device, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str:
    """What a reader of the report should know where the model is on another GPU than the one that it was measured on; else nothing."""
    home, index = home_of(model, args, kwargs), index_of(device)
    if home.type != device.key.kind or home.index is None or index in (None, home.index):
        return ""
    moved = f"the model is on {home}; a copy of its weights was measured on {place_of(device)}"
    if device_named(str(home)).key == device.key:
        return f"{moved}, a GPU of the same kind: the schedule is for both"
    return f"{moved}, another kind of GPU ({device.key.name}): the schedule is for that one, and is refused where the model is"


def mode_note(model: torch.nn.Module) -> str:
    """What a reader of the report should know where ``load`` would not take the model as it is now; else nothing."""
    from autosched.runtime.weights import part_in_training

    training = part_in_training(model)
    return f"{training} is in training mode, in which load() runs the original model; call model.eval() before load()" if training else ""
