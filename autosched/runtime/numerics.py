"""When two outputs agree: one rule for loading a bundle, for verifying a schedule and for the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosched.runtime.thread_state import inference_mode


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``|a - b| <= relative * |b| + of_scale * max|b|`` with ``b`` the reference; both are ratios.

    The second term keeps elements near zero from failing on rounding noise of their large neighbours, those apart that are masks.
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
# operators may add up to: measured errors of folded convolution nets are one to two orders of magnitude below. In sixteen bits that is
# twenty units, and ten of the largest number: BERT-base in bfloat16 is six from itself in float64, and so is whatever else computes it.
# Eight bits are rounded to after the arithmetic: the relative error is one step (2^-3, 2^-2). Powers of two alone (float8_e8m0fnu) must be
# equal.
_TOLERANCES = {
    torch.float64: Tolerance(1e-7, 1e-8),
    torch.complex128: Tolerance(1e-7, 1e-8),
    torch.float32: Tolerance(1e-3, 1e-4),
    torch.complex64: Tolerance(1e-3, 1e-4),
    torch.float16: Tolerance(1e-2, 5e-3),
    torch.complex32: Tolerance(1e-2, 5e-3),
    torch.bfloat16: Tolerance(8e-2, 4e-2),
    torch.float8_e4m3fn: Tolerance(0.125, 4e-2),
    torch.float8_e4m3fnuz: Tolerance(0.125, 4e-2),
    torch.float8_e5m2: Tolerance(0.25, 8e-2),
    torch.float8_e5m2fnuz: Tolerance(0.25, 8e-2),
}

# A number of this size that is equal in both is what hides a place (-1e9, the lowest of a dtype), not what its neighbours were computed
# from: beside it any neighbour would be noise.
_AS_A_MASK = 8192.0
# From this size on it may be either. What its neighbours were computed from leaves them some rounding units of itself, where arithmetic has
# 24 bits or more: a 64th of what the tolerance of float32 allows is 26 units. In fewer bits numbers are too often equal by chance.
_MAYBE_A_MASK = 1024.0
_MAYBE = 1 / 64
_FINE = 1e-4

# Elements that are compared at a time: what comparing takes beside the tensors is then some MiB, however large they are.
_PIECE = 1 << 20


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an output of ``dtype`` may be from its reference; integers and booleans must be equal."""
    return _TOLERANCES.get(dtype, _EXACT)


def compare(
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    *,
    rounded: torch.dtype | None = None,
    coarsest: Sequence[torch.dtype | None] = (),
) -> Agreement:
    """Compare flattened outputs with flattened references, each against the tolerance of its dtype.

    Args:
        rounded: the dtype to whose precision factors in float32 were rounded (``float32.rounded_as``): float32 is then judged as that.
        coarsest: for each output the dtype that it was rounded to on its way (``rounding.coarsest_of``), if that is known: it is judged
            as that one, where that allows more. Integers and booleans must be equal whatever they come from.
    """
    if len(outputs) != len(references):
        return _apart(f"{len(outputs)} output tensors; expected {len(references)}")
    bitwise, within, worst, reason = True, True, 0.0, ""
    ways = coarsest if len(coarsest) == len(references) else (None,) * len(references)
    for position, (output, reference, way) in enumerate(zip(outputs, references, ways, strict=True)):
        one = _compare_one(output, reference, _judged_as(reference.dtype, way, rounded))
        bitwise &= one.bitwise
        worst = max(worst, one.max_abs_error)
        if not one.within_tolerance:
            within = False
            reason = reason or f"output {position}: {one.reason}"
    return Agreement(within, bitwise, worst, reason)


def _judged_as(own: torch.dtype, way: torch.dtype | None, rounded: torch.dtype | None) -> Tolerance:
    if not (own.is_floating_point or own.is_complex):
        return _EXACT
    if rounded is not None and own == torch.float32:
        own = rounded
    return max(tolerance(own), tolerance(way if way is not None else own), key=lambda item: item.of_scale)


def _apart(reason: str) -> Agreement:
    return Agreement(False, False, math.inf, reason)


def _compare_one(output: torch.Tensor, reference: torch.Tensor, allowed: Tolerance) -> Agreement:
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return _apart(f"{list(output.shape)} {output.dtype}; expected {list(reference.shape)} {reference.dtype}")
    with inference_mode(True):
        output = output.to(reference.device)
        if reference.is_complex():
            output, reference = torch.view_as_real(output.resolve_conj()), torch.view_as_real(reference.resolve_conj())
        pieces = _pieces(output, reference)
        if all(_same_bits(a, b) for a, b in pieces):
            return Agreement(True, True, 0.0, "")
        if reference.dtype is torch.float4_e2m1fn_x2:
            return _apart("values of torch.float4_e2m1fn_x2 differ; expected equality")
        if not reference.is_floating_point():
            return _compare_exact(pieces)
        return _compare_finite(pieces, allowed)


def _pieces(output: torch.Tensor, reference: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both cut alike, in the order in which the reference lies in memory, so that flattening copies neither if they are laid out alike."""
    strides = reference.stride()
    dims = sorted(range(reference.dim()), key=lambda dim: -strides[dim])
    mine, theirs = output.permute(dims).reshape(-1), reference.permute(dims).reshape(-1)
    return [(mine[begin : begin + _PIECE], theirs[begin : begin + _PIECE]) for begin in range(0, theirs.numel(), _PIECE)]


def _compare_finite(pieces: list[tuple[torch.Tensor, torch.Tensor]], allowed: Tolerance) -> Agreement:
    scale = 0.0
    for given, wanted in pieces:
        a, b = _computable(given), _computable(wanted)
        if not (_all_finite(a) and _all_finite(b)):
            if not torch.equal(a.isnan(), b.isnan()):
                return _apart("NaN in other places than the reference")
            infinite = b.isinf()
            if not torch.equal(a.isinf(), infinite) or not torch.equal(a[infinite], b[infinite]):
                return _apart("infinities in other places than the reference")
        scale = max(scale, _scale(*_finite(given, wanted), fine=allowed.of_scale <= _FINE))
    worst, farthest, reason = 0.0, -math.inf, ""
    for given, wanted in pieces:
        a, b = _finite(given, wanted)
        if b.numel() == 0:
            continue
        error = (a - b).abs()
        limit = b.abs() * allowed.relative + allowed.of_scale * scale
        worst = max(worst, float(error.max()))
        if bool((error <= limit).all()):
            continue
        place = int((error - limit).argmax())
        if (beyond := float(error[place] - limit[place])) > farthest:
            farthest = beyond
            reason = f"{float(a[place]):.6g} where the reference has {float(b[place]):.6g} ({wanted.dtype})"
    return Agreement(not reason, False, worst, reason)


def _scale(given: torch.Tensor, wanted: torch.Tensor, *, fine: bool) -> float:
    """The largest number of a reference that its neighbours may have rounding noise of; ``fine`` if in 24 bits or more."""
    size, equal = wanted.abs(), given == wanted
    counts = ~equal | (size < _AS_A_MASK)
    if fine:
        size[equal & (size >= _MAYBE_A_MASK)] *= _MAYBE
    counted = size[counts]
    return float(counted.max()) if counted.numel() else 0.0


def _finite(given: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64, where the second is finite."""
    given, wanted = _computable(given), _computable(wanted)
    if not _all_finite(wanted):
        finite = wanted.isfinite()
        given, wanted = given[finite], wanted[finite]
    return given.double(), wanted.double()


def _all_finite(tensor: torch.Tensor) -> bool:
    # Once over the memory, where to ask each element takes several times.
    return all(math.isfinite(item) for item in map(float, tensor.aminmax()))


def _computable(tensor: torch.Tensor) -> torch.Tensor:
    # Nothing is computed, nor asked, of floats of eight bits.
    return tensor.float() if tensor.element_size() == 1 else tensor


def _compare_exact(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> Agreement:
    worst = max(float((a.double() - b.double()).abs().max()) for a, b in pieces)
    return Agreement(False, False, worst, f"values of {pieces[0][1].dtype} differ; expected equality")


def _same_bits(output: torch.Tensor, reference: torch.Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[reference.element_size()]
    return torch.equal(output.contiguous().view(integers), reference.contiguous().view(integers))
