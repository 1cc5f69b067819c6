"""Every registered cost model passes the conformance suite; and what is particular to each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosched.core.errors import ArtifactCorrupt, UsageError
from autosched.core.records import MAX_SLOWDOWN, SoftwareKey
from autosched.costmodel.analytic import CUDA_BACKGROUND, AnalyticModel
from autosched.costmodel.design import design, take, take_labels
from autosched.costmodel.features import PAIR_FEATURES
from autosched.costmodel.graybox import GrayboxModel
from autosched.costmodel.metrics import measure
from autosched.costmodel.model import COST_MODELS, PairLabels, PairModel, PairQuery, Prediction, makespan_ratio, point_prediction
from autosched.costmodel.pair_set import PairSet, pair_set
from autosched.costmodel.stacked import StackedModel
from autosched.costmodel.torch_model import TorchModel
from autosched.costmodel.xgboost_model import RISING, XgboostModel, bounded
from autosched.datasets.facts import DeviceFacts, KernelFacts, LaunchFacts, with_observed_peaks
from autosched.datasets.journal import Scope
from autosched.datasets.synthetic import synthetic_store
from tests.conformance.costmodel_suite import CostModelSuite

CPU = DeviceFacts("test", "cpu", 4, 100.0, 20.0)
GPU = DeviceFacts("test", "cuda", 100, 10_000.0, 1_000.0, 0, 2048)


class TestAnalytic(CostModelSuite):
    needs_data = False

    @classmethod
    def make(cls) -> PairModel:
        return AnalyticModel()


class TestGraybox(CostModelSuite):
    @classmethod
    def make(cls) -> PairModel:
        return GrayboxModel()


class TestXgboost(CostModelSuite):
    @classmethod
    def make(cls) -> PairModel:
        return XgboostModel(threads=1)


class TestTorch(CostModelSuite):
    @classmethod
    def make(cls) -> PairModel:
        return TorchModel()


class TestStacked(CostModelSuite):
    @classmethod
    def make(cls) -> PairModel:
        return StackedModel()


class TestStackedOnAFixedBase(CostModelSuite):
    needs_data = False

    @classmethod
    def make(cls) -> PairModel:
        return StackedModel(AnalyticModel())

    def test_before_it_was_fitted_its_base_answers(self, pairs: PairSet) -> None:
        answer, prior = self.make().predict(pairs.query), AnalyticModel().predict(pairs.query)
        np.testing.assert_allclose(answer.slowdown_last, prior.slowdown_last, rtol=1e-12)


def kernel(name: str, *, width: int = 1, solo_us: float = 100.0, moved: int = 0, flops: int = 0, blocks: int = 0) -> KernelFacts:
    launch = LaunchFacts(blocks, 256, 32, 0, 4) if blocks else None
    return KernelFacts(name, width, "aten::relu", flops, moved, 0, 1000, solo_us, 1, launch)


def ask(a: KernelFacts, b: KernelFacts, device: DeviceFacts) -> tuple[float, float]:
    zeros = np.zeros(2, dtype=np.int64)
    answer = AnalyticModel().predict(PairQuery((a, b), (device,), zeros, np.array([0]), np.array([1])))
    return float(answer.slowdown_first[0]), float(answer.slowdown_last[0])


def test_threads_beyond_the_cores_share_them() -> None:
    assert ask(kernel("a"), kernel("b"), CPU) == pytest.approx((1.03, 1.03))
    long, longer = (kernel(name, width=4, solo_us=50_000.0) for name in "cd")
    assert ask(long, kernel("b"), CPU) == pytest.approx((1.03 * 5 / 4, 1.03 * 5 / 4))
    assert ask(long, longer, CPU) == pytest.approx((2.06, 2.06))
    assert ask(kernel("a", width=2), kernel("b", width=2), CPU) == pytest.approx((1.03, 1.03))


def test_a_kernel_waits_for_the_core_that_a_short_one_holds() -> None:
    assert ask(kernel("a"), kernel("b", width=4), CPU) == pytest.approx((1.03, MAX_SLOWDOWN))
    assert ask(kernel("a", width=4), kernel("b"), CPU) == pytest.approx((1.03, MAX_SLOWDOWN))
    assert ask(kernel("a"), kernel("b", width=3), CPU) == pytest.approx((1.03, 1.03))
    long = kernel("a", solo_us=50_000.0)
    assert ask(long, kernel("b", width=4), CPU) == pytest.approx((1.03 * 5 / 4, 1.03 * 5 / 4))


def test_memory_beyond_its_peak_slows_only_who_waits_for_it() -> None:
    streaming = kernel("a", moved=1_500_000)  # 15 GB/s of 20
    computing = kernel("c", moved=1000)
    assert min(ask(streaming, kernel("b", moved=1_500_000), CPU)) == pytest.approx(1.03 * 1.5)
    assert max(ask(streaming, computing, CPU)) < 1.04


def test_memory_is_not_short_for_what_stays_in_the_cache() -> None:
    def at_its_peak(name: str, moved: int) -> KernelFacts:
        return kernel(name, moved=moved, solo_us=moved / 20_000.0)  # 20 of 20 GB/s

    cached = dataclasses.replace(CPU, cache_bytes=1_000_000)
    assert ask(at_its_peak("a", 400_000), at_its_peak("b", 500_000), cached) == pytest.approx((1.03, 1.03))
    assert ask(at_its_peak("a", 600_000), at_its_peak("b", 500_000), cached) == pytest.approx((2.06, 2.06))
    assert ask(at_its_peak("a", 400_000), at_its_peak("b", 500_000), CPU) == pytest.approx((2.06, 2.06))  # a cache of unknown size


def test_on_cuda_the_first_takes_the_slots_and_the_last_waits() -> None:
    full, small = kernel("a", blocks=4000), kernel("b", blocks=20)
    first, last = ask(full, small, GPU)
    assert first < 1.1
    assert last == MAX_SLOWDOWN
    # Neither lacks anything, and they slow each other down all the same.
    assert ask(small, kernel("c", blocks=20), GPU) == pytest.approx((CUDA_BACKGROUND, CUDA_BACKGROUND))
    # A second wave of a tenth leaves room for half of the time.
    assert ask(kernel("d", blocks=440), small, GPU)[1] == pytest.approx(2.0, rel=0.05)


def test_what_learned_models_read_of_a_cuda_device_is_as_it_was() -> None:
    """Models that users have trained rest upon it."""
    query = PairQuery((kernel("a", blocks=20), kernel("b", blocks=20)), (GPU,), np.zeros(2, dtype=np.int64), np.array([0]), np.array([1]))
    assert design(query).prior_log == pytest.approx(np.log([1.01, 1.01]))


def test_on_an_unknown_kind_of_device_operators_share_its_peaks_and_nothing_else() -> None:
    other = DeviceFacts("npu", "npu", 1, 100.0, 20.0)  # how many units it has is not known, which reads as one
    assert max(ask(kernel("a"), kernel("b"), other)) < 1.1
    streaming, computing = kernel("c", moved=2_000_000), kernel("d", flops=10_000_000)  # each at its peak
    assert min(ask(streaming, streaming, other)) == pytest.approx(2.02)
    assert min(ask(computing, computing, other)) == pytest.approx(2.02)
    assert max(ask(streaming, computing, other)) < 1.1


def test_unknown_peaks_are_taken_from_what_was_reached_but_not_from_tiny_rates() -> None:
    device = with_observed_peaks(DeviceFacts("t", "cpu", 2), [kernel("a", moved=1000)])
    assert device.bandwidth_gb_s == 16.0
    assert with_observed_peaks(DeviceFacts("t", "cpu", 2), [kernel("a", moved=10_000_000)]).bandwidth_gb_s == 100.0
    assert with_observed_peaks(CPU, [kernel("a", moved=10**9)]) == CPU


def test_the_makespan_ratio_is_the_labels_read_backwards() -> None:
    def ratio(solo_first: float, solo_last: float, first: float, last: float) -> float:
        return float(makespan_ratio(*(np.array([value]) for value in (solo_first, solo_last, first, last)))[0])

    assert ratio(10.0, 10.0, 1.0, 1.0) == pytest.approx(0.5)
    assert ratio(10.0, 10.0, 2.0, 2.0) == pytest.approx(1.0)
    # The short one ends at 2; by then the long one has done 1 of its 10.
    assert ratio(1.0, 10.0, 2.0, 2.0) == pytest.approx((2.0 + 9.0) / 11.0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PairSet:
    return pair_set(synthetic_store(tmp_path_factory.mktemp("store"), families=("alpha", "beta"), kernels=10, pairs=100))


def test_features_are_named_and_finite(pairs: PairSet) -> None:
    rows = design(pairs.query).rows
    assert rows.shape == (2 * len(pairs), len(PAIR_FEATURES))
    assert len(set(PAIR_FEATURES)) == len(PAIR_FEATURES)
    assert np.isfinite(rows).all()
    place = PAIR_FEATURES.index("own_first")
    assert rows[: len(pairs), place].min() == 1.0
    assert rows[len(pairs) :, place].max() == 0.0
    own, other = PAIR_FEATURES.index("own_log_solo_us"), PAIR_FEATURES.index("other_log_solo_us")
    np.testing.assert_allclose(rows[: len(pairs), own], rows[len(pairs) :, other])


def test_a_kernel_without_a_time_is_refused_by_name() -> None:
    bad = kernel("nameless", solo_us=0.0)
    query = PairQuery((bad, bad), (CPU,), np.zeros(2, dtype=np.int64), np.array([0]), np.array([1]))
    with pytest.raises(UsageError, match="nameless"):
        AnalyticModel().predict(query)


@pytest.mark.parametrize("feature", RISING)
def test_trees_never_fall_with_a_greedier_neighbour(pairs: PairSet, feature: str) -> None:
    model = XgboostModel(threads=1)
    model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    rows = design(pairs.query).rows
    more = rows.copy()
    more[:, PAIR_FEATURES.index(feature)] += 0.5
    assert (model.predict_rows(more) >= model.predict_rows(rows) - 1e-5).all()


@given(st.lists(st.tuples(st.floats(1.0, MAX_SLOWDOWN), st.floats(1.0, MAX_SLOWDOWN)), min_size=1, max_size=8), st.floats(0.5, 1.0))
def test_two_together_are_never_slower_than_the_slowest_known(pairs: list[tuple[float, float]], least: float) -> None:
    first, last = np.asarray(pairs).T
    held_first, held_last = bounded(first, last, least)
    assert (1.0 / held_first + 1.0 / held_last >= least - 1e-9).all()
    assert (np.minimum(held_first, held_last) >= 1.0 - 1e-9).all()
    as_it_was = 1.0 / first + 1.0 / last >= least
    np.testing.assert_array_equal(held_first[as_it_was], first[as_it_was])
    np.testing.assert_allclose(held_first / held_last, first / last)


def test_trees_are_held_to_what_pairs_did_in_training_and_stay_so_on_disk(pairs: PairSet, tmp_path: Path) -> None:
    model = XgboostModel(threads=1)
    count = len(pairs)
    first, last = np.full(count, 1.6), np.full(count, 1.6)  # 1.25 of what one does alone
    model.fit(pairs.query, dataclasses.replace(pairs.labels, slowdown_first=first, slowdown_last=last), rng=np.random.default_rng(0))
    # Trees that believe that both take more than twice as long as the prior says.
    model.fit_rows(design(pairs.query).rows, np.full(2 * count, 0.8), np.ones(2 * count), rng=np.random.default_rng(0))
    model.save(tmp_path)
    for asked in (model, XgboostModel.load(tmp_path)):
        answer = asked.predict(pairs.query)
        np.testing.assert_allclose(1.0 / answer.slowdown_first + 1.0 / answer.slowdown_last, 1.0)
        assert answer.makespan_ratio.max() <= 1.0 + 1e-9


def test_six_probe_runs_teach_the_grey_box_a_kernel_it_has_not_seen(tmp_path: Path) -> None:
    whole = pair_set(synthetic_store(tmp_path, families=("alpha", "beta", "gamma"), kernels=14, pairs=160, seed=3))
    family = np.asarray(whole.labels.family)
    train, held = np.flatnonzero(family != "gamma"), np.flatnonzero(family == "gamma")
    model = GrayboxModel()
    model.fit(take(whole.query, train), take_labels(whole.labels, train), rng=np.random.default_rng(0))
    used: dict[int, int] = {}
    probes = []
    for row in held.tolist():
        a, b = int(whole.query.first[row]), int(whole.query.last[row])
        if used.get(a, 0) < 6 and used.get(b, 0) < 6:
            used[a], used[b] = used.get(a, 0) + 1, used.get(b, 0) + 1
            probes.append(row)
    rest = np.asarray(sorted(set(held.tolist()) - set(probes)))

    def error() -> float:
        answer = model.predict(take(whole.query, rest))
        truth = take_labels(whole.labels, rest)
        return float(np.abs(np.log(answer.slowdown_last / truth.slowdown_last)).mean())

    before = error()
    rows = np.asarray(probes)
    model.adapt(take(whole.query, rows), take_labels(whole.labels, rows))
    assert error() < before


def test_the_grey_box_keeps_what_it_knows_of_kernels_that_were_timed_with_another_version_too(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "one", families=("alpha", "beta"), kernels=10, pairs=60)
    many, (old,) = pair_set(store), store.scopes()
    # Which of the two comes last is up to their digests.
    software = next(key for key in versions() if Scope(old.device, key).digest > old.scope)
    scope = Scope(old.device, software).digest
    few = [dataclasses.replace(row, scope=scope) for row in (*store.solo(), *store.pairs()[:10])]
    store.append([dataclasses.replace(old, scope=scope, software=software), *few])
    alone, both = GrayboxModel(), GrayboxModel()
    for model, rows in ((alone, many), (both, pair_set(store))):
        model.fit(rows.query, rows.labels, rng=np.random.default_rng(0))
    errors = [measure(many.labels, model.predict(many.query)).mean_abs_log for model in (alone, both)]
    assert errors[1] < 1.1 * errors[0]


def versions() -> Iterator[SoftwareKey]:
    return (SoftwareKey((("synthetic", str(number)),)) for number in itertools.count(2))


def test_the_grey_box_refuses_a_kind_of_device_it_does_not_know(pairs: PairSet) -> None:
    model = GrayboxModel()
    model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(0))
    two = (kernel("a"), kernel("b"))
    with pytest.raises(UsageError, match="cpu"):
        model.predict(PairQuery(two, (CPU,), np.zeros(2, dtype=np.int64), np.array([0]), np.array([1])))


@pytest.mark.parametrize(("name", "file"), [("xgboost", "trees.ubj"), ("torch", "network.safetensors"), ("graybox", "graybox.safetensors")])
def test_a_missing_file_is_named(name: str, file: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactCorrupt, match=file):
        COST_MODELS.get(name).load(tmp_path)


def test_all_five_models_are_registered() -> None:
    assert {"analytic", "graybox", "xgboost", "torch", "stacked"} <= set(COST_MODELS.names())


class TooLow:
    """A base that says the same of every pair."""

    name = "too low"

    def predict(self, query: PairQuery) -> Prediction:
        return point_prediction(query, np.full(len(query), 2.2), np.full(len(query), 2.2))


def test_pairs_that_no_fold_tested_teach_a_residual_nothing() -> None:
    # One kernel is in every pair: the fold that would hold it out leaves nothing to train on, and the pairs in that fold alone are in none.
    count = 120
    kernels = tuple(KernelFacts(f"k{index}", 1, "aten::relu", 1, 1, 1, 1, 1.0) for index in range(count + 1))
    nowhere = np.zeros(count + 1, dtype=np.int64)
    query = PairQuery(kernels, (DeviceFacts("d", "cpu", 2),), nowhere, np.zeros(count, dtype=np.int64), np.arange(1, count + 1))
    truth, one = np.full(count, 3.0), np.ones(count)
    base: Any = TooLow()
    model = StackedModel(base)
    model.fit(query, PairLabels(truth, truth, truth, ("a",) * count, one, one, one), rng=np.random.default_rng(0))
    assert model.share == 1.0
    assert model.predict(query).slowdown_last == pytest.approx(truth, rel=0.05)
