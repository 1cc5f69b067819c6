"""Which cost model a job predicts with: one that is named, the one trained on this machine, one that ships, or the analytic prior."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from autosched.config import cost_models_dir
from autosched.core.costs import CostTable
from autosched.core.decoding import decode_json
from autosched.core.errors import AutoschedError
from autosched.core.graph import OpGraph
from autosched.core.records import DeviceKey, Engine, PairRecord
from autosched.costmodel.meeting import pairs_that_meet
from autosched.costmodel.persist import load_model, read_card
from autosched.costmodel.table import OTHER
from autosched.costmodel.trained import Card, TrainedModel
from autosched.device.base import Device
from autosched.pipeline.replaying import recording_of
from autosched.runtime.native.build import engine_to_come

_log = logging.getLogger(__name__)

_SIZES = {"cpu": ("cores", "cores"), "cuda": ("sm_count", "multiprocessors")}
"""What two operators share, by kind of device, and what people call it: how much there is decides whether one waits for the other."""
NONE_YET = "no model was trained for this device: 'autosched collect -o runs', then 'autosched train runs'"


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """What predicts the pairs that are not measured: ``model``, or the analytic prior for ``None``; ``why`` says so to people."""

    model: TrainedModel | None
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Judged:
    """What a model's card says.

    Args:
        folder: where the model lies that is taken; ``None`` for the analytic prior.
        name: its kind.
        why: says so to people.
        settled: whether runs of this very device, enough to judge by, have shown that the prior is as good as anything learned from them.
        refused: how many pairs of which device a model was learned from that did not pass the gate; ``None`` for any other.
    """

    folder: Path | None
    name: str
    why: str
    settled: bool = False
    own: bool = False
    """Whether it was trained on this very device."""
    refused: tuple[int, str] | None = None


def engine_of(device: Device) -> Engine | None:
    """What runs the lanes of a CPU, recorded ones included, once a job has built what is missing; ``None`` for anything else."""
    if device.key.kind != "cpu":
        return None
    return engine_to_come() if recording_of(device) is None else device.software.engine


def choose_model(key: DeviceKey, engine: Engine | None, explicit: Path | None = None) -> ChosenModel:
    """The cost model for a device: ``explicit``, else the one trained on this machine, else one that ships, else the analytic prior.

    A model counts only if its gate accepted it on held-out runs and it was trained on this kind of device.

    Args:
        key: of the device.
        engine: as :func:`engine_of`; models of runs on lanes of another kind do not count.
        explicit: the folder of one that is to be taken if it counts.

    Raises:
        ArtifactCorrupt, IncompatibleArtifact: for ``explicit`` only; another one that cannot be read is passed over with a warning.
    """
    if explicit is not None:
        model = load_model(explicit)
        judged = _judged(model.name, model.card, key, engine, explicit, str(explicit))
    else:
        judged = model_in_use(key, engine)
        model = None
    if judged.folder is None:
        return ChosenModel(None, judged.name, judged.why)
    try:
        return ChosenModel(model or load_model(judged.folder), judged.name, judged.why)
    except AutoschedError as error:
        _log.warning("the cost model in %s is not used: %s", judged.folder, error)
        return ChosenModel(None, "analytic", f"the one in {judged.folder} cannot be read")


def model_in_use(key: DeviceKey, engine: Engine | None) -> Judged:
    """Which model :func:`choose_model` takes where none is named, from the cards alone: no model is read, and no library loaded."""
    refused: list[Judged] = []
    settled = False
    for folder in (cost_models_dir() / key.digest, *_shipped(key, engine)):
        # Not the manifest in it: one that this user may not look into is said, too.
        if not os.path.lexists(folder):
            continue
        try:
            judged = judged_at(folder, key, engine)
        except AutoschedError as error:
            _log.warning("the cost model in %s is not used: %s", folder, error)
            refused.append(Judged(None, "analytic", f"the one in {folder} cannot be read"))
            continue
        if judged.folder is not None and not judged.own and (why := _other_size(folder, key)):
            judged = Judged(None, "analytic", why)
        if judged.folder is not None and (judged.own or not settled):
            return judged
        # What was found out on this very device is not for others of its name to overrule.
        refused += [judged] if judged.folder is None else []
        settled = settled or judged.settled
    return Judged(None, "analytic", _why_none(refused) or NONE_YET, settled)


def _why_none(refused: Sequence[Judged]) -> str:
    """Why no model is taken: a reason of its own for each, but those that failed the gate alike are told together."""
    pairs: dict[str, list[int]] = {}
    for judged in refused:
        if judged.refused is not None:
            pairs.setdefault(judged.refused[1], []).append(judged.refused[0])
    said = [_failed(pairs[judged.refused[1]], judged.refused[1]) if judged.refused is not None else judged.why for judged in refused]
    return "; ".join(dict.fromkeys(said))


def _failed(pairs: Sequence[int], of: str) -> str:
    return f"no model learned from {' or '.join(map(str, pairs))} pairs of {of} has passed the gate"


def judged_at(folder: Path, key: DeviceKey, engine: Engine | None) -> Judged:
    """Whether a device takes the model in ``folder``, from its card alone.

    Raises:
        ArtifactCorrupt, IncompatibleArtifact: if it cannot be read.
    """
    return _judged(*read_card(folder), key, engine, folder, str(folder))


def prediction_note(chosen: ChosenModel, graph: OpGraph, table: CostTable, pairs: Sequence[PairRecord]) -> str:
    """How many of the pairs that can meet were measured, and who predicted the others."""
    beside = len(table.slowdown_first)
    meet = pairs_that_meet(graph, table.kernel, beside, one_team=table.one_team, other=table.other_kernel)
    place = {
        (operator.signature, width): int(table.kernel[operator.index, column])
        for operator in graph.operators
        for column, width in enumerate(table.widths)
    }
    if table.other_kernel is not None:
        own, other = table.kernel[:, 0].tolist(), table.other_kernel.tolist()
        place |= {(item.signature + OTHER, 1): other[item.index] for item in graph.operators if other[item.index] != own[item.index]}
    known = np.zeros_like(meet)
    for pair in pairs:
        first, last = place.get((pair.first, pair.first_width)), place.get((pair.last, pair.last_width))
        if first is not None and last is not None and max(first, last) < beside:
            known[first, last] = True
    total = int(meet.sum())
    if not total:
        return "no two operators of this graph can run at the same time"
    share = int((meet & ~known).sum()) / total
    said = f"cost model {chosen.name} predicts {share:.0%} of the {total} pairs of kernels that can meet, the rest is measured"
    return f"{said} ({chosen.why})"


def _judged(name: str, card: Card, key: DeviceKey, engine: Engine | None, folder: Path, where: str) -> Judged:
    if key.kind not in card.kinds:
        return Judged(None, "analytic", f"the model in {where} was trained on {', '.join(card.kinds)}, not on {key.kind}")
    if card.simulated:
        return Judged(None, "analytic", f"the model in {where} was trained on simulated runs")
    if _of_other_lanes(card, engine):
        return Judged(None, "analytic", f"the model in {where} was trained on {card.engine} lanes, and here they are {engine}")
    own, alone = _is_of(folder, card, key), len(card.origins) < 2
    elsewhere = "a device of this name" if key.name in card.devices else "another device"
    here = "this device" if own and alone else "this device and others" if own else elsewhere
    if name == "analytic":
        settled = own and alone and bool(card.held_out)
        return Judged(None, "analytic", _failed((card.pairs,), here), settled, own, refused=(card.pairs, here))
    return Judged(folder, name, f"trained on {card.pairs} pairs of {here}: {', '.join(card.devices)}", own=own)


def _of_other_lanes(card: Card, engine: Engine | None) -> bool:
    """Whether the runs of a model were on lanes of another kind than ``engine``, as far as both are known."""
    return card.engine is not None and engine is not None and card.engine is not engine


class _About(msgspec.Struct, frozen=True):
    """What is said beside runs that ship; more than this is for people."""

    device: DeviceKey


def _is_of(folder: Path, card: Card, key: DeviceKey) -> bool:
    """Whether a model is of this very device: virtual machines give processors of several generations one name.

    The card says so; of one from before cards did, the place where it was installed, or what was shipped beside it.
    """
    if card.origins:
        return key.digest in card.origins
    return folder.name == key.digest or _shipped_for(folder) == key


def _shipped_for(folder: Path) -> DeviceKey | None:
    """The device of a model that ships, as is said beside its runs."""
    try:
        return decode_json((folder.parent / "about.json").read_bytes(), _About).device
    except (OSError, msgspec.MsgspecError):
        return None


def _other_size(folder: Path, key: DeviceKey) -> str:
    """Why a model that ships for a device of this name is not for this one; empty if it is.

    It was judged on a device on which two operators had, say, two cores: how they share sixteen, it has never seen.
    """
    device, (size, said) = _shipped_for(folder), _SIZES.get(key.kind, ("", ""))
    there, here = dict(device.details).get(size) if device is not None else None, dict(key.details).get(size)
    if there is None or here is None or there == here:
        return ""
    return f"the model that ships for {key.name} was trained on {there} {said}, and here there are {here}"


def _shipped(key: DeviceKey, engine: Engine | None) -> list[Path]:
    """Folders of models that come with autosched and were trained on this device and such lanes; else on those of this name."""
    found = []
    for folder in sorted(Path(str(resources.files("autosched.datasets") / "data")).glob("*/model")):
        try:
            card = decode_json((folder / "card.json").read_bytes(), Card)
        except (OSError, msgspec.MsgspecError):
            continue
        if key.name in card.devices and not _of_other_lanes(card, engine):
            found.append((folder, card))
    # What was found out on this very device is not for others to overrule: most of all that no learned model is good enough on it.
    return [folder for folder, card in found if _is_of(folder, card, key)] or [folder for folder, _ in found]
