"""Operators that call back into a test, whatever runs them: a Python function under the name of a registered operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import library

from autosched.core.program import Call
from autosched.runtime.calls import Slots
from autosched.runtime.instructions import CallOperator, carrying, instructions_of
from autosched.runtime.kernels import BoundProgram

_hooks: list[Callable[[], None]] = []
_LIBRARY = library.Library("autosched_probes", "FRAGMENT")
_LIBRARY.define("call(int place) -> ()")


def _call(place: int) -> None:
    _hooks[place]()


_LIBRARY.impl("call", _call, "CompositeImplicitAutograd")


def with_hook(bound: BoundProgram, index: int, hook: Callable[[], None]) -> BoundProgram:
    """``bound`` with ``hook`` called before operator ``index``, from Python as well as natively."""
    _hooks.append(hook)
    original = bound.kernels[index]

    def kernel(slots: Slots) -> None:
        hook()
        original(slots)

    call = CallOperator(Call("autosched_probes::call.default", (len(_hooks) - 1,), (), ()))
    kernels = list(bound.kernels)
    kernels[index] = carrying(kernel, [call, *(instructions_of(original) or ())])
    return dataclasses.replace(bound, kernels=tuple(kernels))
