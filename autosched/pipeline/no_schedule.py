"""Why not even a sequential schedule came through, and what to do: the model itself is asked whether its answers can be reproduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched.core.errors import NoFeasibleCandidate
from autosched.core.from_outside import let_through
from autosched.core.program import Program
from autosched.core.records import Failure, FailureKind
from autosched.pipeline.references import References, answer_of, in_order
from autosched.runtime.float32 import full_float32
from autosched.runtime.numerics import compare

_MOST_NAMES = 3  # of strategies that failed for the same reason, and of attributes
_PLAIN = (bool, int, float, str, torch.Tensor)
_SELECTS = "it chooses among values that are nearly equal (topk, argmax or sort of the scores of untrained weights, say)"
_REPORT = "Try --no-rewrite, and report the operator."


def no_schedule(failures: Mapping[str, Failure], model: torch.nn.Module, program: Program, references: References) -> NoFeasibleCandidate:
    """What to raise where no sequential schedule was proved.

    Args:
        failures: what failed, by the strategy's name.
        model: as it came; called a few times more if its answers are in question.
        references: what it answered before.
    """
    said = _REPORT
    if any(failure.kind in (FailureKind.MISMATCH, FailureKind.NONFINITE) for failure in failures.values()):
        said = _doubt(model, program, references) or said
    return NoFeasibleCandidate(f"not even a sequential schedule runs: {listed(failures)}. {said}")


def listed(failures: Mapping[str, Failure]) -> str:
    """Every reason once, with the names of those that failed for it."""
    names: dict[str, list[str]] = {}
    for name, failure in failures.items():
        names.setdefault(f"{failure.kind}, {failure.detail}", []).append(name)
    return "; ".join(f"{_some(who)}: {why}" for why, who in names.items()) or "no reason given"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def _doubt(model: torch.nn.Module, program: Program, references: References) -> str:
    """What about the model's own answers keeps any schedule from agreeing with them; empty if nothing is seen."""
    if any(bool(tensor.float().isnan().any()) for tensor in references.outputs[0] if tensor.is_floating_point()):
        return "The model's own answer to the example inputs has NaN: give example inputs with which it has none."
    try:
        with full_float32():
            began = _attributes(model)
            again = answer_of(model, program, references.inputs[0])
            changed = sorted(name for name, value in _attributes(model).items() if not _is(value, began.get(name)))
            if (by := _apart(program, again, references)) is not None:
                reason = f": forward() changes {_some([f'self.{name}' for name in changed])}" if changed else ""
                return (
                    f"The model itself answers the same inputs with a difference of {by:.3g} when it is called again{reason}. Keep what a "
                    "call leaves for the next one in buffers, or make it an input and an output; draw no random numbers."
                )
            by = _apart(program, _nudged(model, program, references.inputs[0]), references)
    except Exception as error:  # whatever the user's model raises here, it is not why we are asked
        let_through(error)
        return ""
    if by is None:
        return ""
    return (
        f"The model itself answers with a difference of {by:.3g} when its weights and inputs are rounded otherwise: {_SELECTS}. Tune it "
        "with trained weights and real inputs, or up to that choice."
    )


def _apart(program: Program, answer: Sequence[torch.Tensor], references: References) -> float | None:
    """The largest difference from the first reference, if that is beyond the tolerance."""
    agreement = compare(in_order(program, answer), references.outputs[0])
    return None if agreement.within_tolerance else agreement.max_abs_error


def _nudged(model: torch.nn.Module, program: Program, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The answer with every weight and every input one rounding step off, up or down."""
    generator = torch.Generator().manual_seed(0)

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < torch.float16.itemsize:
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor.detach() * (1 + signs * torch.finfo(tensor.dtype).eps)

    weights = {name: nudge(weight) for name, weight in model.named_parameters()}

    class Nudged(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, weights, args, kwargs)

    # What a call writes is looked for in the model itself.
    return answer_of(model if program.writes else Nudged(), program, [nudge(tensor) for tensor in inputs])


def _attributes(model: torch.nn.Module) -> dict[str, object]:
    """Plain values and tensors that modules keep beside weights and buffers."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN)
    }


def _is(value: object, other: object) -> bool:
    return value is other or (not isinstance(value, torch.Tensor) and not isinstance(other, torch.Tensor) and value == other)
