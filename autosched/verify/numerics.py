"""Does a schedule compute what its model computes? Bitwise against the same operators in order, by tolerance against the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autosched.core.records import Failure, FailureKind
from autosched.device.base import Comparison
from autosched.runtime.numerics import Agreement, Tolerance, compare, tolerance

__all__ = ["Agreement", "Runner", "Tolerance", "compare", "tolerance", "verify_numerics"]

Runner = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def verify_numerics(
    scheduled: Runner, in_order: Runner, inputs: Sequence[Sequence[torch.Tensor]], references: Sequence[Sequence[torch.Tensor]]
) -> Comparison | Failure:
    """Run a schedule on several input sets.

    Args:
        scheduled: runs the schedule on flattened inputs.
        in_order: runs the same operators, in the same widths, on one lane.
        inputs: input sets; three differing ones, so that a run that ignores its inputs is found out.
        references: the original model's flattened outputs for each set.

    Returns:
        The comparison over all sets, or a ``Failure`` (``mismatch``, ``nonfinite``) whose detail says what differs first.
    """
    bitwise, worst = True, 0.0
    for position, (given, reference) in enumerate(zip(inputs, references, strict=True)):
        outputs = scheduled(given)
        bitwise &= compare(outputs, in_order(given)).bitwise
        agreement = compare(outputs, reference)
        worst = max(worst, agreement.max_abs_error)
        if not agreement.within_tolerance:
            kind = FailureKind.NONFINITE if _has_new_nonfinite(outputs, reference) else FailureKind.MISMATCH
            return Failure(kind, f"input set {position}: {agreement.reason}")
    return Comparison(bitwise=bitwise, max_abs_error=worst, within_tolerance=True)


def _has_new_nonfinite(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> bool:
    def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    return all_finite(references) and not all_finite(outputs)
