"""Which line a warning points at. The frames are of modules made here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from autosched.core.callers import warn_caller

_WARNS = "def call():\n    warn('a reason', UserWarning)\n"
_PASSES = "def call():\n    inner()\n"


def warned_at(*modules: str) -> str:
    """The module whose line a warning points at, where ``modules`` call each other, the last one outermost."""
    call: Any = warn_caller
    for place, module in enumerate(("autosched.core.anything", *modules)):
        names = {"__name__": module, "warn": warn_caller, "inner": call} if module else {"inner": call}
        exec(compile(_PASSES if place else _WARNS, module, "exec"), names)
        call = names["call"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    (one,) = said
    assert one.lineno == 2
    assert str(one.message) == "a reason"
    return one.filename


@pytest.mark.parametrize(
    "modules",
    [
        ("autosched.runtime.load", "mine", "main"),
        ("autosched.runtime.guard", "torch.nn.modules.module", "mine", "main"),
        # Beyond the backend lies the model's own code, as Dynamo translated it, and generated code; then whoever called the model.
        (
            "autosched.plugin",
            "torch._dynamo.eval_frame",
            "",
            "model",
            "part",
            "torch._dynamo.eval_frame",
            "torch.nn.modules.module",
            "mine",
            "main",
        ),
        ("autosched.plugin", "model", "torch._dynamo.eval_frame", "mine", "main"),
        ("autosched.runtime.guard", "autosched.plugin", "model", "torch._dynamo.eval_frame", "mine", "torch._dynamo.eval_frame", "main"),
        ("autosched.plugin", "torch._dynamo.convert_frame", "torch._dynamo.eval_frame", "mine", "torch._dynamo.eval_frame", "main"),
        ("autosched.plugin", "torch._dynamo.convert_frame", "model", "torch._dynamo.eval_frame", "mine", "main"),  # after a graph break
        ("autosched.plugin", "mine"),
        # A schedule in the place of a part of something that is compiled, or kept from it.
        ("autosched.runtime.guard", "mine", "torch._dynamo.eval_frame", "main"),
    ],
)
def test_a_warning_points_at_the_call_from_outside(modules: tuple[str, ...]) -> None:
    assert warned_at(*modules) == "mine"


def test_a_package_of_a_longer_name_is_not_this_one() -> None:
    assert warned_at("autosched.runtime.load", "autoscheduler.parts") == "autoscheduler.parts"


def test_a_line_that_was_warned_of_is_not_warned_of_again() -> None:
    names = {"__name__": "mine", "warn": warn_caller}
    exec(compile(_WARNS, "mine", "exec"), names)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            names["call"]()  # type: ignore[operator]
    assert len(said) == 1
