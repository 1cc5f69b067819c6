"""The replay device passes the suite on what a CPU device recorded, and says of everything where it comes from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autosched.core.errors import UnknownName, UsageError
from autosched.core.graph import OpGraph, ValueRole
from autosched.core.program import Program
from autosched.core.records import Contamination, Failure, FailureKind, GroupRecord, PairRecord, ScheduleRecord, SoloRecord, Source
from autosched.core.schedule import canonical_key, sequential
from autosched.core.variants import Variant, variant_signature
from autosched.datasets.collect import collect_model
from autosched.datasets.schema import Row
from autosched.datasets.session_measurer import SessionMeasurer
from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store
from autosched.device.base import Device, Group, Pair, Session
from autosched.device.cpu import CpuDevice
from autosched.device.replay import ReplayDevice
from autosched.pipeline.measuring import cost_table
from autosched.pipeline.replaying import SimulatedRuns, StoreRecording, open_device, replay_device
from autosched.pipeline.schedule_runs import limits_row, schedule_row
from autosched.pipeline.scope import scope_row
from tests.conformance.device_suite import BRANCHES, DEPTH, DeviceSuite, spread
from tests.conformance.programs import branches_program


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Really recorded on this machine: operators, a few pairs and groups, and two schedules of three rounds."""
    folder = tmp_path_factory.mktemp("recorded") / "store"
    device = CpuDevice(seed=3)
    program, constants = branches_program(branches=BRANCHES, depth=DEPTH)
    graph, store = program.graph, Store.create(folder)
    with device.open(program, constants, timeout_s=60) as session:
        scope = scope_row(device, session.limits)
        collect_model(
            graph, SessionMeasurer(session, repeats=2), store, scope, model="test:branches", widths=session.limits.widths, max_pairs=6,
            max_groups=2, budget_s=60.0, rng=np.random.default_rng(0), keep_disturbed=True,
        )  # fmt: skip
        store.append([limits_row(scope.scope, "test:branches", graph, session.limits)])
        chosen = [sequential(graph), spread(graph, min(2, session.limits.max_lanes))]
        for schedule, record in zip(chosen, session.schedules(chosen, rounds=3), strict=True):
            assert isinstance(record, ScheduleRecord)
            store.append([schedule_row(scope.scope, "test:branches", graph, "given", False, schedule, (0.0, ""), record)])
    return folder


_FASTER = 0.8  # close enough for the slower variant to be a neighbour worth trying
_BESIDE = (0, DEPTH)  # on two branches


class TestReplayDevice(DeviceSuite):
    traces_everything = False

    @pytest.fixture(scope="class")
    @classmethod
    def device(cls, recorded: Path) -> Device:
        return replay_device(recorded)


@pytest.fixture
def graph() -> OpGraph:
    return branches_program(branches=BRANCHES, depth=DEPTH)[0].graph


@pytest.fixture
def session(recorded: Path) -> Session:
    return replay_device(recorded).open(*branches_program(branches=BRANCHES, depth=DEPTH), timeout_s=60)


def test_what_was_recorded_is_replayed_and_the_rest_simulated(session: Session, graph: OpGraph, recorded: Path) -> None:
    store = Store.open(recorded)
    known = {(row.record.first, row.record.last) for row in store.pairs() if row.record.first_width == row.record.last_width == 1}
    sources = set()
    for a in range(len(graph)):
        for b in range(len(graph)):
            (answer,) = session.pairs([Pair(a, b)], repeats=1)
            if isinstance(answer, PairRecord):
                expected = Source.REPLAYED if (answer.first, answer.last) in known else Source.SIMULATED
                assert answer.source is expected
                sources.add(answer.source)
    assert sources <= {Source.REPLAYED, Source.SIMULATED}
    solo = session.solo((1,), repeats=1)
    assert all(isinstance(row[0], SoloRecord) and row[0].source is Source.REPLAYED for row in solo)


def test_a_recorded_schedule_is_its_record_and_another_is_predicted(session: Session, graph: OpGraph, recorded: Path) -> None:
    other = sequential(graph, order=[2 * DEPTH, 0, 1, 2, 3, *range(2 * DEPTH + 1, len(graph))])
    told = {row.record.key: row.record for row in Store.open(recorded).schedules()}
    replayed, simulated = session.schedules([sequential(graph), other], rounds=5, trace=True)
    assert isinstance(replayed, ScheduleRecord)
    assert isinstance(simulated, ScheduleRecord)
    assert (replayed.source, simulated.source) == (Source.REPLAYED, Source.SIMULATED)
    assert replayed == dataclasses.replace(told[replayed.key], source=Source.REPLAYED)
    assert simulated.samples.count == 1
    assert len(simulated.operator_end_us) == len(graph)
    rounds = session.paired([sequential(graph), other], rounds=3)
    assert rounds == [[replayed.samples.median_us] * 3, [simulated.samples.median_us] * 3]


def test_the_simulator_is_calibrated_on_the_recorded_schedules(graph: OpGraph, recorded: Path) -> None:
    recording = StoreRecording(Store.open(recorded))
    runs = SimulatedRuns.of(recording, graph)
    assert runs is not None
    ratios = []
    for row in recording.schedules_of[graph.hash]:
        predicted = runs.schedule(row.schedule)
        assert predicted is not None
        ratios.append(row.record.samples.median_us / predicted.samples.median_us)
    assert np.median(ratios) == pytest.approx(1.0)


@pytest.mark.parametrize("native", [True, False])
def test_a_sessions_own_limits_cost_what_they_cost_in_tuning(native: bool, graph: OpGraph, recorded: Path) -> None:
    recording = StoreRecording(Store.open(recorded))
    limits = dataclasses.replace(recording.limits(graph), concurrent_gap_us=3.0, native_lanes=native, one_team=False)
    costs = recording.problem(graph, limits=limits).costs
    assert costs.concurrent_gap_us == 3.0
    assert (costs.polling_us == 0.0) is native
    session: Any = SimpleNamespace(limits=limits)
    solo = recording.solo_table(graph, limits.widths)
    tuned = cost_table(session, graph, recording.key, solo, recording.all_pairs, recording.launches)
    assert (costs.concurrent_gap_us, costs.polling_us) == (tuned.concurrent_gap_us, tuned.polling_us)
    assert recording.problem(graph).costs.concurrent_gap_us == 0.0


@pytest.fixture
def in_variants(recorded: Path, graph: OpGraph, tmp_path: Path) -> StoreRecording:
    """The recorded runs, as if every operator also had a variant that takes less time; a pair and a schedule in it."""
    return with_variant(recorded, graph, tmp_path / "variants", _FASTER)


def with_variant(recorded: Path, graph: OpGraph, folder: Path, share: float) -> StoreRecording:
    """The recorded runs, as if every operator also had a variant that takes this share of its time; a pair and a schedule in it."""
    given, store = Store.open(recorded), Store.create(folder)

    def named(signature: str) -> str:
        return variant_signature(signature, Variant.COMPILED)

    rows: list[Row] = [*given.scopes(), *given.solo(), *given.pairs(), *given.groups(), *given.limits(), *given.graphs()]
    for solo in given.solo():
        fast = dataclasses.replace(solo.samples, median_us=solo.samples.median_us * share)
        kernel = dataclasses.replace(solo.kernel, signature=named(solo.kernel.signature), solo_us=fast.median_us)
        rows.append(dataclasses.replace(solo, kernel=kernel, samples=fast))
    names = [named(graph.operators[operator].signature) for operator in _BESIDE]
    pair = PairRecord(names[0], 1, names[1], 1, 9.0, 9.0, 40.0, 5.0, 1.0, 2.0, 1, 1, 9, Contamination())
    rows.append(dataclasses.replace(given.pairs()[0], record=pair, repeat=0))
    (timed,) = [row for row in given.schedules() if row.schedule == sequential(graph)]
    schedule = dataclasses.replace(sequential(graph), variant=(int(Variant.COMPILED),) * len(graph))
    key = canonical_key(graph, schedule, lanes_matter=True)
    rows.append(dataclasses.replace(timed, schedule=schedule, record=dataclasses.replace(timed.record, key=key)))
    store.append(rows)
    return StoreRecording(store)


def test_what_runs_in_a_variant_that_has_no_costs_is_not_simulated_as_another(recorded: Path, graph: OpGraph, tmp_path: Path) -> None:
    # So much faster that the search does without the calls.
    recording = with_variant(recorded, graph, tmp_path / "variants", 0.1)
    runs = SimulatedRuns.of(recording, graph)
    assert runs is not None
    assert runs.problem.costs.other_variant is None
    compiled = dataclasses.replace(sequential(graph), variant=(int(Variant.COMPILED),) * len(graph))
    (timed,) = [row for row in recording.schedules_of[graph.hash] if row.schedule == compiled]
    predicted = runs.schedule(compiled)
    assert predicted is not None
    assert predicted.samples.median_us == pytest.approx(timed.record.samples.median_us)
    assert runs.schedule(sequential(graph)) is None
    assert runs.schedule(dataclasses.replace(compiled, variant=(int(Variant.TEMPLATES), *compiled.variant[1:]))) is None


def test_variants_that_were_recorded_are_offered_and_searched(in_variants: StoreRecording, graph: OpGraph) -> None:
    both = (Variant.CALLS, Variant.COMPILED)
    assert in_variants.offered(graph) == (both,) * len(graph)
    calls = in_variants.problem(graph, calls_only=True)
    costs = in_variants.problem(graph).costs
    assert calls.costs.variant is None
    assert costs.variant is not None
    assert costs.other_variant is not None
    assert costs.other_kernel is not None
    assert (costs.variant[:, 0] == Variant.COMPILED).all()
    assert (costs.other_variant == Variant.CALLS).all()
    assert costs.operator_us() == pytest.approx(calls.costs.operator_us() * _FASTER)
    assert costs.solo_us[costs.other_kernel] == pytest.approx(calls.costs.operator_us())
    a, b = (costs.kernel[operator, 0] for operator in _BESIDE)
    assert costs.slowdown_first[a, b] > 2.0 * costs.slowdown_first[costs.other_kernel[_BESIDE[0]], b]


def test_variants_are_replayed_and_outputs_compared_on_their_calls(in_variants: StoreRecording, graph: OpGraph) -> None:
    program, constants = branches_program(branches=BRANCHES, depth=DEPTH)
    session = ReplayDevice(in_variants, lambda graph: SimulatedRuns.of(in_variants, graph)).open(program, constants, timeout_s=60)
    assert session.prepare_variants([(1, Variant.COMPILED)]) == (0, 0)
    assert session.compile_variant(1, Variant.COMPILED) == dict.fromkeys(range(len(graph)), "")
    assert session.compile_variant(1, Variant.TEMPLATES) == {}
    for operator, (calls, compiled, absent) in zip(
        graph.operators, session.solo_variants([(1, 0), (1, Variant.COMPILED), (1, Variant.TEMPLATES)], repeats=1), strict=True
    ):
        assert isinstance(calls, SoloRecord)
        assert isinstance(compiled, SoloRecord)
        assert isinstance(absent, Failure)
        assert (compiled.source, compiled.signature) == (Source.REPLAYED, variant_signature(operator.signature, Variant.COMPILED))
        assert compiled.samples.median_us == calls.samples.median_us * _FASTER
    schedule = dataclasses.replace(sequential(graph), variant=(int(Variant.COMPILED),) * len(graph))
    (record,) = session.schedules([schedule], rounds=1)
    assert isinstance(record, ScheduleRecord)
    assert record.source is Source.REPLAYED
    inputs = [torch.zeros(graph.values[value].spec.shape) for value in graph.inputs if graph.values[value].role is ValueRole.INPUT]
    reference = session.compare(sequential(graph), [inputs], [[]])
    assert session.compare(schedule, [inputs], [[]]) == reference
    session.close()


def test_a_pair_is_replayed_in_the_variants_it_was_recorded_in(in_variants: StoreRecording, graph: OpGraph) -> None:
    program, constants = branches_program(branches=BRANCHES, depth=DEPTH)
    session = ReplayDevice(in_variants, lambda graph: SimulatedRuns.of(in_variants, graph)).open(program, constants, timeout_s=60)
    known = {(row.first, row.last) for row in in_variants.all_pairs if row.first_width == row.last_width == 1}
    seen = set()
    for a in range(len(graph)):
        for b in range(len(graph)):
            if not graph.independent(a, b):
                continue
            asked = [(0, 0), (Variant.COMPILED, Variant.COMPILED), (Variant.COMPILED, 0), (0, Variant.TEMPLATES)]
            *had, absent = session.pairs([Pair(a, b, 1, 1, first, last) for first, last in asked], repeats=1)
            assert isinstance(absent, Failure)
            for answer, (first, last) in zip(had, asked, strict=False):
                assert isinstance(answer, PairRecord)
                assert answer.first == variant_signature(graph.operators[a].signature, first)
                assert answer.last == variant_signature(graph.operators[b].signature, last)
                assert answer.source is (Source.REPLAYED if (answer.first, answer.last) in known else Source.SIMULATED)
                seen.add((answer.source, first, last))
    assert (Source.REPLAYED, Variant.COMPILED, Variant.COMPILED) in seen
    assert (Source.SIMULATED, Variant.COMPILED, Variant.CALLS) in seen


def test_without_a_predictor_what_was_not_recorded_is_unavailable(recorded: Path, graph: OpGraph) -> None:
    device = ReplayDevice(StoreRecording(Store.open(recorded)))
    session = device.open(*branches_program(branches=BRANCHES, depth=DEPTH), timeout_s=60)
    answers = [
        *session.pairs([Pair(a, b) for a in range(len(graph)) for b in range(len(graph)) if graph.independent(a, b)], repeats=1),
        *session.schedules([sequential(graph, order=[2 * DEPTH, 0, 1, 2, 3, *range(2 * DEPTH + 1, len(graph))])], rounds=1),
    ]
    missing = [answer for answer in answers if isinstance(answer, Failure)]
    assert missing
    assert {answer.kind for answer in missing} == {FailureKind.UNAVAILABLE}


def test_another_program_has_no_times_and_no_prediction(recorded: Path) -> None:
    program, constants = branches_program(branches=2, depth=1, size=24)
    session = replay_device(recorded).open(program, constants, timeout_s=60)
    assert all(isinstance(item, Failure) for row in session.solo((1,), repeats=1) for item in row)
    (answer,) = session.schedules([sequential(program.graph)], rounds=1)
    assert isinstance(answer, Failure)


def test_what_a_simulator_stored_never_becomes_a_replay(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path, families=("alpha",), kernels=4, pairs=6)
    recording = StoreRecording(store)
    assert recording.key.name.startswith("synthetic")
    program, constants = branches_program(branches=BRANCHES, depth=DEPTH)
    renamed = _renamed(program, [row.kernel.signature for row in store.solo()])
    for row in ReplayDevice(recording).open(renamed, constants, timeout_s=60).solo((1,), repeats=1):
        for record in row:
            assert isinstance(record, SoloRecord)
            assert record.source is Source.SIMULATED


def _renamed(program: Program, signatures: list[str]) -> Program:
    operators = tuple(dataclasses.replace(item, signature=signatures[item.index % len(signatures)]) for item in program.graph.operators)
    return dataclasses.replace(program, graph=dataclasses.replace(program.graph, operators=operators))


def test_groups_are_composed_where_none_was_recorded(session: Session) -> None:
    members = (4 * DEPTH, 2 * DEPTH + 1, 1)
    (answer,) = session.groups([Group(members)], repeats=1)
    assert isinstance(answer, GroupRecord)
    assert answer.source in (Source.SIMULATED, Source.REPLAYED)
    assert answer.together_us >= max(answer.solo_us) * 0.5


def test_names_and_folders_that_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="autosched collect"):
        open_device(f"replay:{tmp_path / 'nowhere'}")
    Store.create(tmp_path / "empty")
    with pytest.raises(UsageError, match="no operator times"):
        open_device(f"replay:{tmp_path / 'empty'}")
    with pytest.raises(UnknownName):
        open_device("abacus")
