"""Variants that round otherwise than an operator's calls are left out where the model, with them, would answer too far from how it came.

Each was compared with its calls by itself. What that adds up to, only the whole model shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autosched.core.graph import OpGraph
from autosched.core.records import Failure, FailureKind
from autosched.core.schedule import Schedule
from autosched.core.variants import Variant
from autosched.pipeline.measuring import Ledger
from autosched.pipeline.variants import Refusals, VariantTimes, orders_of

# The one that rounds the most first.
_ROUNDING = (
    Variant.WINOGRAD_4, Variant.WINOGRAD_2, Variant.OWN_PRODUCT, Variant.OWN_CONVOLUTION, Variant.OWN_CHAIN, Variant.OWN_RECURRENCE,
    Variant.OWN_ATTENTION, Variant.OWN_POOLING,
)  # fmt: skip


def agreeing_variants(
    measured: Callable[[Refusals], VariantTimes | None],
    refutation: Callable[[Schedule], Failure | None],
    graph: OpGraph,
    widths: Sequence[int],
    refused: Refusals,
    ledger: Ledger,
) -> VariantTimes | None:
    """The variants with which the operators in order, at each width, answer as the model does.

    Args:
        measured: what is measured of all variants but those refused, as ``variants.measure_variants``; asked again if one is left out.
        refutation: why a schedule must not run, if so, as ``proving.Prover.refutation``.
        refused: to begin with.
        ledger: a note is added for what is left out.
    """
    found = measured(refused)
    for variant in _ROUNDING:
        if found is None or not (found.best == variant).any():
            continue
        why = _mismatch(orders_of(graph, widths, found.best), refutation)
        if why is None:
            break
        ledger.notes.append(f"{variant.name.lower()} is left out: a schedule with it {why.detail}")
        refused |= {(-1, width, int(variant)) for width in widths}
        found = measured(refused)
    return found


def _mismatch(orders: Sequence[Schedule], refutation: Callable[[Schedule], Failure | None]) -> Failure | None:
    for order in orders:
        failure = refutation(order)
        if failure is not None and failure.kind is FailureKind.MISMATCH:
            return failure
    return None
