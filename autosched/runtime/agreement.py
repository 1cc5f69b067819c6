"""Whether a schedule answers a call as its model does: containers, plain values, and tensors within the tolerance of their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autosched.core.errors import IncompatibleArtifact
from autosched.core.program import Program, Ref
from autosched.core.watch import Watch
from autosched.runtime.numerics import compare
from autosched.runtime.rounding import coarsest_of
from autosched.runtime.state import ask, whole_answer
from autosched.runtime.trees import describe_tree, objects_given, output_tensors, unflatten_inputs


def models_answer(program: Program, model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """What the model itself returns for ``inputs``, in the order of ``program.graph.inputs``, as ``whole_answer``.

    Raises:
        UnsupportedGraph: if it changes containers that it is given and does not return.
        Exception: whatever it raises.
    """
    if program.writes:
        answer, written, _ = ask(program, model, inputs)
        return answer, written
    args, kwargs = unflatten_inputs(program, inputs)
    watch = Watch((args, kwargs), objects_given(program, args, kwargs))
    with torch.no_grad():
        return watch.packed(model(*args, **kwargs))


def require_agreement(
    program: Program, outputs: Sequence[torch.Tensor], answer: Any, label: str, *, rounded: torch.dtype | None = None
) -> float:
    """The largest absolute difference between a schedule's outputs and the model's answer.

    Args:
        outputs: in the order of ``program.graph.outputs``.
        rounded: as for ``numerics.compare``.

    Raises:
        IncompatibleArtifact: saying what differs, if it is more than the tolerance.
    """
    result = whole_answer(program, outputs)
    if not _same_containers(result, answer):
        raise IncompatibleArtifact(label, ["it returns other containers or other plain values than the model"])
    # After the output structure, which decides which tensors are returned, and how often.
    agreement = compare(output_tensors(result), output_tensors(answer), rounded=rounded, coarsest=_coarsest_returned(program))
    if not agreement.within_tolerance:
        raise IncompatibleArtifact(label, [f"its outputs differ from the model's: {agreement.reason}"])
    return agreement.max_abs_error


def _coarsest_returned(program: Program) -> tuple[torch.dtype | None, ...]:
    """``coarsest_of`` the graph, for each tensor that is returned, and then for each that is written back."""
    known = dict(zip(program.graph.outputs, coarsest_of(program.graph), strict=True))
    returned = [leaf.value for leaf in program.output_leaves if isinstance(leaf, Ref)]
    return tuple(known[value] for value in (*returned, *(item.value for item in program.writes)))


def _same_containers(result: object, answer: object) -> bool:
    (leaves, tree), (expected, expected_tree) = describe_tree(result), describe_tree(answer)
    return tree == expected_tree and all(
        isinstance(leaf, torch.Tensor) if isinstance(other, torch.Tensor) else type(leaf) is type(other) and repr(leaf) == repr(other)
        for leaf, other in zip(leaves, expected, strict=True)
    )
