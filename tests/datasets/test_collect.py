"""Collecting: both orders, nothing twice, budgets, failures, resuming; and splits and audit of what was collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosched.core.errors import UsageError
from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.core.records import (
    BY_OTHERS,
    Contamination,
    DeviceKey,
    Engine,
    Failure,
    FailureKind,
    GroupRecord,
    PairRecord,
    Samples,
    SoftwareKey,
    SoloRecord,
)
from autosched.core.variants import Variant, variant_signature
from autosched.datasets.audit import audit
from autosched.datasets.candidates import diverse_order
from autosched.datasets.choices import GroupChoice, PairChoice
from autosched.datasets.collect import Collected, collect_model, rows_of_tuning
from autosched.datasets.facts import DeviceFacts, LaunchFacts
from autosched.datasets.journal import Scope
from autosched.datasets.probes import probe_choices
from autosched.datasets.schema import PairRow, ScopeRow
from autosched.datasets.splits import by_kernel, by_operator_family, leave_one_out
from autosched.datasets.store import Store

DEVICE, SOFTWARE = DeviceKey("cpu", "test", ()), SoftwareKey(())
SCOPE = ScopeRow(Scope(DEVICE, SOFTWARE).digest, DEVICE, SOFTWARE, DeviceFacts("test", "cpu", 2))


def fork(count: int) -> OpGraph:
    spec = TensorSpec((8,), "float32", (1,))
    values = [Value(0, spec, ValueRole.INPUT, 0)]
    operators = []
    for index in range(count + 1):
        values.append(Value(index + 1, spec, ValueRole.INTERMEDIATE, index + 1))
        source = 0 if index == 0 else 1
        call = Call("aten::relu.default", (Ref(source),), (), (index + 1,))
        operators.append(Operator(index, f"op{index}", (call,), (source,), (index + 1,), (), 8 * index, 32, 32, f"k{index}", ""))
    return OpGraph(tuple(operators), tuple(values), (0,), tuple(range(2, len(values))))


class FakeMeasurer:
    """Answers from arithmetic and counts what it is asked; ``broken`` kernels fail in every pair."""

    def __init__(self, graph: OpGraph, broken: str = "", seconds: float = 0.0) -> None:
        self.graph, self.broken, self.seconds, self.now = graph, broken, seconds, 0.0
        self.asked: list[tuple[str, str]] = []
        self.solo_calls = 0
        self.load = 0.0

    def clock(self) -> float:
        return self.now

    def solo(self, widths: Sequence[int]) -> list[list[SoloRecord | Failure]]:
        self.solo_calls += 1
        return [[self._solo(op, width) for width in widths] for op in self.graph.operators]

    def _solo(self, op: Operator, width: int) -> SoloRecord:
        us = 10.0 + op.index
        return SoloRecord(op.signature, width, Samples(us, us, us, us, us, 5), Contamination(self.load, 0.0))

    def pairs(self, choices: Sequence[PairChoice]) -> list[PairRecord | Failure]:
        answers: list[PairRecord | Failure] = []
        for choice in choices:
            self.now += self.seconds
            first, last = (self.graph.operators[index].signature for index in (choice.first, choice.last))
            self.asked.append((first, last))
            if self.broken in (first, last):
                answers.append(Failure(FailureKind.CRASH, "signal 11"))
            else:
                solo = 10.0 + choice.first, 10.0 + choice.last
                answers.append(
                    PairRecord(first, 1, last, 1, *solo, 15.0 + len(self.asked), 1.1, 1.2, 0.7, 1, 1, 5, Contamination(self.load, 0.0))
                )
        return answers

    def groups(self, choices: Sequence[GroupChoice]) -> list[GroupRecord | Failure]:
        answers: list[GroupRecord | Failure] = []
        for choice in choices:
            self.now += self.seconds
            names = tuple(self.graph.operators[index].signature for index in choice.operators)
            solo, finish = tuple(10.0 + index for index in choice.operators), tuple(20.0 + index for index in choice.operators)
            answers.append(
                GroupRecord(names, choice.widths, solo, (1,) * len(names), finish, max(finish), 5, Contamination(self.load, 0.0))
            )
        return answers


def collect(graph: OpGraph, measurer: FakeMeasurer, store: Store, **options: object) -> Collected:
    defaults: dict[str, object] = {
        "model": "zoo:fork1", "widths": (1,), "max_pairs": 1000, "max_groups": 4, "budget_s": 1e9, "rng": np.random.default_rng(0),
        "clock": measurer.clock,
    }  # fmt: skip
    return collect_model(graph, measurer, store, SCOPE, **(defaults | options))  # type: ignore[arg-type]


def test_only_the_widths_at_which_operators_run_beside_others_are_paired(tmp_path: Path) -> None:
    graph, store = fork(3), Store.create(tmp_path / "runs")
    collect(graph, FakeMeasurer(graph), store, widths=(1, 2), pair_widths=(1,), probes=True)
    assert {row.kernel.width for row in store.solo()} == {1, 2}
    assert {(row.record.first_width, row.record.last_width) for row in store.pairs()} == {(1, 1)}


def test_everything_once_in_both_orders_and_never_again(tmp_path: Path) -> None:
    graph, store = fork(6), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)
    first = collect(graph, measurer, store)
    assert first.finished
    assert first.solo == 7
    assert len(store.groups()) == 4
    once = [row for row in store.pairs() if row.repeat == 0]
    assert len(once) == 30
    asked = {(row.record.first, row.record.last) for row in once}
    assert all((b, a) in asked for a, b in asked)
    again = FakeMeasurer(graph)
    second = collect(graph, again, store, rng=np.random.default_rng(1))
    assert (second.solo, second.pairs, second.groups) == (0, 0, 0)
    assert again.solo_calls == 0
    assert again.asked == []


def test_a_budget_ends_it_and_the_next_run_goes_on(tmp_path: Path) -> None:
    graph, store = fork(9), Store.create(tmp_path)
    short = collect(graph, FakeMeasurer(graph, seconds=1.0), store, budget_s=20.0)
    assert not short.finished
    done = len([row for row in store.pairs() if row.repeat == 0])
    assert 0 < done < 72
    rest = FakeMeasurer(graph)
    assert collect(graph, rest, store).finished
    assert len([row for row in store.pairs() if row.repeat == 0]) == 72
    assert len(set(rest.asked)) == 72 - done


def test_failures_are_remembered_and_do_not_stop_it(tmp_path: Path) -> None:
    graph, store = fork(4), Store.create(tmp_path)
    report = collect(graph, FakeMeasurer(graph, broken="k2"), store)
    assert report.failures >= 6
    assert len([row for row in store.pairs() if row.repeat == 0]) == 6
    again = FakeMeasurer(graph)
    collect(graph, again, store)
    assert again.asked == []


def test_what_somebody_else_may_have_ended_is_tried_again(tmp_path: Path) -> None:
    graph, store = fork(3), Store.create(tmp_path)

    class Ended(FakeMeasurer):
        def solo(self, widths: Sequence[int]) -> list[list[SoloRecord | Failure]]:
            [[_], *others] = super().solo(widths)
            return [[Failure(FailureKind.CRASH, f"was killed by SIGKILL{BY_OTHERS}")], *others]

    assert collect(graph, Ended(graph), store).failures == 1
    assert len(store.solo()) == 3
    assert collect(graph, FakeMeasurer(graph), store).failures == 0
    assert len(store.solo()) == 4


def test_operators_too_short_for_the_clock_of_a_device_are_collected(tmp_path: Path) -> None:
    graph, store = fork(3), Store.create(tmp_path)

    class Coarse(FakeMeasurer):
        def _solo(self, op: Operator, width: int) -> SoloRecord:
            return SoloRecord(op.signature, width, Samples(0.0, 0.0, 0.0, 0.0, 0.0, 5), Contamination())

    for _ in range(2):
        collect(graph, Coarse(graph), store, probes=True)
    assert {row.kernel.solo_us for row in store.solo()} == {1e-3}
    assert len(store.pairs()) > 0
    assert not audit(store).excluded


@pytest.mark.parametrize("place", ["failures.jsonl", "failures.jsonl.lock"])
def test_failures_that_cannot_be_read_are_named_before_anything_is_measured(place: str, tmp_path: Path) -> None:
    graph, store = fork(4), Store.create(tmp_path)
    assert collect(graph, FakeMeasurer(graph, broken="k1"), store).failures
    (tmp_path / place).unlink()
    (tmp_path / place).mkdir()
    measurer = FakeMeasurer(graph, broken="k1")
    with pytest.raises(UsageError, match=rf"cannot read {tmp_path}/{place}: .* remove it, or name another"):
        collect(graph, measurer, store)
    assert not measurer.solo_calls
    assert not measurer.asked


def test_what_was_timed_on_taken_cores_is_not_kept_and_taken_again_later(tmp_path: Path) -> None:
    graph, store = fork(4), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)
    measurer.load = 0.5
    report = collect(graph, measurer, store, max_groups=0)
    assert report.disturbed >= 12
    assert len(store.solo()) == 5  # one thread found the other core free
    assert store.pairs() == []
    quiet = FakeMeasurer(graph)
    assert collect(graph, quiet, store, max_groups=0).disturbed == 0
    assert len([row for row in store.pairs() if row.repeat == 0]) == 12


def test_the_second_half_is_what_the_model_is_least_sure_of(tmp_path: Path) -> None:
    graph, store = fork(10), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)

    def unsure(choices: Sequence[PairChoice]) -> list[float]:
        return [10.0 if {choice.first, choice.last} == {3, 7} else 1.0 for choice in choices]

    collect(graph, measurer, store, max_pairs=20, max_groups=0, uncertainty=unsure)
    assert {("k3", "k7"), ("k7", "k3")} <= set(measurer.asked)
    assert len([row for row in store.pairs() if row.repeat == 0]) == 20


def test_probes_are_few_for_each_kernel_and_come_first(tmp_path: Path) -> None:
    graph, store = fork(12), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)
    collect(graph, measurer, store, max_pairs=60, max_groups=0, probes=True)
    times = {(row.kernel.signature, 1): row.kernel for row in store.solo()}
    choices = probe_choices(graph, times, (1,))
    # The last kernel computes most and runs longest, the first moves most: two stressors, beside every kernel, in both orders.
    stressors = {1, 12}
    assert all({choice.first, choice.last} & stressors for choice in choices)
    assert len(choices) == 2 * (11 + 10)
    assert all(graph.independent(choice.first, choice.last) for choice in choices)
    probed = {(graph.operators[choice.first].signature, graph.operators[choice.last].signature) for choice in choices}
    once = list(dict.fromkeys(measurer.asked))
    assert set(once[: len(probed)]) == probed


def test_a_diverse_choice_covers_the_corners_before_the_middle() -> None:
    rng = np.random.default_rng(0)
    cloud = np.concatenate([rng.normal(0, 0.01, (50, 2)), [[5.0, 5.0], [-5.0, 5.0], [5.0, -5.0]]])
    order = diverse_order(cloud, 4, rng)
    assert {50, 51, 52} <= set(order)
    assert len(set(diverse_order(cloud, 100, rng))) == 53


def test_what_a_tuning_job_measured_becomes_rows(tmp_path: Path) -> None:
    graph, store = fork(3), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)
    records = [record for record in measurer.pairs([PairChoice(1, 2, 1, 1)]) if isinstance(record, PairRecord)]
    rows = rows_of_tuning(graph, SCOPE, model="zoo:fork1", solo=measurer.solo((1,)), pairs=records)
    assert store.append(rows) == 6
    assert audit(store).findings == ()


def test_variants_are_rows_under_names_of_their_own(tmp_path: Path) -> None:
    graph, store = fork(3), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)
    (pair,) = [record for record in measurer.pairs([PairChoice(1, 2, 1, 1)]) if isinstance(record, PairRecord)]
    name = variant_signature(pair.first, Variant.CUDNN_FUSED)
    alone = [[record for record in row if isinstance(record, SoloRecord)] for row in measurer.solo((1,))]
    fused = dataclasses.replace(alone[1][0], signature=name)
    alone[1].append(fused)
    pairs = [pair, dataclasses.replace(pair, first=name)]
    launches = {name: LaunchFacts(8, 128), alone[2][0].signature: LaunchFacts(9, 64)}
    store.append(rows_of_tuning(graph, SCOPE, model="zoo:fork1", solo=alone, pairs=pairs, launches=launches))
    kernels = {row.kernel.signature: row.kernel for row in store.solo()}
    assert kernels[name] == dataclasses.replace(kernels[pair.first], signature=name, launch=LaunchFacts(8, 128))
    assert kernels[pair.first].launch is None
    assert kernels[alone[2][0].signature].launch == LaunchFacts(9, 64)
    assert {row.record.first for row in store.pairs()} == {pair.first, name}
    assert audit(store).excluded == frozenset()


def test_what_ran_on_another_engine_is_not_kept(tmp_path: Path) -> None:
    graph, store = fork(3), Store.create(tmp_path)
    measurer = FakeMeasurer(graph)
    native = dataclasses.replace(SCOPE, software=SCOPE.software.on(Engine.NATIVE))
    (pair,) = [record for record in measurer.pairs([PairChoice(1, 2, 1, 1)]) if isinstance(record, PairRecord)]
    alone = [[record for record in row if isinstance(record, SoloRecord)] for row in measurer.solo((1,))]
    for place, engine in enumerate((Engine.NATIVE, Engine.PYTHON)):
        alone[place] = [dataclasses.replace(record, engine=engine) for record in alone[place]]
    pairs = [dataclasses.replace(pair, engine=Engine.PYTHON)]
    store.append(rows_of_tuning(graph, native, model="zoo:fork1", solo=alone, pairs=pairs))
    assert {row.kernel.signature for row in store.solo()} == {row[0].signature for row in (alone[0], *alone[2:])}
    assert store.pairs() == []


def test_the_audit_names_what_is_wrong(tmp_path: Path) -> None:
    graph, store = fork(4), Store.create(tmp_path)
    collect(graph, FakeMeasurer(graph), store)
    good = next(row for row in store.pairs() if row.repeat == 0).record
    bad = {
        "impossible": dataclasses.replace(good, slowdown_first=0.0),
        "no kernel": dataclasses.replace(good, first="nobody"),
        "drift": dataclasses.replace(good, solo_first_us=good.solo_first_us * 2),
        "contaminated": dataclasses.replace(good, contamination=Contamination(0.7, 0.0)),
    }
    for repeat, record in enumerate(bad.values(), start=10):
        store.append([PairRow(SCOPE.scope, "fork", "zoo:fork1", record, repeat)])
    report = audit(store)
    assert set(bad) <= {finding.kind for finding in report.findings}
    assert len(report.excluded) == 3
    assert report.noise_floor_pct >= 0.0


def test_a_group_that_took_no_time_is_impossible(tmp_path: Path) -> None:
    graph, store = fork(4), Store.create(tmp_path)
    collect(graph, FakeMeasurer(graph), store, max_groups=1)
    (row,) = store.groups()
    for number, wrong in enumerate(({"together_us": 0.0}, {"solo_us": (-1.0,) * len(row.record.solo_us)}), start=2):
        record = dataclasses.replace(row.record, widths=(number,) * len(row.record.widths), **wrong)
        store.append([dataclasses.replace(row, record=record)])
    (found,) = [finding for finding in audit(store).findings if finding.kind == "impossible"]
    assert set(found.keys) == {item.key for item in store.groups()} - {row.key}
    assert found.excluded


def test_repeats_that_others_disturbed_say_nothing_of_the_noise_floor(tmp_path: Path) -> None:
    graph, store = fork(4), Store.create(tmp_path)
    collect(graph, FakeMeasurer(graph), store)
    floor_pct = audit(store).noise_floor_pct
    for number, row in enumerate([row for row in store.pairs() if row.repeat == 0]):
        slow = dataclasses.replace(row.record, slowdown_last=row.record.slowdown_last * 5, contamination=Contamination(0.7, 0.0))
        store.append([dataclasses.replace(row, record=slow, repeat=10 + number)])
    assert audit(store).noise_floor_pct == floor_pct


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=40))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_pair_is_ever_on_both_sides(rows: list[tuple[str, int, int]]) -> None:
    keys = [(min(a, b), max(a, b)) for _, a, b in rows]
    groups = [group for group, _, _ in rows]
    folds = []
    if len(set(groups)) > 1:
        folds += leave_one_out(groups, keys)
        assert sum(len(fold.test) for fold in folds) == len(rows)
    if len({item for key in keys for item in key}) > 1:
        folds += by_kernel(keys, 3, np.random.default_rng(0))
    for fold in folds:
        assert not {keys[i] for i in fold.train.tolist()} & {keys[i] for i in fold.test.tolist()}


def test_one_group_cannot_be_held_out() -> None:
    with pytest.raises(UsageError, match="collect from another model family"):
        leave_one_out(["a", "a"], [1, 2])


def test_a_kind_of_operator_is_held_out_with_every_pair_it_is_in() -> None:
    folds = by_operator_family([("aten::convolution", "aten::relu"), ("aten::relu", "aten::add"), ("aten::mm", "aten::relu")])
    by_name = {fold.name: fold for fold in folds}
    assert by_name["convolution"].test.tolist() == [0]
    assert "memory" not in by_name


def test_groups_keep_their_share_of_the_time_from_pairs(tmp_path: Path) -> None:
    graph, store = fork(9), Store.create(tmp_path)
    report = collect(graph, FakeMeasurer(graph, seconds=1.0), store, budget_s=40.0, max_groups=4)
    assert not report.finished
    assert report.groups == len(store.groups()) == 4
    assert {len(row.record.signatures) for row in store.groups()} == {3, 4}


def test_groups_that_are_still_missing_are_drawn_with_the_same_seed_too(tmp_path: Path) -> None:
    graph, store = fork(6), Store.create(tmp_path)
    collect(graph, FakeMeasurer(graph), store, max_groups=0)
    counts = [collect(graph, FakeMeasurer(graph), store, max_groups=aim).groups for aim in (3, 5, 5)]
    assert counts == [3, 2, 0]


def test_groups_of_equal_kernels_are_measured_once(tmp_path: Path) -> None:
    graph, store = fork(6), Store.create(tmp_path)
    alike = tuple(dataclasses.replace(item, signature="k" if item.index else "k0") for item in graph.operators)
    measurer = FakeMeasurer(dataclasses.replace(graph, operators=alike), seconds=1.0)
    assert collect(measurer.graph, measurer, store, max_pairs=0, max_groups=5).groups == 2
    assert measurer.now == 2.0


def test_what_others_disturbed_is_kept_only_when_asked(tmp_path: Path) -> None:
    graph = fork(4)
    measurer = FakeMeasurer(graph)
    measurer.load = 0.9
    away, kept = Store.create(tmp_path / "away"), Store.create(tmp_path / "kept")
    assert collect(graph, measurer, away).disturbed > 0
    assert not away.solo()
    assert collect(graph, measurer, kept, keep_disturbed=True).disturbed > 0
    assert kept.solo()
    assert kept.groups()
    assert {row.key for row in (*kept.pairs(), *kept.groups())} <= audit(kept).excluded
