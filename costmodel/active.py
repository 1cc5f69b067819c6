"""Which pairs to measure next: those whose slowdown a model knows least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autosched.core.graph import OpGraph
from autosched.costmodel.model import PairModel, PairQuery
from autosched.datasets.choices import PairChoice
from autosched.datasets.facts import with_observed_peaks
from autosched.datasets.schema import ScopeRow
from autosched.datasets.store import Store


class ModelUncertainty:
    """The callback that ``datasets.collect`` ranks the second half of its pairs by.

    Reads the solo times from the store when it is first asked, by which time they are there.
    """

    def __init__(self, model: PairModel, graph: OpGraph, store: Store, scope: ScopeRow) -> None:
        self._model = model
        self._graph = graph
        self._store = store
        self._scope = scope

    def __call__(self, choices: Sequence[PairChoice]) -> list[float]:
        """High over low of the wider of both directions' intervals; pairs of kernels without a time come last, with 0."""
        rows = [row.kernel for row in self._store.solo() if row.scope == self._scope.scope]
        place = {(kernel.signature, kernel.width): index for index, kernel in enumerate(rows)}
        operators = self._graph.operators
        indices = [
            (
                place.get((operators[choice.first].signature, choice.first_width), -1),
                place.get((operators[choice.last].signature, choice.last_width), -1),
            )
            for choice in choices
        ]
        known = [number for number, pair in enumerate(indices) if min(pair) >= 0]
        result = [0.0] * len(choices)
        if known:
            first, last = (np.asarray([indices[number][side] for number in known], dtype=np.int64) for side in (0, 1))
            device = with_observed_peaks(self._scope.facts, rows)
            answer = self._model.predict(PairQuery(tuple(rows), (device,), np.zeros(len(rows), dtype=np.int64), first, last))
            for number, ratio in zip(known, (answer.high / answer.low).max(axis=1).tolist(), strict=True):
                result[number] = ratio
        return result
