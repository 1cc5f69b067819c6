"""A store of runs as a device: its records, and a simulator calibrated on them for what was not recorded."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from autosched.core.errors import NoFeasibleCandidate, UsageError
from autosched.core.graph import OpGraph
from autosched.core.records import (
    Contamination,
    DeviceKey,
    Engine,
    Failure,
    FailureKind,
    GroupRecord,
    PairRecord,
    Samples,
    ScheduleRecord,
    SoftwareKey,
    SoloRecord,
    Source,
)
from autosched.core.report import TuneReport
from autosched.core.schedule import Schedule, canonical_key
from autosched.core.variants import Variant, variant_signature
from autosched.costmodel.composition import finish_times
from autosched.costmodel.model import PairModel, makespan_ratio
from autosched.datasets.facts import LaunchFacts
from autosched.datasets.schema import LimitsRow, ScheduleRow, ScopeRow
from autosched.datasets.store import Store
from autosched.device.base import Device, Group, Limits, Pair, Session
from autosched.device.cuda.limits import MOST_LANES
from autosched.device.registry import device_named
from autosched.device.replay import ReplayDevice, ReplaySession
from autosched.pipeline.candidates import Candidate
from autosched.pipeline.measuring import table_within
from autosched.pipeline.variants import VariantTimes, recorded_variants
from autosched.runtime.plan import make_plan
from autosched.runtime.workspace import peak_live_bytes
from autosched.search.problem import Problem
from autosched.search.simulate import simulate

PREFIX = "replay:"


def open_device(name: str) -> Device:
    """The device called ``name``, or for ``replay:DIR`` the one whose runs are in the store ``DIR``.

    Raises:
        UnknownName, DeviceMissing: as ``device.registry.device_named``.
        ArtifactCorrupt, UsageError: for a folder that holds no runs, or runs of nothing that can be replayed.
    """
    return replay_device(Path(name.removeprefix(PREFIX))) if name.startswith(PREFIX) else device_named(name)


def replay_device(folder: Path) -> ReplayDevice:
    """The device whose runs are in ``folder``; with several, the one with most rows. The analytic prior predicts pairs not recorded."""
    recording = StoreRecording(Store.open(folder))
    return ReplayDevice(recording, lambda graph: SimulatedRuns.of(recording, graph))


class StoreRecording:
    """See ``device.replay.Recording``.

    Args:
        scope: which device with which software; the one with most operator times by default.
    """

    def __init__(self, store: Store, scope: str | None = None) -> None:
        counts = Counter(row.scope for row in store.solo())
        scopes = {row.scope: row for row in store.scopes() if counts[row.scope]}
        if not scopes:
            raise UsageError(f"{store.folder} holds no operator times; expected a store filled by 'autosched collect'")
        self.scope: ScopeRow = scopes[scope if scope in scopes else max(scopes, key=lambda name: (counts[name], name))]
        mine = self.scope.scope
        self._solo = {
            (row.kernel.signature, row.kernel.width): SoloRecord(
                row.kernel.signature, row.kernel.width, row.samples, row.contamination, row.source
            )
            for row in store.solo()
            if row.scope == mine
        }
        self.launches: dict[str, LaunchFacts] = {
            row.kernel.signature: row.kernel.launch for row in store.solo() if row.scope == mine and row.kernel.launch is not None
        }
        pairs = [row for row in store.pairs() if row.scope == mine and row.repeat == 0]
        self.all_pairs: list[PairRecord] = [row.record for row in pairs]
        self._pairs = {(row.first, row.first_width, row.last, row.last_width): row for row in self.all_pairs}
        self._groups = {(row.record.signatures, row.record.widths): row.record for row in store.groups() if row.scope == mine}
        self.schedules_of: dict[str, list[ScheduleRow]] = {}
        for row in store.schedules():
            if row.scope == mine:
                self.schedules_of.setdefault(row.graph, []).append(row)
        self._limits: dict[str, LimitsRow] = {row.graph: row for row in store.limits() if row.scope == mine}

    @property
    def key(self) -> DeviceKey:
        """The recorded device's."""
        return self.scope.device

    @property
    def software(self) -> SoftwareKey:
        """The recorded device's."""
        return self.scope.software

    def limits(self, graph: OpGraph) -> Limits:
        """Those recorded with ``graph``; else the medians of the costs recorded, for all lanes and widths that were."""
        native = self.software.engine is Engine.NATIVE
        rows = [self._limits[graph.hash]] if graph.hash in self._limits else list(self._limits.values())
        widths = tuple(sorted({width for _, width in self._solo} | {1}))
        is_cuda = self.key.kind == "cuda"
        # Streams are as many as the graph has use for, cores as many as there are.
        lanes = max(1, min(graph.width, MOST_LANES)) if is_cuda else self.scope.facts.units
        if not rows:
            # A store without a schedule: the costs between operators were never recorded, and count nothing.
            return Limits(lanes, widths, (0,), not is_cuda, 0.0, 0.0, 0.0, native_lanes=native, one_team=native)
        cost = {name: statistics.median(getattr(row, name) for row in rows) for name in ("launch_gap_us", "cross_lane_us", "fixed_us")}
        if graph.hash in self._limits or not is_cuda:
            lanes = max(row.max_lanes for row in rows)
        return Limits(lanes, widths, rows[0].priorities, rows[0].lanes_matter, **cost, native_lanes=native, one_team=native)

    def solo(self, signature: str, width: int) -> SoloRecord | None:
        """As ``Recording.solo``."""
        return self._solo.get((signature, width))

    def offered(self, graph: OpGraph) -> tuple[tuple[int, ...], ...]:
        """As ``Recording.offered``."""
        return tuple(
            tuple(item for item in Variant if item is Variant.CALLS or (variant_signature(operator.signature, item), 1) in self._solo)
            for operator in graph.operators
        )

    def solo_table(self, graph: OpGraph, widths: Sequence[int]) -> list[list[SoloRecord | Failure]]:
        """Every operator of ``graph`` at every width, as a session gives it."""
        missing = Failure(FailureKind.UNAVAILABLE, "this operator was not recorded")
        return [[self.solo(operator.signature, width) or missing for width in widths] for operator in graph.operators]

    def pair(self, first: str, first_width: int, last: str, last_width: int) -> PairRecord | None:
        """As ``Recording.pair``."""
        return self._pairs.get((first, first_width, last, last_width))

    def group(self, signatures: tuple[str, ...], widths: tuple[int, ...]) -> GroupRecord | None:
        """As ``Recording.group``."""
        return self._groups.get((signatures, widths))

    def schedule(self, graph: str, key: str) -> ScheduleRecord | None:
        """As ``Recording.schedule``."""
        return next((row.record for row in self.schedules_of.get(graph, ()) if row.record.key == key), None)

    def problem(
        self,
        graph: OpGraph,
        model: PairModel | None = None,
        *,
        pairs: Sequence[PairRecord] | None = None,
        limits: Limits | None = None,
        calls_only: bool = False,
    ) -> Problem:
        """What a simulator needs of ``graph``: recorded times, recorded ``pairs`` (all by default), and ``model`` for the rest.

        ``limits`` are those recorded, if none are given. With ``calls_only`` operators have no variant but their calls.

        Raises:
            NoFeasibleCandidate: an operator of the graph was not recorded.
        """
        limits = limits or self.limits(graph)
        variants = None if calls_only else recorded_variants(graph, limits.widths, self.offered(graph), self.solo)
        known, launches = self.known_by(graph, variants, pairs)
        costs = table_within(
            limits,
            graph,
            self.solo_table(graph, limits.widths) if variants is None else variants.solo,
            known,
            device=self.scope.facts,
            launches=launches,
            model=model,
            others=() if variants is None else variants.other_solo,
        )
        return Problem.make(graph, costs if variants is None else variants.in_table(costs))

    def known_by(
        self, graph: OpGraph, variants: VariantTimes | None, pairs: Sequence[PairRecord] | None = None
    ) -> tuple[Sequence[PairRecord], Mapping[str, LaunchFacts]]:
        """Recorded ``pairs`` (all by default) and launches under the names that ``make_cost_table`` knows."""
        pairs = self.all_pairs if pairs is None else pairs
        if variants is None:
            return pairs, self.launches
        return variants.to_operators(graph, pairs), variants.operator_names(graph, self.launches)


@dataclasses.dataclass(frozen=True)
class SimulatedRuns:
    """See ``device.replay.Predictor``: the search's simulator on recorded costs.

    ``scale`` is the median of recorded over simulated time among the recorded schedules of the graph in variants that have costs, 1 if
    there are none.
    """

    problem: Problem
    scale: float
    lanes_matter: bool

    @staticmethod
    def of(recording: StoreRecording, graph: OpGraph) -> SimulatedRuns | None:
        """Calibrate on ``recording``; ``None`` if an operator of the graph has no recorded time."""
        try:
            problem = recording.problem(graph)
        except NoFeasibleCandidate:
            return None
        ratios = [
            row.record.samples.median_us / simulate(problem, row.schedule).makespan_us
            for row in recording.schedules_of.get(graph.hash, ())
            if problem.is_costed(row.schedule)
        ]
        return SimulatedRuns(problem, statistics.median(ratios) if ratios else 1.0, recording.limits(graph).lanes_matter)

    def pair(self, pair: Pair) -> PairRecord | None:
        """As ``Predictor.pair``: each operator once."""
        variants = (pair.first_variant, pair.last_variant)
        kernels = self._kernels((pair.first, pair.last), (pair.first_width, pair.last_width), variants)
        if kernels is None:
            return None
        a, b = kernels
        costs = self.problem.costs
        first_us, last_us = float(costs.solo_us[a]), float(costs.solo_us[b])
        slowdown_first, slowdown_last = costs.slowdowns((a, b))
        first, last = float(slowdown_first[0, 1]), float(slowdown_last[1, 0])
        ratio = float(makespan_ratio(*(np.asarray([value]) for value in (first_us, last_us, first, last)))[0])
        names = [
            variant_signature(self.problem.graph.operators[operator].signature, variant)
            for operator, variant in zip((pair.first, pair.last), variants, strict=True)
        ]
        return PairRecord(
            names[0], pair.first_width, names[1], pair.last_width, first_us, last_us,
            ratio * (first_us + last_us), first, last, ratio, 1, 1, 1, Contamination(), Source.SIMULATED,
        )  # fmt: skip

    def group(self, group: Group) -> GroupRecord | None:
        """As ``Predictor.group``: each operator once, composed from pairs."""
        widths = tuple(group.width_of(place) for place in range(len(group.operators)))
        kernels = self._kernels(group.operators, widths, (Variant.CALLS,) * len(widths))
        if kernels is None:
            return None
        costs = self.problem.costs
        solo_us = tuple(float(costs.solo_us[kernel]) for kernel in kernels)
        room = None if costs.room is None else costs.room[kernels]
        finish_us = finish_times(solo_us, *costs.slowdowns(kernels), room=room)
        names = tuple(self.problem.graph.operators[operator].signature for operator in group.operators)
        once = (1,) * len(names)
        return GroupRecord(
            names, widths, solo_us, once, tuple(finish_us.tolist()), float(finish_us.max()), 1, Contamination(), Source.SIMULATED
        )

    def schedule(self, schedule: Schedule) -> ScheduleRecord | None:
        """As ``Predictor.schedule``; ``None`` for a width or a variant without costs."""
        if not self.problem.is_costed(schedule):
            return None
        graph = self.problem.graph
        found = simulate(self.problem, schedule)
        time_us = found.makespan_us * self.scale
        return ScheduleRecord(
            canonical_key(graph, schedule, lanes_matter=self.lanes_matter),
            Samples(time_us, time_us, time_us, time_us, time_us, 1),
            peak_live_bytes(graph, make_plan(graph, schedule)),
            Contamination(),
            tuple(value * self.scale for value in found.start_us),
            tuple(value * self.scale for value in found.end_us),
            Source.SIMULATED,
        )

    def _kernels(self, operators: Sequence[int], widths: Sequence[int], variants: Sequence[int]) -> list[int] | None:
        """The row of each operator at its width and in its variant; ``None`` if one of them has no costs."""
        costs = self.problem.costs
        found: list[int] = []
        for operator, width, variant in zip(operators, widths, variants, strict=True):
            if width not in costs.widths:
                return None
            place = costs.widths.index(width)
            if variant == (Variant.CALLS if costs.variant is None else costs.variant[operator, place]):
                found.append(int(costs.kernel[operator, place]))
            elif costs.other_kernel is None or costs.other_variant is None or place or variant != costs.other_variant[operator]:
                return None
            else:
                found.append(int(costs.other_kernel[operator]))
        return found


def recording_of(device: Device) -> StoreRecording | None:
    """What ``device`` replays; ``None`` for a real device."""
    recording = device.recording if isinstance(device, ReplayDevice) else None
    return recording if isinstance(recording, StoreRecording) else None


def replayed_report(report: TuneReport, groups: Mapping[str, Sequence[Candidate]], session: Session) -> TuneReport:
    """A report whose every figure says that it was replayed or simulated; ``groups`` are candidates by canonical key."""
    known = session.sources if isinstance(session, ReplaySession) else {}
    source = {item.name: known.get(key, Source.SIMULATED) for key, group in groups.items() for item in group}
    rows = tuple(dataclasses.replace(row, source=source.get(row.name, Source.SIMULATED)) for row in report.strategies)
    counts = Counter(row.source for row in rows if row.measured_us is not None)
    note = (
        f"replayed, not measured: {counts[Source.REPLAYED]} of the times were recorded earlier, {counts[Source.SIMULATED]} are those of a "
        "simulator; outputs were compared on this machine's CPU"
    )
    verdict = f"Replayed, nothing was measured: {report.verdict}"
    return dataclasses.replace(
        report, strategies=rows, verdict=verdict, notes=(note, *report.notes), measurements=0, source=Source.REPLAYED, rounds=()
    )
