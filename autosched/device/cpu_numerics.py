"""When the outputs of a schedule count as the model's own.

Two tests. *Bitwise*: a schedule must give exactly what the same operators give in the same widths on one lane, because a
schedule only changes when they run. *Tolerance*: against the original model, whose operators may differ (folded
normalisation, fused activations, another reduction order), by dtype: an element passes if
``|got - want| <= rtol * |want| + scale_tol * max |want|``. The second term is there because re-ordered sums err in proportion to what
was summed, not to what came out.

| dtype | rtol | scale_tol |
|---|---|---|
| float64, complex128 | 1e-7 | 1e-9 |
| float32, complex64 | 1e-3 | 1e-4 |
| float16 | 1e-2 | 5e-3 |
| bfloat16 | 5e-2 | 2e-2 |
| integers, bool | exact | exact |

NaN and infinities must stand where the model has them, with the same sign: anything else fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosched.core.records import Failure, FailureKind

_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-9),
    torch.complex128: (1e-7, 1e-9),
    torch.float32: (1e-3, 1e-4),
    torch.complex64: (1e-3, 1e-4),
    torch.float16: (1e-2, 5e-3),
    torch.bfloat16: (5e-2, 2e-2),
}


@dataclass(frozen=True, slots=True)
class Error:
    """Largest absolute error over all finite elements, and whether every element is within its dtype's tolerance."""

    max_abs: float
    within: bool


def bitwise_equal(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether both hold the same bits; a NaN equals a NaN."""
    return len(got) == len(want) and all(
        ours.shape == theirs.shape and ours.dtype == theirs.dtype and _same_bits(ours, theirs)
        for ours, theirs in zip(got, want, strict=True)
    )


def measure_error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> Error | Failure:
    """Compare outputs with the original model's, tensor by tensor.

    Returns:
        The error; or ``Failure(mismatch)`` if number, shapes or dtypes differ; or ``Failure(nonfinite)`` if NaN or infinities stand
        where the model has none, or the reverse.
    """
    if len(got) != len(want):
        return Failure(FailureKind.MISMATCH, f"{len(got)} outputs; the model has {len(want)}")
    worst, within = 0.0, True
    for place, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return Failure(
                FailureKind.MISMATCH,
                f"output {place} is {ours.dtype} {list(ours.shape)}; the model's is {theirs.dtype} {list(theirs.shape)}",
            )
        if ours.numel() == 0:
            continue
        if (ours.is_floating_point() or ours.is_complex()) and (failure := not_finite_where(place, ours, theirs)) is not None:
            return failure
        error = _tensor_error(ours, theirs)
        worst = max(worst, error.max_abs)
        within = within and error.within
    return Error(worst, within)


def not_finite_where(place: int, got: torch.Tensor, want: torch.Tensor) -> Failure | None:
    """A failure if the non-finite elements of output ``place`` are not exactly those of the model."""
    finite = torch.isfinite(want)
    if bool((torch.isfinite(got) != finite).any()):
        ours, theirs = int((~torch.isfinite(got)).sum()), int((~finite).sum())
        return Failure(FailureKind.NONFINITE, f"output {place} has {ours} elements that are not finite; the model has {theirs}, elsewhere")
    if bool(finite.all()):
        return None
    ours_odd, theirs_odd = got[~finite], want[~finite]
    same = (ours_odd == theirs_odd) | (torch.isnan(ours_odd) & torch.isnan(theirs_odd))
    if not bool(same.all()):
        return Failure(FailureKind.NONFINITE, f"output {place} has other infinities or NaNs than the model")
    return None


def _tensor_error(got: torch.Tensor, want: torch.Tensor) -> Error:
    if want.dtype not in _TOLERANCES:
        difference = (got.to(torch.float64) - want.to(torch.float64)).abs().max()
        return Error(float(difference), torch.equal(got, want))
    relative, scaled = _TOLERANCES[want.dtype]
    wide = torch.complex128 if want.is_complex() else torch.float64
    finite = torch.isfinite(want)
    ours, theirs = got[finite].to(wide), want[finite].to(wide)
    if ours.numel() == 0:
        return Error(0.0, True)
    difference = (ours - theirs).abs()
    allowed = relative * theirs.abs() + scaled * theirs.abs().max()
    return Error(float(difference.max()), bool((difference <= allowed).all()))


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.numel() == 0:
        return True
    return torch.equal(_bytes_of(got), _bytes_of(want))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
