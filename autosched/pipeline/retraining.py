"""From a store of runs to a cost model: train one, and evaluate it on runs it has not seen. Collecting is in ``collecting.py``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from autosched.config import cost_models_dir, runs_dir
from autosched.core.errors import AutoschedError, UsageError
from autosched.core.progress import Progress, Silent
from autosched.costmodel.evaluate import Evaluation
from autosched.costmodel.evaluate import evaluate as evaluate_model
from autosched.costmodel.gate import LEAST_PAIRS
from autosched.costmodel.model import COST_MODELS
from autosched.costmodel.pair_set import PairSet, pair_set
from autosched.costmodel.persist import check_replaceable, load_model, save_model
from autosched.costmodel.train import DEFAULT_KINDS, Training
from autosched.costmodel.train import train as train_model
from autosched.datasets.store import Store
from autosched.device.registry import device_named
from autosched.pipeline.model_choice import Judged, engine_of, judged_at, model_in_use
from autosched.pipeline.schedule_errors import schedule_errors


def places_of(device: str) -> tuple[Path, Path]:
    """Where tuning jobs on ``device`` leave their runs, and where they look for a cost model."""
    digest = device_named(device).key.digest
    return runs_dir() / digest, cost_models_dir() / digest


def model_of(device: str) -> Path:
    """The folder of the cost model that tuning on ``device`` reads; where it takes the prior, that of the one installed here.

    Raises:
        UsageError: there is neither.
    """
    found = device_named(device)
    used = model_in_use(found.key, engine_of(found))
    installed = cost_models_dir() / found.key.digest
    if used.folder is None and not os.path.lexists(installed):
        raise UsageError(f"tuning on this device uses the analytic prior: {used.why}. To evaluate a model, name its folder.")
    return used.folder or installed


def judged_on(device: str, folder: Path) -> tuple[Judged, Judged]:
    """Whether tuning on ``device`` takes the model in ``folder``, where it is installed there; and what it takes now."""
    found = device_named(device)
    key, engine = found.key, engine_of(found)
    return judged_at(folder, key, engine), model_in_use(key, engine)


def train(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    start: str | os.PathLike[str] | None = None,
    install_on: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Training:
    """Fit every model, keep what wins on held-out model families, and write it to ``output``.

    Args:
        start: a model trained elsewhere, to begin from.
        install_on: the device that looks for its cost model in ``output``, if one does.
        progress: told what is fitted.

    Raises:
        UsageError: before anything is fitted, if ``output`` holds something else than a cost model, or one that ``install_on`` uses and
            would lose to one that nobody could use or judge.
    """
    check_replaceable(Path(output))
    told = progress or Silent()
    told.stage(f"reading {os.fspath(folder)}")
    before = load_model(Path(start)) if start is not None else None
    kinds = (*DEFAULT_KINDS, *COST_MODELS.plugged())
    pairs = pair_set(Store.open(Path(folder)))
    if install_on is not None and (why := _useless_on(install_on, pairs, begun=before is not None)):
        _keep_installed(install_on, Path(output), f"{os.fspath(folder)} holds {why}")
    training = train_model(pairs, seed=seed, kinds=kinds, start=before, report=told.stage)
    save_model(training.model, Path(output))
    return training


def _useless_on(device: str, pairs: PairSet, *, begun: bool) -> str:
    """Why nothing that is learned from ``pairs`` can be of use to tuning on ``device``, as far as can be told before; empty if it may."""
    kinds, own = sorted({item.kind for item in pairs.query.devices}), device_named(device).key.kind
    if own not in kinds:
        return f"pairs of {', '.join(kinds)}, and this device is {own}"
    if len(pairs) < LEAST_PAIRS and not begun:
        return f"{len(pairs)} usable pairs; a learned model needs at least {LEAST_PAIRS} to be judged"
    return ""


def _keep_installed(device: str, place: Path, why: str) -> None:
    try:
        installed, _ = judged_on(device, place)
    except AutoschedError:
        return
    if installed.folder is not None:
        raise UsageError(f"{why}: the cost model that tuning uses here ({installed.name}, {installed.why}) stays; -o DIR writes beside it")


def evaluate(model: str | os.PathLike[str], folder: str | os.PathLike[str], *, seed: int = 0) -> Evaluation:
    """What a trained model is worth on a store of runs: on pairs, groups and whole schedules."""
    store, trained = Store.open(Path(folder)), load_model(Path(model))
    pairs = pair_set(store)
    # What ran on other lanes than the pairs is none of the model's business.
    schedules = schedule_errors(store, {trained.name: lambda family: trained}, scopes={row.scope for row in pairs.scopes})
    found = evaluate_model(trained, pairs, store, seed=seed)
    return dataclasses.replace(found, schedules=schedules, folder=os.fspath(model))
