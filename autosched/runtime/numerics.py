"""When two outputs agree: one rule for loading a bundle, for verifying a schedule and for the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``|a - b| <= relative * |b| + of_scale * max|b|`` with ``b`` the reference; both are ratios.

    The second term keeps elements near zero from failing on rounding noise of their large neighbours.
    """

    relative: float
    of_scale: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two lists of outputs compare.

    Args:
        within_tolerance: whether every output agrees; false for any difference in count, shape, dtype, NaN or infinity.
        bitwise: whether all are equal to the bit (two NaN of equal bits are equal).
        max_abs_error: largest absolute difference over finite elements; ``inf`` if they cannot be compared.
        reason: what differs, empty if nothing.
    """

    within_tolerance: bool
    bitwise: bool
    max_abs_error: float
    reason: str


_EXACT = Tolerance(0.0, 0.0)
# Rounding units of each dtype (2^-53, 2^-24, 2^-11, 2^-8), times what reordering and folding the weights of some hundred
# operators may add up to: measured errors of folded convolution nets are one to two orders of magnitude below.
_TOLERANCES = {
    torch.float64: Tolerance(1e-7, 1e-8),
    torch.complex128: Tolerance(1e-7, 1e-8),
    torch.float32: Tolerance(1e-3, 1e-4),
    torch.complex64: Tolerance(1e-3, 1e-4),
    torch.float16: Tolerance(1e-2, 5e-3),
    torch.bfloat16: Tolerance(5e-2, 2e-2),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an output of ``dtype`` may be from its reference; integers and booleans must be equal."""
    return _TOLERANCES.get(dtype, _EXACT)


def compare(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor], *, rounded: bool = False) -> Agreement:
    """Compare flattened outputs with flattened references, each against the tolerance of its dtype.

    Args:
        rounded: whether factors in float32 were rounded to TF32, which has the mantissa of float16: float32 is then judged as float16 is.
    """
    if len(outputs) != len(references):
        return _apart(f"{len(outputs)} output tensors; expected {len(references)}")
    bitwise, within, worst, reason = True, True, 0.0, ""
    for position, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        one = _compare_one(output, reference, torch.float16 if rounded and reference.dtype == torch.float32 else reference.dtype)
        bitwise &= one.bitwise
        worst = max(worst, one.max_abs_error)
        if not one.within_tolerance:
            within = False
            reason = reason or f"output {position}: {one.reason}"
    return Agreement(within, bitwise, worst, reason)


def _apart(reason: str) -> Agreement:
    return Agreement(False, False, math.inf, reason)


def _compare_one(output: torch.Tensor, reference: torch.Tensor, judged_as: torch.dtype) -> Agreement:
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return _apart(f"{list(output.shape)} {output.dtype}; expected {list(reference.shape)} {reference.dtype}")
    allowed = tolerance(judged_as)
    with torch.inference_mode():
        output = output.to(reference.device)
        if reference.is_complex():
            output, reference = torch.view_as_real(output.resolve_conj()), torch.view_as_real(reference.resolve_conj())
        if not reference.is_floating_point():
            return _compare_exact(output, reference)
        if not torch.equal(output.isnan(), reference.isnan()):
            return _apart("NaN in other places than the reference")
        infinite = reference.isinf()
        if not torch.equal(output.isinf(), infinite) or not torch.equal(output[infinite], reference[infinite]):
            return _apart("infinities in other places than the reference")
        finite = reference.isfinite()
        a, b = output[finite].double(), reference[finite].double()
        if b.numel() == 0:
            return Agreement(True, _same_bits(output, reference), 0.0, "")
        error = (a - b).abs()
        limit = allowed.relative * b.abs() + allowed.of_scale * b.abs().max()
        worst = float(error.max())
        if bool((error <= limit).all()):
            return Agreement(True, worst == 0.0 and _same_bits(output, reference), worst, "")
        place = int((error - limit).argmax())
        return Agreement(False, False, worst, f"{float(a[place]):.6g} where the reference has {float(b[place]):.6g} ({reference.dtype})")


def _compare_exact(output: torch.Tensor, reference: torch.Tensor) -> Agreement:
    if torch.equal(output, reference):
        return Agreement(True, True, 0.0, "")
    worst = float((output.double() - reference.double()).abs().max())
    return Agreement(False, False, worst, f"values of {reference.dtype} differ; expected equality")


def _same_bits(output: torch.Tensor, reference: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[reference.element_size()]
    return torch.equal(output.contiguous().view(integers), reference.contiguous().view(integers))
