"""The owner of new hardware: collect runs into a store, train a cost model on it, evaluate it on held-out models."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosched.capture.export import capture
from autosched.core.errors import AutoschedError
from autosched.core.progress import Progress, Silent
from autosched.costmodel.evaluate import Evaluation
from autosched.costmodel.evaluate import evaluate as evaluate_model
from autosched.costmodel.pair_set import pair_set
from autosched.costmodel.persist import load_model, save_model
from autosched.costmodel.train import Training
from autosched.costmodel.train import train as train_model
from autosched.datasets.audit import audit
from autosched.datasets.collect import collect_model
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import ScopeRow
from autosched.datasets.session_measurer import SessionMeasurer
from autosched.datasets.store import Store
from autosched.device.registry import device_named

_log = logging.getLogger(__name__)
_TIMEOUT_S = 120.0
_REPEATS = 9


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to collect from."""

    name: str
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CollectResult:
    """``autosched collect``: rows in the store afterwards, and what an audit says of them."""

    store: str
    device: str
    models: tuple[str, ...]
    left_out: tuple[str, ...]
    solo_rows: int
    pair_rows: int
    usable_pairs: int
    noise_floor_pct: float | None
    findings: tuple[str, ...]

    def summary(self) -> str:
        """For people."""
        noise = f"{self.noise_floor_pct:.1f} %" if self.noise_floor_pct is not None else "unknown (no repeats)"
        lines = [f"{self.store}: {self.solo_rows} solo runs and {self.pair_rows} pair runs ({self.usable_pairs} usable) on {self.device}"]
        return "\n".join([*lines, f"  noise floor of repeats: {noise}", *(f"  {line}" for line in (*self.left_out, *self.findings))])


def collect(
    subjects: Sequence[Subject],
    folder: str | os.PathLike[str],
    *,
    device: str = "auto",
    budget_s: float = 120.0,
    max_pairs: int = 400,
    seed: int = 0,
    progress: Progress | None = None,
) -> CollectResult:
    """Measure the unique operators of some models and a chosen set of pairs; call it again to go on where it stopped.

    Args:
        budget_s: for all models together, each an equal share of what is left.
        max_pairs: ordered pairs for each model.

    A model that cannot be captured is left out and named; the rest goes on.
    """
    told = progress or Silent()
    opened = device_named(device)
    scope = ScopeRow(Scope(opened.key, opened.software).digest, opened.key, opened.software, device_facts(opened.key))
    store = Store.create(Path(folder))
    left_out: list[str] = []
    deadline = time.monotonic() + budget_s
    for index, subject in enumerate(subjects):
        told.stage(f"collect {subject.name}", max(deadline - time.monotonic(), 0.0))
        try:
            captured = capture(subject.model, subject.args, subject.kwargs, target=opened.key.kind)
        except AutoschedError as error:
            left_out.append(f"{subject.name} left out: {error}")
            continue
        session = opened.open(captured.program, captured.constants, timeout_s=_TIMEOUT_S)
        try:
            collect_model(
                captured.program.graph,
                SessionMeasurer(session, repeats=_REPEATS),
                store,
                scope,
                model=subject.name,
                widths=session.limits.widths,
                max_pairs=max_pairs,
                max_groups=0,
                budget_s=max(deadline - time.monotonic(), 0.0) / (len(subjects) - index),
                rng=np.random.default_rng(seed),
                progress=lambda _, done, total: told.update(done=done, total=total),
            )
        finally:
            session.close()
    found = audit(store)
    pairs = store.pairs()
    noise = found.noise_floor_pct
    return CollectResult(
        os.fspath(folder),
        opened.key.name,
        tuple(subject.name for subject in subjects),
        tuple(left_out),
        len(store.solo()),
        len(pairs),
        len(pairs) - len(found.excluded & {row.key for row in pairs}),
        noise if np.isfinite(noise) else None,
        tuple(found.lines()),
    )


def train(
    folder: str | os.PathLike[str], output: str | os.PathLike[str], *, start: str | os.PathLike[str] | None = None, seed: int = 0
) -> Training:
    """Fit every model, keep what wins on held-out model families, and write it to ``output``.

    Args:
        start: a model trained elsewhere, to begin from.
    """
    before = load_model(Path(start)) if start is not None else None
    training = train_model(pair_set(Store.open(Path(folder))), seed=seed, start=before, report=_log.info)
    save_model(training.model, Path(output))
    return training


def evaluate(model: str | os.PathLike[str], folder: str | os.PathLike[str], *, seed: int = 0) -> Evaluation:
    """What a trained model is worth on a store of runs."""
    store = Store.open(Path(folder))
    return evaluate_model(load_model(Path(model)), pair_set(store), store, seed=seed)
