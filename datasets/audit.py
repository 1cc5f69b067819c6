"""Is a data set fit to learn from? Everything found is listed; nothing is repaired silently."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from autosched.core.records import Source
from autosched.datasets.facts import DISTURBED, DeviceFacts, stolen_share
from autosched.datasets.schema import PairRow, SoloRow
from autosched.datasets.store import Store

DRIFT = 0.15
"""The time of a kernel alone may differ by this much between its own run and the pair run; more is drift."""

SPREAD = 0.50
"""A 95 % interval wider than this share of the median is called noisy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of trouble: how many rows, the keys of those rows (sorted), and whether training leaves them out."""

    kind: str
    detail: str
    keys: tuple[str, ...]
    excluded: bool


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found, and of how much.

    ``noise_floor_pct`` is the median relative difference of slowdowns between independent repeats of one pair, of rows that training does
    not leave out; NaN without repeats.
    """

    solo_rows: int
    pair_rows: int
    group_rows: int
    families: tuple[str, ...]
    devices: tuple[str, ...]
    findings: tuple[Finding, ...]
    noise_floor_pct: float

    @property
    def excluded(self) -> frozenset[str]:
        """Keys of all rows that training leaves out."""
        return frozenset(key for finding in self.findings if finding.excluded for key in finding.keys)

    def lines(self) -> list[str]:
        """One line of text for each finding, most rows first."""
        ordered = sorted(self.findings, key=lambda finding: -len(finding.keys))
        return [
            f"{len(f.keys):6d} row{'s' if len(f.keys) != 1 else ''} {f.kind}{', left out of training' if f.excluded else ''}: {f.detail}"
            for f in ordered
        ]


def audit(store: Store) -> Audit:
    """Look at every row of a store: pairs without their kernels, impossible times, drift, contamination, noise, simulated rows."""
    solos, pairs, groups, scopes = store.solo(), store.pairs(), store.groups(), store.scopes()
    facts = {scope.scope: scope.facts for scope in scopes}
    alone = {(row.scope, row.kernel.signature, row.kernel.width): row for row in solos}
    found: dict[str, set[str]] = defaultdict(set)
    for solo in solos:
        for kind in _solo_trouble(solo, facts.get(solo.scope)):
            found[kind].add(solo.key)
    for pair in pairs:
        for kind in _pair_trouble(pair, alone, facts.get(pair.scope)):
            found[kind].add(pair.key)
    for group in groups:
        record = group.record
        if not all(value > 0 and math.isfinite(value) for value in (*record.solo_us, *record.repeats, record.together_us)):
            found["impossible"].add(group.key)
        device = facts.get(group.scope)
        if device is not None and stolen_share(record.contamination, device, sum(record.widths)) > DISTURBED:
            found["contaminated"].add(group.key)
    named = {scope.scope for scope in scopes}
    found["unknown device"].update(row.key for row in solos if row.scope not in named)
    found["unknown device"].update(row.key for row in pairs if row.scope not in named)
    found["unknown device"].update(row.key for row in groups if row.scope not in named)
    for duplicate in _same_numbers(pairs):
        found["duplicates"].update(duplicate)
    findings = tuple(Finding(kind, _DETAIL[kind][0], tuple(sorted(found[kind])), _DETAIL[kind][1]) for kind in _DETAIL if found[kind])
    left_out = {key for finding in findings if finding.excluded for key in finding.keys}
    floor_pct = noise_floor_pct([row for row in pairs if row.key not in left_out])
    families = tuple(sorted({row.family for row in solos} | {row.family for row in pairs}))
    devices = tuple(sorted({scope.facts.name for scope in scopes}))
    return Audit(len(solos), len(pairs), len(groups), families, devices, findings, floor_pct)


_DETAIL: dict[str, tuple[str, bool]] = {
    "impossible": (
        "a time or a slowdown that is not above zero, or both together done sooner than the longer one alone at half its time",
        True,
    ),
    "no kernel": ("a pair whose kernel was never timed alone, so that it has no features", True),
    "unknown device": ("a row of a device that the store does not describe", True),
    "simulated": ("a row that no device measured", False),
    "contaminated": (f"other processes had more than {100 * DISTURBED:.0f} % of the cores that the run needed", True),
    "drift": (
        f"the time alone, repeated for the pair run, differs by more than {100 * DRIFT:.0f} % from the one in the program (caches, "
        "or drift)",
        False,
    ),
    "noisy": (f"the 95 % interval of the median is wider than {100 * SPREAD:.0f} % of it", False),
    "duplicates": ("different pairs with exactly the same numbers", False),
}


def noise_floor_pct(pairs: list[PairRow]) -> float:
    """Median relative difference of slowdowns between repeats of one pair in one order, percent; NaN without repeats."""
    repeats: dict[tuple[str, str, int, str, int], list[PairRow]] = defaultdict(list)
    for row in pairs:
        record = row.record
        repeats[row.scope, record.first, record.first_width, record.last, record.last_width].append(row)
    differences = []
    for rows in repeats.values():
        for earlier, later in itertools.pairwise(rows):
            for name in ("slowdown_first", "slowdown_last"):
                a, b = getattr(earlier.record, name), getattr(later.record, name)
                if a > 0 and b > 0:
                    differences.append(abs(a - b) / min(a, b) * 100.0)
    differences.sort()
    return differences[len(differences) // 2] if differences else math.nan


def _solo_trouble(row: SoloRow, device: DeviceFacts | None) -> list[str]:
    samples = row.samples
    found = []
    if not samples.median_us > 0 or samples.count < 1:
        found.append("impossible")
    elif samples.ci_high_us - samples.ci_low_us > SPREAD * samples.median_us:
        found.append("noisy")
    if device is not None and stolen_share(row.contamination, device, row.kernel.width) > DISTURBED:
        found.append("contaminated")
    if row.source is Source.SIMULATED:
        found.append("simulated")
    return found


def _pair_trouble(row: PairRow, alone: dict[tuple[str, str, int], SoloRow], device: DeviceFacts | None) -> list[str]:
    record = row.record
    found = []
    times = (record.solo_first_us, record.solo_last_us, record.together_us, record.slowdown_first, record.slowdown_last)
    longest_us = max(record.solo_first_us * record.repeats_first, record.solo_last_us * record.repeats_last)
    numbers = all(value > 0 and math.isfinite(value) for value in (*times, record.makespan_ratio))
    if not numbers or min(record.repeats_first, record.repeats_last) < 1 or record.together_us < 0.5 * longest_us:
        found.append("impossible")
    for signature, width, solo_us in (
        (record.first, record.first_width, record.solo_first_us),
        (record.last, record.last_width, record.solo_last_us),
    ):
        solo = alone.get((row.scope, signature, width))
        if solo is None or solo.samples.median_us <= 0:
            found.append("no kernel")
        elif solo_us > 0 and abs(math.log(solo_us / solo.samples.median_us)) > math.log1p(DRIFT):
            found.append("drift")
    if device is not None and stolen_share(record.contamination, device, record.first_width + record.last_width) > DISTURBED:
        found.append("contaminated")
    if record.source is Source.SIMULATED:
        found.append("simulated")
    return found


def _same_numbers(pairs: list[PairRow]) -> list[list[str]]:
    numbers = [(row.record.together_us, row.record.slowdown_first, row.record.slowdown_last) for row in pairs]
    often = {value for value, count in Counter(numbers).items() if count > 1}
    groups: dict[tuple[float, float, float], list[str]] = defaultdict(list)
    for row, value in zip(pairs, numbers, strict=True):
        if value in often:
            groups[value].append(row.key)
    return list(groups.values())
