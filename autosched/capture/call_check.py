"""The mistakes that are easy to make in the arguments of ``tune`` and ``compile``, found before they mean something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autosched.core.errors import UsageError
from autosched.core.wrappers import wrapped_in


def require_call(what: str, model: object, example_inputs: object, example_kwargs: object = None) -> None:
    """Check that the three describe one call of a module.

    A tensor is a sequence of its rows, so a forgotten comma in ``(x,)`` would tune for inputs that lack the first dimension.

    Args:
        what: the function, for the message.

    Raises:
        UsageError: naming what was given, what was expected, and how to write it.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{what}() got a {type(model).__name__} as model; expected a torch.nn.Module")
    wrapper, inner = wrapped_in(model)
    if wrapper in ("torch.compile", "DistributedDataParallel"):
        # The first would be captured, but every run of "the model as it comes" would be a run of compiled code. The second cannot be.
        raise UsageError(f"{what}() got a model that {wrapper} has wrapped; expected the module itself. Give model.{inner}.")
    if isinstance(example_inputs, Mapping):
        raise UsageError(
            f"{what}() got a dictionary as example_inputs; expected a tuple of positional arguments. Give keyword arguments as "
            "example_kwargs, with () as example_inputs; a dictionary that is itself the argument goes into a tuple: (inputs,)."
        )
    if isinstance(example_inputs, torch.Tensor | str) or not isinstance(example_inputs, Sequence):
        raise UsageError(
            f"{what}() got a {type(example_inputs).__name__} as example_inputs; expected a tuple of positional arguments. "
            "For one argument x, write (x,)."
        )
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise UsageError(f"{what}() got a {type(example_kwargs).__name__} as example_kwargs; expected a dictionary of keyword arguments")
