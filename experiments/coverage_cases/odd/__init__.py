"""Hand-written models with one oddity each, by what is odd."""

from __future__ import annotations

from experiments.coverage_cases.made import Build
from experiments.coverage_cases.odd import (
    control_flow,
    custom_operators,
    dtypes,
    inputs,
    memory,
    objects,
    operators,
    outputs,
    running,
    weights,
    wrapped,
)

FILES = (outputs, inputs, objects, dtypes, operators, memory, weights, running, custom_operators, wrapped, control_flow)


def cases() -> dict[str, Build]:
    """Case name to builder."""
    found: dict[str, Build] = {}
    for file in FILES:
        found |= file.CASES.builders
    return found
