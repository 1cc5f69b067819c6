"""Collecting runs: every kernel of a model alone, a chosen set of pairs in both start orders, and groups of three and four.

The plan is data; measuring is the caller's (a :class:`Measurer`). What is in the store is not measured again, so a collection that was
killed goes on where it stopped; nor is what failed, unless somebody else may have ended the measuring process. First pairs that differ
most from each other, then those a model is least sure of.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from autosched.core.errors import UsageError, why_of
from autosched.core.graph import OpGraph
from autosched.core.records import BY_OTHERS, Contamination, Failure, FailureKind, GroupRecord, PairRecord, SoloRecord
from autosched.datasets.candidates import descriptor, diverse_order, group_candidates, pair_candidates
from autosched.datasets.choices import GroupChoice, PairChoice
from autosched.datasets.facts import DISTURBED, KernelFacts, LaunchFacts, kernel_facts, stolen_share
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.probes import probe_choices
from autosched.datasets.schema import GroupRow, PairRow, ScopeRow, SoloRow, group_key, pair_key
from autosched.datasets.splits import family_of
from autosched.datasets.store import Store

logger = logging.getLogger(__name__)

BATCH = 16
"""Most pairs or groups in one request; its answers are in the store before the next."""

FIRST_BATCH = 4
"""The first request is small, because nobody knows yet how long one takes; later ones are as large as the time allows."""

REPEAT_EVERY = 16
"""One pair in so many is measured a second time: the spread of repeats is the noise floor every error is read against."""

GROUP_SHARE = 0.15
"""Share of a model's time that pairs leave to groups, where any are wanted."""

DIVERSE_SHARE = 0.5
"""Share of the pairs that are chosen for being unlike each other; the rest a model chooses, where there is one."""

_Names: TypeAlias = tuple[str, int, str, int]
_Item = TypeVar("_Item")


class Measurer(Protocol):
    """A device opened for one model. Answers in the order asked; raises only if the device is gone for good."""

    def solo(self, widths: Sequence[int]) -> Sequence[Sequence[SoloRecord | Failure]]:
        """Every operator alone: ``[n_operators][len(widths)]``."""

    def pairs(self, choices: Sequence[PairChoice]) -> Sequence[PairRecord | Failure]:
        """Pairs, each in its start order."""

    def groups(self, choices: Sequence[GroupChoice]) -> Sequence[GroupRecord | Failure]:
        """Groups, each in its start order; a device that cannot answers with ``Failure`` of kind ``unavailable``."""


Uncertainty: TypeAlias = Callable[[Sequence[PairChoice]], Sequence[float]]
"""How unsure a model is of each pair: the ratio of its interval's ends, larger is less sure."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection added to the store.

    ``disturbed`` measurements were not kept, because other processes had the cores: a later run takes them again.
    ``finished`` is false where the budget ended it. ``schedules`` are added by whoever times whole ones as well.
    """

    solo: int
    pairs: int
    groups: int
    failures: int
    disturbed: int
    finished: bool
    schedules: int = 0

    @property
    def kept(self) -> int:
        """New rows of all kinds."""
        return self.solo + self.pairs + self.groups + self.schedules


def collect_model(
    graph: OpGraph,
    measurer: Measurer,
    store: Store,
    scope: ScopeRow,
    *,
    model: str,
    widths: Sequence[int],
    max_pairs: int,
    max_groups: int,
    budget_s: float,
    rng: np.random.Generator,
    pair_widths: Sequence[int] | None = None,
    uncertainty: Uncertainty | None = None,
    probes: bool = False,
    launches: dict[str, LaunchFacts] | None = None,
    keep_disturbed: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Collected:
    """Measure one model's kernels, pairs and groups into ``store``, until all is there or ``budget_s`` seconds are spent.

    Args:
        graph: the model's operators.
        measurer: the device, opened for them.
        store: what was measured before, and where it goes.
        scope: device and software; written to the store if it is not there.
        model: zoo name; its family decides the folds it will be held out in.
        widths: widths to time every operator at.
        pair_widths: those of them at which operators run beside others; default all.
        max_pairs, max_groups: most ordered pairs and groups of this model the store should hold afterwards.
        uncertainty: ranks the second half of the pairs; without it all are chosen for diversity.
        probes: whether to begin with each kernel's probe runs, which is what a new device needs first; they count as pairs.
        launches: CUDA launch facts by signature.
        keep_disturbed: keep what other processes disturbed, instead of leaving it for a later run.
        progress: told what, how many are done, of how many.

    Raises:
        UsageError: before anything is measured, if what failed before cannot be read.
    """
    deadline = clock() + budget_s
    paired = tuple(pair_widths or widths)
    job = _Job(graph, measurer, store, scope, model, tuple(widths), paired, rng, clock, deadline, launches or {}, keep_disturbed, progress)
    with _failures_of(store, scope) as failures:
        store.append([scope])
        added_solo, times = job.solo(failures)
        if max_groups:
            job.deadline -= GROUP_SHARE * budget_s
        added_pairs, pairs_done = job.pairs(failures, times, max_pairs, uncertainty, probes)
        job.deadline = deadline
        added_groups, groups_done = job.groups(times, max_groups)
    return Collected(added_solo, added_pairs, added_groups, job.failed, job.disturbed, pairs_done and groups_done)


def _failures_of(store: Store, scope: ScopeRow) -> Journal:
    path = store.folder / "failures.jsonl"
    try:
        return Journal.open(path, Scope(scope.device, scope.software))
    except OSError as error:
        raise UsageError(
            f"cannot read {error.filename or path}: {why_of(error)}. It lists what failed before, which is not tried again: "
            "let this user read and write it, or remove it, or name another folder."
        ) from error


@dataclass(slots=True)
class _Job:
    graph: OpGraph
    measurer: Measurer
    store: Store
    scope: ScopeRow
    model: str
    widths: tuple[int, ...]
    pair_widths: tuple[int, ...]
    rng: np.random.Generator
    clock: Callable[[], float]
    deadline: float
    launches: dict[str, LaunchFacts]
    keep_disturbed: bool
    progress: Callable[[str, int, int], None] | None
    failed: int = 0
    disturbed: int = 0
    _sufficed: bool = True

    def solo(self, failures: Journal) -> tuple[int, dict[tuple[str, int], KernelFacts]]:
        """Time what is not timed yet; the facts of every kernel that has a time."""
        times = {(row.kernel.signature, row.kernel.width): row.kernel for row in self.store.solo() if row.scope == self.scope.scope}
        wanted = {(operator.signature, width) for operator in self.graph.operators for width in self.widths}
        missing = {key for key in wanted - set(times) if failures.solo(*key) is None}
        if not missing:
            return 0, times
        self._tell("solo", 0, len(missing))
        rows: dict[str, SoloRow] = {}
        for operator, records in zip(self.graph.operators, self.measurer.solo(self.widths), strict=True):
            for width, record in zip(self.widths, records, strict=True):
                if (operator.signature, width) not in missing:
                    continue
                if isinstance(record, Failure):
                    if BY_OTHERS not in record.detail:
                        failures.add_solo(operator.signature, width, record)
                    self.failed += 1
                    continue
                if self._is_disturbed(record.contamination, width):
                    continue
                facts = kernel_facts(operator, self.graph, width, record.samples.median_us, self.launches.get(operator.signature))
                row = SoloRow(
                    self.scope.scope, family_of(self.model), self.model, facts, record.samples, record.contamination, record.source
                )
                rows.setdefault(row.key, row)
                times[operator.signature, width] = facts
        self._tell("solo", len(missing), len(missing))
        return self.store.append(list(rows.values())), times

    def pairs(
        self,
        failures: Journal,
        times: dict[tuple[str, int], KernelFacts],
        max_pairs: int,
        uncertainty: Uncertainty | None,
        probes: bool,
    ) -> tuple[int, bool]:
        """Measure pairs in batches until there are enough; how many were new, and whether time was left."""
        known = self.store.keys("pairs")
        every = {self._names(choice): choice for choice in pair_candidates(self.graph, times, self.pair_widths)}
        open_pairs = [choice for choice in every.values() if not self._settled(choice, known, failures)]
        mine = sum(row.model == self.model and row.scope == self.scope.scope and row.repeat == 0 for row in self.store.pairs())
        wanted = max(0, max_pairs - mine)
        share = 1.0 if uncertainty is None else DIVERSE_SHARE
        order = diverse_order(self._descriptors(open_pairs, times), int(wanted * share + 0.5), self.rng)
        begin = probe_choices(self.graph, times, self.pair_widths)[:wanted] if probes else []
        diverse = [open_pairs[index] for index in order]
        chosen = self._both_orders([*begin, *diverse], every, known, failures)[: max(len(begin), int(wanted * share + 0.5))]
        added, finished = self._measure_pairs(chosen, failures, wanted)
        if uncertainty is None or not finished or len(chosen) >= wanted:
            return added, finished
        taken = {self._names(choice) for choice in chosen}
        rest = [choice for choice in open_pairs if self._names(choice) not in taken]
        unsure = np.asarray(uncertainty(rest), dtype=np.float64)
        ranked = [rest[index] for index in np.argsort(-unsure, kind="stable").tolist()]
        doubtful = [choice for choice in self._both_orders(ranked, every, known, failures) if self._names(choice) not in taken]
        more, finished = self._measure_pairs(doubtful[: wanted - len(chosen)], failures, wanted, done=len(chosen))
        return added + more, finished

    def _both_orders(
        self, choices: Sequence[PairChoice], every: dict[_Names, PairChoice], known: set[str], failures: Journal
    ) -> list[PairChoice]:
        """Each pair followed by itself in the other start order, where that is not measured; each once."""
        found: dict[_Names, PairChoice] = {}
        for choice in choices:
            first, first_width, last, last_width = self._names(choice)
            for names in ((first, first_width, last, last_width), (last, last_width, first, first_width)):
                if not self._settled(every[names], known, failures):
                    found.setdefault(names, every[names])
        return list(found.values())

    def _names(self, choice: PairChoice) -> _Names:
        operators = self.graph.operators
        return operators[choice.first].signature, choice.first_width, operators[choice.last].signature, choice.last_width

    def groups(self, times: dict[tuple[str, int], KernelFacts], max_groups: int) -> tuple[int, bool]:
        """Measure groups of three and four, each kernel at width 1."""
        known = self.store.keys("groups")
        added = 0
        mine = sum(row.model == self.model and row.scope == self.scope.scope for row in self.store.groups())
        # With one seed each run draws the same first: as many as are missing would be those that are there.
        drawn = group_candidates(self.graph, times, 2 * max_groups if mine < max_groups else 0, self.rng)
        fresh = {key: choice for choice in drawn if (key := self._group_key(choice)) not in known}
        chosen = list(fresh.values())[: max(0, max_groups - mine)]
        for batch in self._batches(chosen):
            rows = []
            for choice, answer in zip(batch, self.measurer.groups(batch), strict=True):
                if isinstance(answer, Failure):
                    self.failed += 1
                    if answer.kind is FailureKind.UNAVAILABLE:
                        logger.warning("no groups are collected: %s", answer.detail)
                        return added, True
                    continue
                if not self._is_disturbed(answer.contamination, sum(choice.widths)):
                    rows.append(GroupRow(self.scope.scope, family_of(self.model), self.model, answer))
            added += self.store.append(rows)
            self._tell("groups", added, len(chosen))
        return added, self._sufficed

    def _group_key(self, choice: GroupChoice) -> str:
        return group_key(self.scope.scope, [self.graph.operators[index].signature for index in choice.operators], choice.widths)

    def _batches(self, items: Sequence[_Item]) -> Iterator[list[_Item]]:
        """Parts of ``items`` that fit into the time left, by how long the parts before took; whether all did is in ``_sufficed``."""
        done, size = 0, FIRST_BATCH
        began = self.clock()
        while done < len(items):
            left_s = self.deadline - self.clock()
            if done:
                each_s = (self.clock() - began) / done
                size = min(BATCH, int(left_s / each_s)) if each_s > 0 else BATCH
            if left_s <= 0 or size < 1:
                break
            yield list(items[done : done + size])
            done += size
        self._sufficed = done >= len(items)

    def _measure_pairs(self, chosen: Sequence[PairChoice], failures: Journal, wanted: int, done: int = 0) -> tuple[int, bool]:
        """Rows added, and whether the time sufficed."""
        added = asked = 0
        for batch in self._batches(chosen):
            again = [choice for number, choice in enumerate(batch, asked) if number % REPEAT_EVERY == 0]
            asked += len(batch)
            rows = []
            answers = self.measurer.pairs([*batch, *again])
            for number, (choice, answer) in enumerate(zip([*batch, *again], answers, strict=True)):
                if isinstance(answer, Failure):
                    self.failed += 1
                    if BY_OTHERS not in answer.detail:
                        failures.add_pair(*self._names(choice), answer)
                elif not self._is_disturbed(answer.contamination, choice.first_width + choice.last_width):
                    rows.append(PairRow(self.scope.scope, family_of(self.model), self.model, answer, int(number >= len(batch))))
            added += self.store.append(rows)
            self._tell("pairs", done + asked, wanted)
        return added, self._sufficed

    def _settled(self, choice: PairChoice, known: set[str], failures: Journal) -> bool:
        names = self._names(choice)
        return pair_key(self.scope.scope, *names) in known or failures.pair(*names) is not None

    def _descriptors(self, choices: Sequence[PairChoice], times: dict[tuple[str, int], KernelFacts]) -> NDArray[np.float64]:
        rows = []
        for choice in choices:
            first = times[self.graph.operators[choice.first].signature, choice.first_width]
            last = times[self.graph.operators[choice.last].signature, choice.last_width]
            rows.append([*descriptor(first), *descriptor(last), np.log(first.solo_us / last.solo_us)])
        return np.asarray(rows, dtype=np.float64) if rows else np.zeros((0, 1))

    def _is_disturbed(self, contamination: Contamination, threads: int) -> bool:
        disturbed = stolen_share(contamination, self.scope.facts, threads) > DISTURBED
        self.disturbed += disturbed
        return disturbed and not self.keep_disturbed

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)


def rows_of_tuning(
    graph: OpGraph,
    scope: ScopeRow,
    *,
    model: str,
    solo: Sequence[Sequence[SoloRecord | Failure]],
    pairs: Sequence[PairRecord],
    launches: Mapping[str, LaunchFacts] | None = None,
) -> list[ScopeRow | SoloRow | PairRow]:
    """What a tuning job measured, as rows: appended to a store, the next training learns from it.

    What others disturbed is left out, so that it does not stand in the way of a later, better measurement, and so is what ran on another
    engine than the scope names.

    Args:
        solo: by operator all that was measured of it alone, at whatever width and in whatever variant: each record says which.
        launches: by the name of the variant, as ``variant_signature``.
    """
    rows: dict[str, ScopeRow | SoloRow | PairRow] = {"": scope}
    family = family_of(model)

    def counts(record: SoloRecord | PairRecord, threads: int) -> bool:
        same = record.engine is None or record.engine is scope.software.engine
        return same and stolen_share(record.contamination, scope.facts, threads) <= DISTURBED

    for operator, records in zip(graph.operators, solo, strict=True):
        for record in records:
            if isinstance(record, SoloRecord) and counts(record, record.width):
                launch = (launches or {}).get(record.signature)
                facts = replace(kernel_facts(operator, graph, record.width, record.samples.median_us, launch), signature=record.signature)
                row = SoloRow(scope.scope, family, model, facts, record.samples, record.contamination, record.source)
                rows.setdefault(row.key, row)
    for pair in pairs:
        if not counts(pair, pair.first_width + pair.last_width):
            continue
        row_of_pair = PairRow(scope.scope, family, model, pair)
        rows.setdefault(row_of_pair.key, row_of_pair)
    return list(rows.values())
