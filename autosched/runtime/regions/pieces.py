"""What of an operator can be compiled: its calls in pieces, each either a call of a library or something that a compiler gets whole.

A call that reads packed weights (an opaque layout) stays the library's; what stands between such calls is compiled. Views belong to the
piece that reads them, so that no piece hands a view of its inputs to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from autosched.core.custom_operators import is_custom
from autosched.core.graph import Operator, OpGraph, kernel_signature
from autosched.core.program import Call, Program
from autosched.core.variants import WHOLE, Lowering, Variant
from autosched.runtime.cpu_kernels.ways import WAYS, own_variants
from autosched.runtime.cuda import blas_lt, cudnn_fused, sm_share
from autosched.runtime.regions.row_products import has_row_product, is_row_product

TEMPLATED = ("conv", "mm", "linear", "matmul")
"""What stands in the names of products and convolutions, which Inductor has templates for."""

_LIBRARY_NAMESPACES = ("mkldnn::", "mkl::")
# Alone, one such call is several loops that a compiler can merge.
_COMPOSITE = ("norm", "softmax", "gelu", "logsumexp", "var", "std", "glu", "silu", "hardswish")

WITH_VARIANTS = (Lowering.FUSED, Lowering.REWRITTEN, *WHOLE)
"""Lowerings whose operators may have variants other than their calls."""

UNCOMPILED = (Variant.CALLS, Variant.HALF_SMS, Variant.CUDNN_FUSED, Variant.CUBLASLT, *WAYS)
"""Variants that no compiler has a part in."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive calls of one operator.

    Args:
        calls: in order, views included.
        reads: values from outside the piece, in the order of first use.
        writes: values that live on outside the piece.
        compiled: whether a compiler may have it.
    """

    calls: tuple[Call, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    compiled: bool


def pieces_of(operator: Operator, graph: OpGraph) -> tuple[Piece, ...]:
    """The pieces of ``operator`` in order; empty if it writes memory from outside or returns a view, and so must run call by call."""
    if operator.mutates or any(graph.values[value].storage != value for value in operator.writes):
        return ()
    maker = {value: call for call in operator.calls for value in call.outputs if value >= 0}
    views = {call for call in operator.calls if _is_view(call, graph)}
    groups: list[list[Call]] = []
    for call in operator.calls:
        if call in views:
            continue
        fresh = not groups or _compilable(groups[-1][0], graph) != _compilable(call, graph)
        if fresh:
            groups.append([])
        groups[-1].append(call)
    closures = [_with_views(group, maker, views, operator.calls) for group in groups]
    needed = [_outside_reads(closure) for closure in closures]
    pieces: list[Piece] = []
    for place, (group, closure) in enumerate(zip(groups, closures, strict=True)):
        wanted = set(operator.writes).union(*needed[place + 1 :])
        writes = tuple(value for call in group for value in call.outputs if value in wanted)
        pieces.append(Piece(tuple(closure), needed[place], writes, _compilable(group[0], graph)))
    return tuple(pieces)


def variants_of(operator: Operator, graph: OpGraph, kind: str, lowering: str = Lowering.FUSED) -> tuple[Variant, ...]:
    """The variants worth trying on a kind of device (``cpu``, ``cuda``), ``CALLS`` first: of a region; of an operator of ``rewritten``,
    which is there where no compiler is, and of a launch of code for the whole model those that libraries have.
    """
    found = [Variant.CALLS]
    if lowering == Lowering.FUSED:
        found += _compiled_variants(operator, graph, kind)
        if kind == "cuda" and sm_share.supported() and sm_share.is_product(operator, graph):
            found.append(Variant.HALF_SMS)
    if lowering in WITH_VARIANTS and kind == "cuda" and cudnn_fused.supported() and cudnn_fused.fusions_of(operator, graph):
        found.append(Variant.CUDNN_FUSED)
    if lowering in WITH_VARIANTS and kind == "cuda" and blas_lt.supported() and blas_lt.is_product(operator, graph):
        found.append(Variant.CUBLASLT)
    if lowering in WITH_VARIANTS and kind == "cpu":
        found += own_variants(operator, graph)
    return tuple(found)


def offered_variants(program: Program, kind: str) -> tuple[tuple[Variant, ...], ...]:
    """As :func:`variants_of`, for each operator of ``program``."""
    return tuple(variants_of(operator, program.graph, kind, program.lowering) for operator in program.graph.operators)


def _compiled_variants(operator: Operator, graph: OpGraph, kind: str) -> list[Variant]:
    compiled = [piece for piece in pieces_of(operator, graph) if piece.compiled]
    working = [call for piece in compiled for call in piece.calls if not _is_view(call, graph)]
    found: list[Variant] = []
    several = len(working) > 1 or any(word in call.target for call in working for word in _COMPOSITE)
    if several or (kind == "cpu" and has_row_product(operator, graph)):
        found.append(Variant.COMPILED)
    if kind == "cuda" and any(word in call.target for call in working for word in TEMPLATED):
        found += [Variant.TUNED_TEMPLATES, Variant.TEMPLATES]
    return found


def piece_digest(piece: Piece, graph: OpGraph) -> str:
    """Digest of what is compiled, the same for equal calls on equal shapes wherever they stand."""
    body: list[object] = [_computed(piece.calls, piece.reads, piece.writes, graph)]
    if any(is_row_product(call, graph) for call in piece.calls):
        body.append("rows in blocks")  # such calls were not always compiled so
    return hashlib.sha256(msgspec.json.encode(body)).hexdigest()[:32]


def operator_digest(operator: Operator, graph: OpGraph) -> str:
    """Digest of what an operator computes. Operators of equal signatures take equally long and may compute something else."""
    return hashlib.sha256(msgspec.json.encode(_computed(operator.calls, operator.reads, operator.writes, graph))).hexdigest()[:32]


def _computed(calls: Sequence[Call], reads: Sequence[int], writes: Sequence[int], graph: OpGraph) -> list[object]:
    """The calls, and which value each reads: a signature has the specs of values that calls make, not whose output each is."""
    places = {value: place for place, value in enumerate(reads)}
    for value in (value for call in calls for value in call.outputs if value >= 0):
        places[value] = len(places)
    wiring = [[places[value] for value in call.tensors()] for call in calls]
    return [kernel_signature(calls, graph.values), wiring, [places[value] for value in writes]]


def _is_view(call: Call, graph: OpGraph) -> bool:
    made = [value for value in call.outputs if value >= 0]
    return bool(made) and all(graph.values[value].storage != value for value in made)


def _compilable(call: Call, graph: OpGraph) -> bool:
    if call.target.startswith(_LIBRARY_NAMESPACES) or is_custom(call.target):
        return False
    specs = [graph.values[value].spec for value in (*call.reads(), *(item for item in call.outputs if item >= 0))]
    return all(len(spec.strides) == len(spec.shape) for spec in specs)


def _with_views(group: Sequence[Call], maker: dict[int, Call], views: set[Call], order: Sequence[Call]) -> list[Call]:
    """The calls of a group and every view they read, in the operator's order."""
    chosen = list(group)
    pending = list(group)
    while pending:
        for value in pending.pop().reads():
            view = maker.get(value)
            if view is not None and view in views and view not in chosen:
                chosen.append(view)
                pending.append(view)
    return [call for call in order if call in chosen]


def _outside_reads(calls: Sequence[Call]) -> tuple[int, ...]:
    made = {value for call in calls for value in call.outputs}
    return tuple(dict.fromkeys(value for call in calls for value in call.reads() if value not in made))
