"""What jobs leave to each other: the journal of measurements, the runs a cost model learns from, and the trained model itself."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from autosched.config import cost_models_dir, measurements_dir, runs_dir
from autosched.core.costs import CostTable
from autosched.core.decoding import decode_json
from autosched.core.errors import AutoschedError
from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, DeviceKey, Failure, PairRecord, ScheduleRecord, SoloRecord
from autosched.core.scratch import Scratch
from autosched.costmodel.persist import load_model, read_card
from autosched.costmodel.table import pairs_that_meet
from autosched.costmodel.trained import Card, TrainedModel
from autosched.datasets.collect import rows_of_tuning
from autosched.datasets.facts import LaunchFacts
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.schema import GraphRow, ScheduleRow, ScopeRow
from autosched.datasets.splits import family_of
from autosched.datasets.store import Store
from autosched.device.base import Device, Limits
from autosched.pipeline.candidates import Candidate
from autosched.pipeline.judge import Times
from autosched.pipeline.schedule_runs import limits_row, schedule_row

_log = logging.getLogger(__name__)

_NONE_YET = "no model was trained for this device: 'autosched collect -o runs', then 'autosched train runs'"


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """What predicts the pairs that are not measured: ``model``, or the analytic prior for ``None``; ``why`` says so to people."""

    model: TrainedModel | None
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What a model's card says: where it lies, or ``None`` for the analytic prior; ``why`` says so to people."""

    folder: Path | None
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What a job measured of a graph's parts."""

    solo: Sequence[Sequence[SoloRecord | Failure]]
    pairs: Sequence[PairRecord]
    launches: Mapping[str, LaunchFacts]


def device_digest(key: DeviceKey) -> str:
    """A device without its software, as a folder name: 24 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:24]


def open_journal(device: Device, *, fresh: bool, private: bool) -> Journal:
    """The journal of a device; ``private`` gives one that nobody reads later, for what is not measured."""
    scope = Scope(device.key, device.software)
    path = measurements_dir() / f"{scope.digest}.jsonl"
    if not private:
        try:
            if fresh:
                path.unlink(missing_ok=True)
            return Journal.open(path, scope)
        except OSError as error:
            # A job must not fail for want of a place to remember in; it only cannot be resumed.
            _log.warning("measurements are not kept: %s cannot be written (%s); set AUTOSCHED_CACHE to a folder that can", path, error)
    return _private_journal(path.name, scope)


def _private_journal(name: str, scope: Scope) -> Journal:
    """Gone with its object, and if this process is killed, with the next one."""
    scratch = Scratch()
    journal = Journal.open(scratch.path / name, scope)
    weakref.finalize(journal, scratch.close)
    return journal


def choose_model(key: DeviceKey, explicit: Path | None = None) -> ChosenModel:
    """The cost model for a device: ``explicit``, else the one trained on this machine, else one that ships, else the analytic prior.

    A model counts only if its gate accepted it on held-out runs and it was trained on this kind of device.

    Raises:
        ArtifactCorrupt, IncompatibleArtifact: for ``explicit`` only; another one that cannot be read is passed over with a warning.
    """
    if explicit is not None:
        model = load_model(explicit)
        judged = _judged(model.name, model.card, key, explicit, str(explicit))
    else:
        judged = model_in_use(key)
        model = None
    if judged.folder is None:
        return ChosenModel(None, judged.name, judged.why)
    try:
        return ChosenModel(model or load_model(judged.folder), judged.name, judged.why)
    except AutoschedError as error:
        _log.warning("the cost model in %s is not used: %s", judged.folder, error)
        return ChosenModel(None, "analytic", f"the one in {judged.folder} cannot be read")


def model_in_use(key: DeviceKey) -> Judged:
    """Which model :func:`choose_model` takes where none is named, from the cards alone: no model is read, and no library loaded."""
    refused: list[str] = []
    for folder in (cost_models_dir() / device_digest(key), *_shipped(key)):
        if not (folder / "manifest.json").is_file():
            continue
        try:
            judged = judged_at(folder, key)
        except AutoschedError as error:
            _log.warning("the cost model in %s is not used: %s", folder, error)
            refused.append(f"the one in {folder} cannot be read")
            continue
        if judged.folder is not None:
            return judged
        refused.append(judged.why)
    return Judged(None, "analytic", "; ".join(refused) or _NONE_YET)


def judged_at(folder: Path, key: DeviceKey) -> Judged:
    """Whether a device takes the model in ``folder``, from its card alone.

    Raises:
        ArtifactCorrupt, IncompatibleArtifact: if it cannot be read.
    """
    return _judged(*read_card(folder), key, folder, folder.name)


def prediction_note(chosen: ChosenModel, graph: OpGraph, table: CostTable, pairs: Sequence[PairRecord]) -> str:
    """How many of the pairs that can meet were measured, and who predicted the others."""
    meet = pairs_that_meet(graph, table.kernel, len(table.solo_us), one_team=table.one_team)
    place = {
        (operator.signature, width): int(table.kernel[operator.index, column])
        for operator in graph.operators
        for column, width in enumerate(table.widths)
    }
    known = np.zeros_like(meet)
    for pair in pairs:
        first, last = place.get((pair.first, pair.first_width)), place.get((pair.last, pair.last_width))
        if first is not None and last is not None:
            known[first, last] = True
    total = int(meet.sum())
    if not total:
        return "no two operators of this graph can run at the same time"
    share = int((meet & ~known).sum()) / total
    said = f"cost model {chosen.name} predicts {share:.0%} of the {total} pairs of kernels that can meet, the rest is measured"
    return f"{said} ({chosen.why})"


def remember_runs(
    device: ScopeRow,
    graph: OpGraph,
    model: str,
    limits: Limits,
    measured: Measured,
    timed: Sequence[ScheduleRow],
) -> Path | None:
    """Add what a job measured to the runs of this device that ``autosched train`` learns from; ``None`` if it cannot be written."""
    folder = runs_dir() / device_digest(device.device)
    of_graph = {operator.signature for operator in graph.operators}
    pairs = [pair for pair in measured.pairs if {pair.first, pair.last} <= of_graph]
    rows = rows_of_tuning(
        graph, device, model=model, widths=limits.widths, solo=measured.solo, pairs=pairs, launches=dict(measured.launches)
    )
    try:
        Store.create(folder).append(
            [*rows, *timed, GraphRow(family_of(model), model, graph), limits_row(device.scope, model, graph, limits)]
        )
    except (OSError, AutoschedError) as error:
        _log.warning("what was measured is not kept for training: %s", error)
        return None
    return folder


def timed_schedules(
    scope: str,
    graph: OpGraph,
    model: str,
    predictor: str,
    groups: Mapping[str, Sequence[Candidate]],
    times: Times,
    peaks: Mapping[str, int | None],
) -> list[ScheduleRow]:
    """The schedules of a final comparison as rows; ``groups`` are by canonical key, ``peaks`` are bytes by strategy."""
    rows = []
    for key, group in groups.items():
        first = group[0]
        samples = times.samples(first.name)
        if samples is None:
            continue
        record = ScheduleRecord(key, samples, peaks.get(first.name) or 0, Contamination())
        rows.append(
            schedule_row(scope, model, graph, first.name, first.is_baseline, first.schedule, (first.predicted_us, predictor), record)
        )
    return rows


def _judged(name: str, card: Card, key: DeviceKey, folder: Path, where: str) -> Judged:
    if key.kind not in card.kinds:
        return Judged(None, "analytic", f"the model in {where} was trained on {', '.join(card.kinds)}, not on {key.kind}")
    if card.simulated:
        return Judged(None, "analytic", f"the model in {where} was trained on simulated runs")
    if name == "analytic":
        return Judged(None, "analytic", f"the gate of {where} refused every learned model: {card.decision.reason}")
    # A card has names alone, and virtual machines give processors of several generations one name.
    here = "this device" if folder.name == device_digest(key) else "a device of this name" if key.name in card.devices else "another device"
    return Judged(folder, name, f"trained on {card.pairs} pairs of {here}: {', '.join(card.devices)}")


def _shipped(key: DeviceKey) -> list[Path]:
    """Folders of models that come with autosched and were trained on a device of this name."""
    found = []
    for folder in sorted(Path(str(resources.files("autosched.datasets") / "data")).glob("*/model")):
        try:
            card = decode_json((folder / "card.json").read_bytes(), Card)
        except (OSError, msgspec.MsgspecError):
            continue
        if key.name in card.devices:
            found.append(folder)
    return found
