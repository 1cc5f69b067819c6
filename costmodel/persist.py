"""A trained model on disk: a folder whose manifest holds the hash of every file, checked before any parser runs.

UBJSON, safetensors and JSON only. The folder is written beside its place and changes places with the former one in one step, so that a
reader never sees half of it, and a writer that is killed leaves the one or the other.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autosched.core.atomic_write import replace_folder
from autosched.core.decoding import decode_json
from autosched.core.errors import ArtifactCorrupt, AutoschedError, IncompatibleArtifact, UsageError, newer_schema, why_of
from autosched.core.scratch import Scratch
from autosched.costmodel.conformal import Conformal
from autosched.costmodel.features import FEATURE_SET, PAIR_FEATURES, readable
from autosched.costmodel.model import COST_MODELS
from autosched.costmodel.trained import Card, TrainedModel

T = TypeVar("T")

FORMAT = "autosched.costmodel"
SCHEMA = 1
LARGEST_BYTES = 1 << 30
"""A file beyond this is not one of ours; it is not read."""
_AGAIN = "train again on the stored runs with 'autosched train'"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    bytes: int


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    schema: int
    model: str
    feature_set: int
    features: tuple[str, ...]
    files: dict[str, _File]


class _Version(msgspec.Struct, frozen=True):
    format: str
    schema: int


def save_model(model: TrainedModel, folder: Path) -> None:
    """Write ``folder`` anew: the model's files, ``intervals.json``, ``card.json``, ``card.md`` and the manifest.

    Raises:
        UsageError: a model that was not fitted, or a folder that holds something else, or cannot be written.
    """
    place = check_replaceable(folder)
    try:
        _save(model, place)
    except OSError as error:
        raise UsageError(
            f"cannot write a cost model to {folder}: {why_of(error)}. Let this user write there and make room, or name another folder."
        ) from error


def _save(model: TrainedModel, place: Path) -> None:
    with Scratch(place.parent) as scratch:
        fresh = scratch / "model"
        (fresh / "model").mkdir(parents=True)
        model.inner.save(fresh / "model")
        (fresh / "intervals.json").write_bytes(msgspec.json.encode(model.intervals))
        (fresh / "card.json").write_bytes(msgspec.json.encode(model.card))
        (fresh / "card.md").write_text(model.card.markdown(), encoding="utf-8")
        files = {}
        for path in sorted(path for path in fresh.rglob("*") if path.is_file()):
            content = path.read_bytes()
            files[path.relative_to(fresh).as_posix()] = _File(hashlib.sha256(content).hexdigest(), len(content))
        manifest = _Manifest(FORMAT, SCHEMA, model.inner.name, FEATURE_SET, PAIR_FEATURES, files)
        (fresh / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in (*fresh.rglob("*"), fresh):
            _sync(path)
        replace_folder(fresh, place)


def check_replaceable(folder: Path) -> Path:
    """Find out, before an hour of training too, that ``folder`` holds other files, for saving replaces it as a whole, or cannot be made.

    Returns:
        The folder itself; a link to it stays a link.

    Raises:
        UsageError: if it is neither absent, nor empty, nor a cost model; or if it, or a folder beside it, cannot be written.
    """
    try:
        place = Path(os.path.realpath(folder))
        place.parent.mkdir(parents=True, exist_ok=True)
        Scratch(place.parent).close()
        if not place.exists():
            return place
        if place.is_dir() and not os.access(place, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if place.is_dir() and not any(place.iterdir()):
            return place
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        raise UsageError(
            f"cannot write a cost model to {folder}: {why_of(error)}. Name a folder in one that is writable, or can be made."
        ) from error
    try:
        _read_manifest(place)
    except IncompatibleArtifact:
        pass  # A cost model all the same, of another version.
    except (ArtifactCorrupt, OSError):
        raise UsageError(
            f"cannot write a cost model to {folder}: it holds something else, or a damaged one, and writing replaces the whole folder. "
            "Name a new folder, or remove this one."
        ) from None
    return place


def load_model(folder: Path) -> TrainedModel:
    """Read what :func:`save_model` wrote.

    Raises:
        UsageError: there is no such folder, or it cannot be read.
        ArtifactCorrupt: a missing, added or altered file, or content that is not ours.
        IncompatibleArtifact: a newer schema, or features of another version.
        UnknownName: a kind of model that is not registered here.
    """

    def read() -> TrainedModel:
        name, card = _read_card(folder)
        intervals: Conformal | None = _decode(folder / "intervals.json", Conformal | None)
        return TrainedModel(COST_MODELS.get(name).load(folder / "model"), intervals, card)

    return _all_of_one(folder, read)


def read_card(folder: Path) -> tuple[str, Card]:
    """Name and card of a model, with every check of :func:`load_model` but reading the model itself, which loads its library.

    Raises:
        UsageError, ArtifactCorrupt, IncompatibleArtifact: as :func:`load_model`.
    """
    return _all_of_one(folder, lambda: _read_card(folder))


def _all_of_one(folder: Path, read: Callable[[], T]) -> T:
    """What ``read`` finds in ``folder``, begun again where another process put a new model there meanwhile."""
    while True:
        before = _identity(folder)
        try:
            found = read()
        except (AutoschedError, OSError) as error:
            if _identity(folder) != before:
                continue
            if isinstance(error, OSError):
                raise UsageError(
                    f"cannot read the cost model in {folder}: {why_of(error)}. Let this user read it, or name another folder."
                ) from error
            raise
        if _identity(folder) == before:
            return found


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _read_card(folder: Path) -> tuple[str, Card]:
    manifest = _read_manifest(folder)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    for name, expected in manifest.files.items():
        path = folder / name
        if name not in present:
            raise ArtifactCorrupt(str(path), "the file is missing")
        size = path.stat().st_size
        if size != expected.bytes or size > LARGEST_BYTES:
            raise ArtifactCorrupt(str(path), f"it has {size} bytes instead of {expected.bytes}")
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected.sha256:
            raise ArtifactCorrupt(str(path), "its content is not what the manifest promises")
    card: Card = _decode(folder / "card.json", Card)
    differences = []
    if not readable(manifest.feature_set, card.kinds):
        differences.append(f"feature set: {manifest.feature_set} there, {FEATURE_SET} here")
    elif manifest.features != PAIR_FEATURES:
        differences.append(f"features: {', '.join(sorted(set(manifest.features) ^ set(PAIR_FEATURES))) or 'another order'} differ")
    if differences:
        raise IncompatibleArtifact(str(folder), differences, f"{_AGAIN.capitalize()}.")
    return manifest.model, card


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / "manifest.json"
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}; expected a cost model. 'autosched train' makes one.")
    if not path.is_file():
        raise ArtifactCorrupt(str(folder), "it is not a folder with a manifest.json (make one with 'autosched train')")
    content = path.read_bytes()
    version: _Version = _decode(path, _Version)
    if version.format != FORMAT:
        raise ArtifactCorrupt(str(path), f"its format is {version.format!r}; expected {FORMAT!r}")
    if version.schema > SCHEMA:
        raise newer_schema(str(path), version.schema, SCHEMA, _AGAIN)
    try:
        manifest = decode_json(content, _Manifest)
    except msgspec.DecodeError as error:
        raise ArtifactCorrupt(str(path), str(error)) from error
    needed = {"intervals.json", "card.json"}
    if not needed <= set(manifest.files) or any(".." in name or name.startswith("/") for name in manifest.files):
        raise ArtifactCorrupt(str(path), "its list of files is not one that is ever written")
    return manifest


def _decode(path: Path, kind: Any) -> Any:
    try:
        return decode_json(path.read_bytes(), kind)
    except msgspec.DecodeError as error:
        raise ArtifactCorrupt(str(path), str(error)) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
