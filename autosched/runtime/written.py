"""What the operators of a program write to, by their schemas alone: known before any of them runs.

A program may come from a stranger, and what is written to a weight stays there even if the schedule is refused afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autosched.core.errors import IncompatibleArtifact
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Argument, Call, Program, refs_in
from autosched.runtime.calls import resolve

_LABEL = "the schedule"
# Schemas of normalisations do not say that running statistics are updated in training.
_STATISTICS = ("running_mean", "running_var")
_IN_TRAINING = ("training", "train", "use_input_stats")
_ALWAYS = ("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats")
_NEVER = ("_functional", "_backward")


def require_harmless(program: Program) -> None:
    """Raise unless its calls write only to memory that operators of its own made, and the graph says which; and trust no index unchecked.

    That such memory is what the graph says, no view of a weight for example, is seen when the program runs (``runtime.audit``).

    Raises:
        IncompatibleArtifact: naming the first operator that does otherwise.
        UnsupportedGraph: if an operator is not allowed or does not exist here.
    """
    for call in program.prologue:
        if is_mutable(call):
            raise IncompatibleArtifact(
                _LABEL, [f"{call.target} of its prologue changes a tensor in place; expected that it makes new ones"]
            )
        _require_checked(call)
    for operator in program.graph.operators:
        for call in operator.calls:
            _require_checked(call)
            for value in written_by(call):
                if value not in operator.mutates:
                    said = f"operator {operator.name} changes value {value} in place and the graph does not say so"
                    raise IncompatibleArtifact(_LABEL, [said])
    if name := changes_callers_memory(program.graph):
        what = "changes an input or a constant in place, and such a model is not scheduled; return the new value instead"
        raise IncompatibleArtifact(_LABEL, [f"operator {name} {what}"])


def changes_callers_memory(graph: OpGraph) -> str:
    """The first operator that changes an input or a constant in place, or an empty string."""
    values = graph.values
    callers = (ValueRole.INPUT, ValueRole.CONSTANT)
    for operator in graph.operators:
        if any(values[value].role in callers or values[values[value].storage].role in callers for value in operator.mutates):
            return operator.name
    return ""


def is_mutable(call: Call) -> bool:
    """Whether a call changes any of its arguments."""
    return bool(_schema(call).is_mutable or written_by(call))


def written_by(call: Call) -> tuple[int, ...]:
    """The values that a call changes in place."""
    schema = _schema(call)
    told = [argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    untold = _STATISTICS if _updates_statistics(call, schema) else ()
    names = {*told, *untold}
    return tuple(value for name, item in _given(call, schema) if name in names for value in refs_in(item)) if names else ()


def _updates_statistics(call: Call, schema: Any) -> bool:
    name = call.target.partition("::")[2].rpartition(".")[0]
    if name in _ALWAYS:
        return True
    if name.endswith(_NEVER) or not any(argument.name in _STATISTICS for argument in schema.arguments):
        return False
    return any(bool(item) for flag, item in _given(call, schema) if flag in _IN_TRAINING)


def _require_checked(call: Call) -> None:
    if any(name == "unsafe" and item for name, item in _given(call, _schema(call))):
        raise IncompatibleArtifact(
            _LABEL, [f"{call.target} is called with unsafe=True, which trusts its indices; expected that it checks them"]
        )


def _given(call: Call, schema: Any) -> Iterator[tuple[str, Argument]]:
    """The arguments of a call with their names."""
    yield from zip((argument.name for argument in schema.arguments), call.args, strict=False)
    yield from call.kwargs


def _schema(call: Call) -> Any:
    operator: Any = resolve(call.target)
    return operator._schema
