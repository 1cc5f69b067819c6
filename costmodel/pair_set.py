"""From a store of runs to what a model is fitted on: pairs joined with their kernels, and the rows the audit leaves out gone."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autosched.core.errors import UsageError
from autosched.core.records import Engine
from autosched.core.variants import operator_signature
from autosched.costmodel.model import PairLabels, PairQuery
from autosched.costmodel.table import pair_variance
from autosched.datasets.audit import Audit, audit
from autosched.datasets.facts import KernelFacts, with_observed_peaks
from autosched.datasets.schema import PairRow, ScopeRow
from autosched.datasets.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PairSet:
    """Measured pairs ready for fitting.

    Args:
        query, labels: row for row.
        keys: the unordered pair of operators of each row, by signature; what must not be on both sides of a split. All widths and variants
            of an operator are one: each says nearly all of the others.
        audit: what was found in the store.
        simulated: rows that no device measured.
        engine: what ran the lanes of CPUs; ``None`` where there are none.
        scopes: what each device of the query is, with its software; several may have one name.
    """

    query: PairQuery
    labels: PairLabels
    keys: tuple[tuple[str, str], ...]
    audit: Audit
    simulated: int
    engine: Engine | None = None
    scopes: tuple[ScopeRow, ...] = field(kw_only=True)

    @property
    def origins(self) -> dict[str, tuple[str, ...]]:
        """The model families of the pairs of each device, by the digest of its key."""
        found: dict[str, set[str]] = {}
        for place, family in zip(self.query.kernel_device[self.query.first].tolist(), self.labels.family, strict=True):
            found.setdefault(self.scopes[place].device.digest, set()).add(family)
        return {digest: tuple(sorted(families)) for digest, families in sorted(found.items())}

    def __len__(self) -> int:
        return len(self.query)


def pair_set(store: Store) -> PairSet:
    """Read a store; disturbed rows weigh less, impossible ones are left out with a warning.

    So are pairs on lanes of Python where there are some on native lanes: an operator waits for the interpreter on the ones and not on the
    others, and a CPU that has native lanes runs nothing else.

    Raises:
        UsageError: no usable pair in the store, saying what the audit found.
    """
    report = audit(store)
    if report.excluded:
        logger.warning("%d rows of %s are left out:\n%s", len(report.excluded), store.folder, "\n".join(report.lines()))
    by_scope: dict[str, list[KernelFacts]] = {}
    for row in store.solo():
        if row.key not in report.excluded:
            by_scope.setdefault(row.scope, []).append(row.kernel)
    timed = {(scope, kernel.signature, kernel.width) for scope, kernels in by_scope.items() for kernel in kernels}
    usable = [pair for pair in store.pairs() if pair.key not in report.excluded and {*_kernels_of(pair)} <= timed]
    scopes, engine = _on_one_engine({pair.scope for pair in usable}, store)
    if left := sum(pair.scope not in scopes for pair in usable):
        logger.warning(
            "%d of %d pairs of %s were measured on lanes of Python and are left out beside those on native lanes",
            left,
            len(usable),
            store.folder,
        )
    usable = [pair for pair in usable if pair.scope in scopes]
    if not usable:
        found = "; ".join(line.strip() for line in report.lines()) if store.pairs() else "it has no pairs"
        raise UsageError(
            f"{store.folder} holds no usable pair ({found}); expected measured pairs: "
            f"'autosched collect -o {shlex.quote(str(store.folder))}' adds some on an otherwise idle machine"
        )
    records = [pair.record for pair in usable]
    variance = np.asarray([pair_variance(record.count, record.contamination) for record in records])
    names = [scope for scope in sorted(by_scope) if scope in scopes]
    query = _query(names, scopes, by_scope, usable)
    labels = PairLabels(
        np.asarray([record.slowdown_first for record in records]),
        np.asarray([record.slowdown_last for record in records]),
        np.asarray([record.makespan_ratio for record in records]),
        tuple(pair.family for pair in usable),
        np.clip(variance.min() / variance, 0.05, 1.0),
        np.asarray([record.solo_first_us * max(1, record.repeats_first) for record in records]),
        np.asarray([record.solo_last_us * max(1, record.repeats_last) for record in records]),
    )
    keys = tuple(_unordered(operator_signature(record.first), operator_signature(record.last)) for record in records)
    simulated = sum(record.source.value == "simulated" for record in records)
    return PairSet(query, labels, keys, report, simulated, engine, scopes=tuple(scopes[scope] for scope in names))


def _unordered(first: str, last: str) -> tuple[str, str]:
    return min(first, last), max(first, last)


def _kernels_of(pair: PairRow) -> tuple[tuple[str, str, int], tuple[str, str, int]]:
    record = pair.record
    return (pair.scope, record.first, record.first_width), (pair.scope, record.last, record.last_width)


def _query(
    names: Sequence[str], scopes: Mapping[str, ScopeRow], kernels: Mapping[str, Sequence[KernelFacts]], pairs: Sequence[PairRow]
) -> PairQuery:
    """The pairs, with the kernels of the scopes ``names``: what was timed of one says nothing of an equal operator of another."""
    place: dict[tuple[str, str, int], int] = {}
    for scope in names:
        for kernel in kernels[scope]:
            place[scope, kernel.signature, kernel.width] = len(place)
    members = [[place[kernel] for kernel in _kernels_of(pair)] for pair in pairs]
    first, last = np.asarray(members, dtype=np.int64).T
    return PairQuery(
        tuple(kernel for scope in names for kernel in kernels[scope]),
        tuple(with_observed_peaks(scopes[scope].facts, kernels[scope]) for scope in names),
        np.asarray([device for device, scope in enumerate(names) for _ in kernels[scope]], dtype=np.int64),
        first,
        last,
    )


def _on_one_engine(used: Collection[str], store: Store) -> tuple[dict[str, ScopeRow], Engine | None]:
    """Every scope but CPUs whose lanes another engine ran, and which one it is that stays: the native one if used, none without CPUs."""
    scopes = {row.scope: row for row in store.scopes()}
    on_cpus = {name: row.software.engine for name, row in scopes.items() if row.facts.kind == "cpu"}
    engines = {on_cpus[name] for name in used if name in on_cpus}
    engine = Engine.NATIVE if Engine.NATIVE in engines else next(iter(engines), None)
    return {name: row for name, row in scopes.items() if on_cpus.get(name, engine) is engine}, engine
