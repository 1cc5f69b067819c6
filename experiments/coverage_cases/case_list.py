"""The list of cases that one file of the coverage sweep writes down."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from experiments.coverage_cases.made import Build, Made

Inputs = Callable[[], tuple[Any, ...]]


class CaseList:
    """Cases by name, in the order in which they are written.

    Args:
        source: what stands before the colon in their names.
        inputs: makes the positional arguments of a case that has none of its own.
        lively: of every case, as of ``Made``.
    """

    def __init__(self, source: str, inputs: Inputs, *, lively: bool = True) -> None:
        self.builders: dict[str, Build] = {}
        self._source, self._inputs, self._lively = source, inputs, lively

    def add(self, name: str, build: Build) -> None:
        """Add a case that is built by hand."""
        named = f"{self._source}:{name}"
        if named in self.builders:
            raise ValueError(f"the case {named!r} is written twice")
        self.builders[named] = build

    def model(self, name: str, inputs: Inputs | None = None, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
        """Add a model class; options as of ``Made``, but ``kwargs`` makes the keyword arguments."""

        def register(kind: type[nn.Module]) -> type[nn.Module]:
            self.add(name, partial(_build, kind, inputs or self._inputs, {"lively": self._lively, **options}))
            return kind

        return register

    def function(self, name: str, inputs: Inputs | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a model without parameters, given as its forward."""

        def register(forward: Callable[..., Any]) -> Callable[..., Any]:
            class Plain(nn.Module):
                pass

            # Beside itself, the function's own signature.
            Plain.forward = forward  # type: ignore[method-assign]
            self.model(name, inputs, **options)(Plain)
            return forward

        return register


def _build(kind: type[nn.Module], inputs: Inputs, options: dict[str, Any]) -> Made:
    made = dict(options)
    kwargs = made.pop("kwargs", dict)()
    return Made(kind(), inputs(), kwargs, **made)
