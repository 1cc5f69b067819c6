"""What every cost model must do, whoever wrote it: inherit :class:`CostModelSuite` and say which model.

Runs on simulated rows; it tests behaviour, never accuracy.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from autosched.core.errors import UsageError
from autosched.core.records import MAX_SLOWDOWN
from autosched.costmodel.design import take, take_labels
from autosched.costmodel.model import PairModel, PairQuery
from autosched.costmodel.pair_set import PairSet, pair_set
from autosched.datasets.synthetic import synthetic_store


class CostModelSuite:
    """Abstract: ``make`` returns an unfitted model; ``needs_data`` says whether it must be fitted before it answers."""

    needs_data = True

    @classmethod
    def make(cls) -> PairModel:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def pairs(cls, tmp_path_factory: pytest.TempPathFactory) -> PairSet:
        return pair_set(synthetic_store(tmp_path_factory.mktemp("store"), families=("alpha", "beta"), kernels=8, pairs=40))

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls, pairs: PairSet) -> PairModel:
        model = cls.make()
        model.fit(pairs.query, pairs.labels, rng=np.random.default_rng(1))
        return model

    def test_every_pair_is_answered_with_finite_numbers_of_at_least_one(self, fitted: PairModel, pairs: PairSet) -> None:
        answer = fitted.predict(pairs.query)
        for values in (answer.slowdown_first, answer.slowdown_last):
            assert values.shape == (len(pairs),)
            assert values.dtype == np.float64
            assert np.isfinite(values).all()
            assert values.min() >= 1.0
            assert values.max() <= MAX_SLOWDOWN
        assert (answer.makespan_ratio > 0).all()
        assert answer.low.shape == answer.high.shape == (len(pairs), 2)
        assert (answer.low <= answer.high).all()

    def test_an_answer_does_not_depend_on_the_other_pairs_asked(self, fitted: PairModel, pairs: PairSet) -> None:
        whole = fitted.predict(pairs.query)
        rows = np.arange(len(pairs))[::-7].copy()
        part = fitted.predict(take(pairs.query, rows))
        np.testing.assert_allclose(part.slowdown_last, whole.slowdown_last[rows], rtol=1e-5)

    def test_no_pairs_are_no_answers(self, fitted: PairModel, pairs: PairSet) -> None:
        assert len(fitted.predict(take(pairs.query, np.zeros(0, dtype=np.int64))).slowdown_first) == 0

    def test_the_start_order_matters(self, fitted: PairModel, pairs: PairSet) -> None:
        query = pairs.query
        swapped = PairQuery(query.kernels, query.devices, query.kernel_device, query.last, query.first)
        assert not np.allclose(fitted.predict(query).slowdown_first, fitted.predict(swapped).slowdown_last)

    def test_saved_and_loaded_it_predicts_the_same_to_the_last_bit(self, fitted: PairModel, pairs: PairSet, tmp_path: Path) -> None:
        fitted.save(tmp_path)
        again = type(fitted).load(tmp_path)
        assert again.name == fitted.name
        np.testing.assert_array_equal(again.predict(pairs.query).slowdown_last, fitted.predict(pairs.query).slowdown_last)

    def test_equal_seeds_make_equal_models(self, fitted: PairModel, pairs: PairSet) -> None:
        twin = self.make()
        twin.fit(pairs.query, pairs.labels, rng=np.random.default_rng(1))
        np.testing.assert_allclose(twin.predict(pairs.query).slowdown_last, fitted.predict(pairs.query).slowdown_last, rtol=1e-4)

    def test_it_refuses_to_answer_or_be_saved_before_it_was_fitted(self, pairs: PairSet, tmp_path: Path) -> None:
        if not self.needs_data:
            pytest.skip("it needs no data")
        with pytest.raises(UsageError, match="before it was fitted"):
            self.make().predict(pairs.query)
        with pytest.raises(UsageError, match="before it was fitted"):
            self.make().save(tmp_path)

    def test_it_refuses_labels_that_are_not_numbers_and_empty_data(self, pairs: PairSet) -> None:
        if not self.needs_data:
            pytest.skip("it needs no data")
        labels = pairs.labels
        spoiled = labels.slowdown_last.copy()
        spoiled[3] = np.nan
        bad = dataclasses.replace(labels, slowdown_last=spoiled)
        with pytest.raises(UsageError, match="slowdown_last holds 1 values"):
            self.make().fit(pairs.query, bad, rng=np.random.default_rng(0))
        none = np.zeros(0, dtype=np.int64)
        with pytest.raises(UsageError, match="no measured pairs"):
            self.make().fit(take(pairs.query, none), take_labels(labels, none), rng=np.random.default_rng(0))

    def test_ten_pairs_are_enough_to_fit(self, pairs: PairSet) -> None:
        model = self.make()
        rows = np.arange(10)
        model.fit(take(pairs.query, rows), take_labels(pairs.labels, rows), rng=np.random.default_rng(0))
        assert np.isfinite(model.predict(pairs.query).slowdown_last).all()
