"""The model's own doubt ranks pairs; kernels without a time come last."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from autosched.core.graph import Operator, OpGraph, TensorSpec, Value, ValueRole
from autosched.core.program import Call, Ref
from autosched.costmodel.active import ModelUncertainty
from autosched.costmodel.model import PairLabels, PairQuery, Prediction, point_prediction
from autosched.datasets.choices import PairChoice
from autosched.datasets.facts import DeviceFacts
from autosched.datasets.schema import ScopeRow
from autosched.datasets.store import Store
from tests.conformance.store_suite import DEVICE, SCOPE, SOFTWARE, example_rows


class Doubtful:
    """Unsure in proportion to the number of kernel ``first``."""

    name = "doubtful"

    def fit(self, query: PairQuery, labels: PairLabels, *, rng: np.random.Generator) -> None:
        raise NotImplementedError

    def predict(self, query: PairQuery) -> Prediction:
        ones = np.ones(len(query))
        answer = point_prediction(query, ones, ones)
        answer.high[:, 0] = 1.0 + query.first
        return answer

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    @classmethod
    def load(cls, directory: Path) -> Doubtful:
        raise NotImplementedError


def test_the_wider_interval_counts_and_unknown_kernels_come_last(tmp_path: Path) -> None:
    spec = TensorSpec((8,), "float32", (1,))
    values = tuple(Value(i, spec, ValueRole.INPUT if i == 0 else ValueRole.INTERMEDIATE, i) for i in range(4))
    operators = tuple(
        Operator(i, f"op{i}", (Call("aten::relu.default", (Ref(0),), (), (i + 1,)),), (0,), (i + 1,), (), 8, 32, 32, name, "")
        for i, name in enumerate(("a", "b", "never timed"))
    )
    graph = OpGraph(operators, values, (0,), (1, 2, 3))
    store = Store.create(tmp_path)
    store.append(example_rows("ab"))
    scope = ScopeRow(SCOPE, DEVICE, SOFTWARE, DeviceFacts("suite", "cpu", 2))
    place = {row.kernel.signature: index for index, row in enumerate(store.solo())}
    doubts = ModelUncertainty(Doubtful(), graph, store, scope)([PairChoice(0, 1, 1, 1), PairChoice(1, 0, 1, 1), PairChoice(2, 0, 1, 1)])
    assert doubts == [1.0 + place["a"], 1.0 + place["b"], 0.0]
