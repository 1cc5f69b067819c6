"""From a store of runs to what a model is fitted on: pairs joined with their kernels, and the rows the audit leaves out gone."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autosched.core.errors import UsageError
from autosched.core.records import Engine
from autosched.costmodel.model import PairLabels, PairQuery
from autosched.costmodel.table import pair_variance
from autosched.datasets.audit import Audit, audit
from autosched.datasets.facts import DeviceFacts, KernelFacts, with_observed_peaks
from autosched.datasets.schema import PairRow
from autosched.datasets.store import Store

logger = logging.getLogger(__name__)

_Usable: TypeAlias = tuple[PairRow, int, int]
"""A pair, and the places of its kernels."""


@dataclass(frozen=True, slots=True)
class PairSet:
    """Measured pairs ready for fitting.

    Args:
        query, labels: row for row.
        keys: the unordered pair of kernels of each row; what must not be on both sides of a split.
        audit: what was found in the store.
        simulated: rows that no device measured.
        engine: what ran the lanes of CPUs; ``None`` where there are none.
    """

    query: PairQuery
    labels: PairLabels
    keys: tuple[tuple[str, str], ...]
    audit: Audit
    simulated: int
    engine: Engine | None = None

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
    devices = {row.scope: row.facts for row in store.scopes()}
    by_scope: dict[str, list[KernelFacts]] = {}
    for row in store.solo():
        if row.key not in report.excluded:
            by_scope.setdefault(row.scope, []).append(row.kernel)
    facts: list[DeviceFacts] = []
    kernels: list[KernelFacts] = []
    kernel_device: list[int] = []
    place: dict[tuple[str, str, int], int] = {}
    for scope in sorted(by_scope):
        for kernel in by_scope[scope]:
            place[scope, kernel.signature, kernel.width] = len(kernels)
            kernels.append(kernel)
            kernel_device.append(len(facts))
        facts.append(with_observed_peaks(devices[scope], by_scope[scope]))
    usable: list[_Usable] = []
    for pair in store.pairs():
        record = pair.record
        first, last = (pair.scope, record.first, record.first_width), (pair.scope, record.last, record.last_width)
        if pair.key not in report.excluded and first in place and last in place:
            usable.append((pair, place[first], place[last]))
    usable, engine = _on_one_engine(usable, store)
    if not usable:
        found = "; ".join(line.strip() for line in report.lines()) if store.pairs() else "it has no pairs"
        raise UsageError(
            f"{store.folder} holds no usable pair ({found}); expected measured pairs: "
            f"'autosched collect -o {shlex.quote(str(store.folder))}' adds some on an otherwise idle machine"
        )
    records = [pair.record for pair, _, _ in usable]
    variance = np.asarray([pair_variance(record.count, record.contamination) for record in records])
    query = PairQuery(
        tuple(kernels),
        tuple(facts),
        np.asarray(kernel_device, dtype=np.int64),
        np.asarray([first for _, first, _ in usable], dtype=np.int64),
        np.asarray([last for _, _, last in usable], dtype=np.int64),
    )
    labels = PairLabels(
        np.asarray([record.slowdown_first for record in records]),
        np.asarray([record.slowdown_last for record in records]),
        np.asarray([record.makespan_ratio for record in records]),
        tuple(pair.family for pair, _, _ in usable),
        np.clip(variance.min() / variance, 0.05, 1.0),
        np.asarray([record.solo_first_us * max(1, record.repeats_first) for record in records]),
        np.asarray([record.solo_last_us * max(1, record.repeats_last) for record in records]),
    )
    keys = tuple((min(record.first, record.last), max(record.first, record.last)) for record in records)
    simulated = sum(record.source.value == "simulated" for record in records)
    return PairSet(query, labels, keys, report, simulated, engine)


def _on_one_engine(usable: list[_Usable], store: Store) -> tuple[list[_Usable], Engine | None]:
    """Those of one engine, and which: native lanes where any were measured on them; no engine without CPUs."""
    engines = {row.scope: row.software.engine for row in store.scopes() if row.facts.kind == "cpu"}
    used = {engines[pair.scope] for pair, _, _ in usable if pair.scope in engines}
    if len(used) < 2:
        return usable, next(iter(used), None)
    kept = [item for item in usable if engines.get(item[0].scope) is not Engine.PYTHON]
    logger.warning(
        "%d of %d pairs of %s were measured on lanes of Python and are left out beside those on native lanes",
        len(usable) - len(kept),
        len(usable),
        store.folder,
    )
    return kept, Engine.NATIVE
