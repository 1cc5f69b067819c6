"""Why not even a sequential schedule came through, and what to do: the model itself is asked whether its answers can be reproduced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosched.core.errors import NoFeasibleCandidate
from autosched.core.from_outside import let_through
from autosched.core.program import Program
from autosched.core.records import Failure, FailureKind
from autosched.pipeline.references import References, answer_of, in_order
from autosched.runtime.float32 import full_float32
from autosched.runtime.numerics import compare, tolerance

_MOST_NAMES = 3  # of strategies that failed for the same reason, and of attributes
_PLAIN = (bool, int, float, str, torch.Tensor)
_SENSITIVE = 0.25
"""Share of the tolerance that a model uses up by itself, from which the rounding of folded weights may use up the rest: folding and packing
together differ from a model by two to four times as much as one rounding of its weights and inputs (``smp.MAnet`` with random weights)."""
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
            return _changes_by_itself(model, program, references) or _rounds_coarsely(model, program, references)
    except Exception as error:  # whatever the user's model raises here, it is not why we are asked
        let_through(error)
        return ""


def _changes_by_itself(model: torch.nn.Module, program: Program, references: References) -> str:
    began = _attributes(model)
    by, share = _apart(in_order(program, answer_of(model, program, references.inputs[0])), references.outputs[0])
    if share <= 1.0:
        return ""
    changed = sorted(name for name, value in _attributes(model).items() if not _is(value, began.get(name)))
    reason = f": forward() changes {_some([f'self.{name}' for name in changed])}" if changed else ""
    return (
        f"The model itself answers the same inputs with a difference of {by:.3g} when it is called again{reason}. Keep what a call "
        "leaves for the next one in buffers, or make it an input and an output; draw no random numbers."
    )


def _rounds_coarsely(model: torch.nn.Module, program: Program, references: References) -> str:
    pairs = zip(references.inputs, references.outputs, strict=True)
    by, share = max((_apart(_nudged(model, program, given), wanted) for given, wanted in pairs), key=lambda item: item[1])
    if share <= _SENSITIVE:
        return ""
    said = f"The model itself answers with a difference of {by:.3g} when its weights and inputs are rounded otherwise"
    if share > 1.0:
        coarse = any(weight.dtype in (torch.bfloat16, torch.float16) for weight in model.parameters())
        few, instead = ("it has too many operators for sixteen bits, or ", "in float32, ") if coarse else ("", "")
        return f"{said}: {few}{_SELECTS}. Tune it {instead}with trained weights and real inputs, or up to that choice."
    return f"{said}, {share:.0%} of what is tolerated: what is folded and fused rounds otherwise, too. Try --no-rewrite."


def _apart(answer: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The largest difference, and the largest share of what is tolerated there; infinite where they cannot be compared."""
    agreement = compare(answer, wanted)
    if not math.isfinite(agreement.max_abs_error):
        return math.inf, math.inf
    shares = [0.0 if agreement.within_tolerance else 1.0 + _SENSITIVE]
    for one, other in zip(answer, wanted, strict=True):
        if other.is_floating_point() and other.numel():
            allowed, scale = tolerance(other.dtype), other.double().abs()
            share = (one.double() - other.double()).abs() / (allowed.relative * scale + allowed.of_scale * scale.max())
            shares.append(float(share.nan_to_num(0.0, 0.0).max()))
    return agreement.max_abs_error, max(shares)


def _nudged(model: torch.nn.Module, program: Program, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The answer with every weight and every input one rounding step off, up or down."""
    generator = torch.Generator().manual_seed(0)

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < torch.float16.itemsize:
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device, tensor.dtype) * 2 - 1
        return tensor.detach() * (1 + signs * torch.finfo(tensor.dtype).eps)

    weights = {name: nudge(weight) for name, weight in model.named_parameters()}

    class Nudged(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(model, weights, args, kwargs)

    # What a call writes is looked for in the model itself.
    return in_order(program, answer_of(model if program.writes else Nudged(), program, [nudge(tensor) for tensor in inputs]))


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
