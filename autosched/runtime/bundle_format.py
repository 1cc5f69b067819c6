"""The ``.autosched`` file: what is in it, and how to read one that may come from a stranger.

A bundle is a zip of ``manifest.json`` (format, schema number, key, sha256 of every other file), ``program.json``,
``schedule.json``, ``evidence.json`` and ``literals.safetensors`` (tensors written in the model's code; never its weights).
Reading goes from the cheapest distrust to the dearest: sizes from the zip directory, manifest, hash of every file before any
parser sees it, strict decoding, checks of the program, and last the legality oracle.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import autosched
from autosched.core.errors import ArtifactCorrupt, IllegalSchedule, IncompatibleArtifact, InvalidGraph, UsageError
from autosched.core.graph import OpGraph
from autosched.core.program import Argument, Binding, Call, ConstantSource, InputSpec, Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.report import TuneReport
from autosched.core.schedule import Schedule, require_legal
from autosched.runtime.program_check import check_program

if TYPE_CHECKING:
    import torch

FORMAT = "autosched.bundle"
SCHEMA = 1
MANIFEST = "manifest.json"
PROGRAM = "program.json"
SCHEDULE = "schedule.json"
EVIDENCE = "evidence.json"
LITERALS = "literals.safetensors"

_MIB = 2**20
MAX_BUNDLE_BYTES = 1024 * _MIB
MAX_FILE_BYTES: Mapping[str, int] = {
    MANIFEST: 1 * _MIB,
    PROGRAM: 64 * _MIB,
    SCHEDULE: 16 * _MIB,
    EVIDENCE: 64 * _MIB,
    LITERALS: 1024 * _MIB,
}
_MAX_DIRECTORY_BYTES = 64 * 1024
_MAX_JSON_DEPTH = 48
_MAX_MESSAGE = 500
_MAX_LANES = 128  # planning takes memory in proportion to operators times lanes
# Everything zipfile and zlib are documented, or were seen, to raise on damaged bytes.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, KeyError, struct.error, OverflowError)
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,40}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKETS = bytes(range(256)).translate(None, b"[]{}")
_OPEN_SQUARE = bytes.maketrans(b"{}", b"[]")

T = TypeVar("T")


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest says of one file: its hash (hex) and its size."""

    sha256: str
    bytes: int


class CreatedBy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Versions of the writer; for people and for messages."""

    autosched: str
    torch: str
    python: str


class BundleKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the schedule was made for.

    Args:
        graph: ``OpGraph.hash``.
        device: where it was measured.
        software: versions it was measured with.
        numerics: process-wide settings, as ``host_key.numerics_key`` gives them.
        model: digest of the names, shapes and dtypes of the parameters the program reads (:func:`model_fingerprint`).
    """

    graph: str
    device: DeviceKey
    software: SoftwareKey
    numerics: tuple[tuple[str, str], ...]
    model: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``manifest.json``."""

    format: str
    schema: int
    created_by: CreatedBy
    key: BundleKey
    files: dict[str, FileEntry]


class _Header(msgspec.Struct, frozen=True):
    format: str
    schema: int
    created_by: dict[str, Any] = {}


class _ProgramFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    graph: OpGraph
    prologue: tuple[Call, ...]
    bindings: tuple[Binding, ...]
    inputs: tuple[InputSpec, ...]
    input_tree: str
    output_tree: str
    input_leaves: tuple[Argument, ...]
    output_leaves: tuple[Argument, ...]
    lowering: str


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Start and end of each operator, microseconds from the start of the run, by operator index. Empty if unknown."""

    start_us: tuple[float, ...] = ()
    end_us: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why this schedule was chosen.

    Args:
        report: the comparison it won, every strategy with its figures.
        environment: what the machine was doing, as ``(name, value)`` pairs; shown, never compared.
        seeds: ``(what, seed)`` of every random choice.
        planned: operator times as the simulator predicted them.
        measured: operator times as the device ran them.
        solo_us: each operator's time alone at the width it has in the schedule, microseconds; empty if unknown.
        rewrites: ``(pass, how often it applied)``, in order.
    """

    report: TuneReport
    environment: tuple[tuple[str, str], ...] = ()
    seeds: tuple[tuple[str, int], ...] = ()
    planned: OperatorTimes = OperatorTimes()
    measured: OperatorTimes = OperatorTimes()
    solo_us: tuple[float, ...] = ()
    rewrites: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """A tuned schedule with everything needed to run it on the model it was made for.

    ``literals`` are CPU tensors by name, laid out as the program's value table says.
    """

    program: Program
    schedule: Schedule
    evidence: Evidence
    key: BundleKey
    created_by: CreatedBy
    literals: Mapping[str, torch.Tensor] = field(default_factory=dict)


def model_fingerprint(program: Program) -> str:
    """Digest of the names, shapes and dtypes of every parameter and buffer that ``program`` takes from its model."""
    rows = [
        [binding.source, binding.name, program.graph.values[binding.value].spec.shape, program.graph.values[binding.value].spec.dtype]
        for binding in program.bindings
        if binding.source is not ConstantSource.LITERAL
    ]
    return hashlib.sha256(msgspec.json.encode(sorted(rows))).hexdigest()


def program_to_json(program: Program) -> bytes:
    """Canonical bytes of ``program.json``."""
    fields = {name: getattr(program, name) for name in _ProgramFile.__struct_fields__}
    return msgspec.json.encode(_ProgramFile(**fields), order="sorted")


def read_bundle(source: str | os.PathLike[str] | bytes) -> Bundle:
    """Read a bundle and check all that can be checked without the model.

    Args:
        source: a path, or the bytes of a bundle.

    Raises:
        UsageError: if there is no readable file at the path.
        ArtifactCorrupt: if it is not what its writer wrote.
        IncompatibleArtifact: if a newer autosched wrote it; the message says which version reads it.
    """
    label = "the bundle" if isinstance(source, bytes) else os.fspath(source)
    data = source if isinstance(source, bytes) else _read_file(Path(source))
    files = _unzip(data, label)
    manifest = _read_manifest(files.pop(MANIFEST, None), label)
    _check_hashes(manifest, files, label)
    program = _decode_program(files[PROGRAM], label)
    schedule = _decode(files[SCHEDULE], Schedule, SCHEDULE, label)
    evidence = _decode(files[EVIDENCE], Evidence, EVIDENCE, label)
    try:
        check_program(program)
        if program.graph.hash != manifest.key.graph:
            raise InvalidGraph(f"its hash is {program.graph.hash[:12]}, but the manifest says {manifest.key.graph[:12]!r}")
        if model_fingerprint(program) != manifest.key.model:
            raise InvalidGraph("its parameters are not those of the manifest")
    except InvalidGraph as error:
        raise _corrupt(label, f"{PROGRAM}: {error}") from error
    except (KeyError, IndexError, OverflowError, RecursionError, ValueError, TypeError) as error:
        # A forged program may break an assumption that no check names; it is still the file that is wrong.
        raise _corrupt(label, f"{PROGRAM}: inconsistent ({type(error).__name__}: {error})") from error
    if schedule.lane_slots > _MAX_LANES:
        raise _corrupt(label, f"{SCHEDULE}: {schedule.lane_slots} lanes; expected at most {_MAX_LANES}")
    try:
        require_legal(program.graph, schedule)
    except IllegalSchedule as error:
        raise _corrupt(label, f"{SCHEDULE}: {error}") from error
    _check_evidence(evidence, len(program.graph), label)
    literals = _read_literals(files[LITERALS], program, label)
    return Bundle(program, schedule, evidence, manifest.key, manifest.created_by, literals)


def printable(text: str) -> str:
    """``text`` without control characters and of bounded length: bundles come from strangers, messages go to terminals."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _MAX_MESSAGE else clean[: _MAX_MESSAGE - 3] + "..."


def _corrupt(label: str, why: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(label, printable(why))


def _read_file(path: Path) -> bytes:
    try:
        # Asked before opening: to open a pipe is to wait for its writer.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"cannot read {path}: not a regular file. Name a file written by 'autosched tune'.")
        if status.st_size > MAX_BUNDLE_BYTES:
            raise ArtifactCorrupt(str(path), f"{status.st_size} bytes; a bundle has at most {MAX_BUNDLE_BYTES}")
        with path.open("rb") as file:
            return file.read(MAX_BUNDLE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}. Name a file written by 'autosched tune'.") from error


def _unzip(data: bytes, label: str) -> dict[str, bytes]:
    _check_directory(data, label)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_entries(entries, label)
            return {entry.filename: archive.read(entry) for entry in entries}
    except _ZIP_ERRORS as error:
        raise _corrupt(label, f"damaged zip ({error})") from error


def _check_directory(data: bytes, label: str) -> None:
    """Bound what ``zipfile`` will parse: our writer leaves no comment, so the end record is the last 22 bytes."""
    if not data:
        raise _corrupt(label, "the file is empty")
    if len(data) > MAX_BUNDLE_BYTES:
        raise _corrupt(label, f"{len(data)} bytes; a bundle has at most {MAX_BUNDLE_BYTES}")
    if data[:4] != b"PK\x03\x04" or len(data) < 22 or data[-22:-18] != b"PK\x05\x06" or data[-42:-38] == b"PK\x06\x07":
        raise _corrupt(label, "not a complete bundle (truncated, or another kind of file)")
    here, total, size, offset, comment = struct.unpack("<4x4xHHIIH", data[-22:])
    if comment or here != total or total > len(MAX_FILE_BYTES) or size > _MAX_DIRECTORY_BYTES or offset + size + 22 != len(data):
        raise _corrupt(label, f"a zip directory of {total} files in {size} bytes; expected at most {len(MAX_FILE_BYTES)} files")


def _check_entries(entries: list[zipfile.ZipInfo], label: str) -> None:
    seen: set[str] = set()
    for entry in entries:
        name = entry.filename
        if name not in MAX_FILE_BYTES:
            raise _corrupt(label, f"it holds {name[:80]!r}; expected only {sorted(MAX_FILE_BYTES)}")
        if name in seen:
            raise _corrupt(label, f"it holds {name} twice")
        seen.add(name)
        if entry.flag_bits & 0x1:
            raise _corrupt(label, f"{name} is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _corrupt(label, f"{name} is compressed by method {entry.compress_type}; expected stored or deflated")
        if entry.file_size > MAX_FILE_BYTES[name]:
            raise _corrupt(label, f"{name} has {entry.file_size} bytes; expected at most {MAX_FILE_BYTES[name]}")
    if sum(entry.file_size for entry in entries) > MAX_BUNDLE_BYTES:
        raise _corrupt(label, f"its files have more than {MAX_BUNDLE_BYTES} bytes together")
    if missing := MAX_FILE_BYTES.keys() - seen:
        raise _corrupt(label, f"it lacks {sorted(missing)}")


def _read_manifest(data: bytes | None, label: str) -> Manifest:
    header = _decode(data or b"", _Header, MANIFEST, label)
    if header.format != FORMAT:
        raise _corrupt(label, f"its format is {header.format[:40]!r}; expected {FORMAT!r}")
    if header.schema > SCHEMA:
        writer = header.created_by.get("autosched")
        version = writer if isinstance(writer, str) and _VERSION.fullmatch(writer) else "a newer version"
        raise IncompatibleArtifact(
            label,
            [
                f"schema: {header.schema} there, at most {SCHEMA} here: it was written by autosched {version}, this is "
                f"autosched {autosched.__version__}; install autosched {version} or newer"
            ],
        )
    if header.schema < 1:
        raise _corrupt(label, f"its schema is {header.schema}; expected 1 to {SCHEMA}")
    return _decode(data or b"", Manifest, MANIFEST, label)


def _check_hashes(manifest: Manifest, files: Mapping[str, bytes], label: str) -> None:
    if manifest.files.keys() != files.keys():
        raise _corrupt(label, f"the manifest lists {sorted(manifest.files)[:8]}; the file holds {sorted(files)}")
    for name, data in files.items():
        entry = manifest.files[name]
        if entry.bytes != len(data):
            raise _corrupt(label, f"{name} has {len(data)} bytes; the manifest says {entry.bytes}")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _corrupt(label, f"{name} has another sha256 than the manifest says")


def _decode(data: bytes, kind: type[T], name: str, label: str) -> T:
    # Strings out, brackets only; each round of the loop removes the innermost level.
    brackets = _STRING.sub(b"", data).translate(_OPEN_SQUARE, _BRACKETS)
    for _ in range(_MAX_JSON_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _corrupt(label, f"{name} is nested deeper than {_MAX_JSON_DEPTH} levels, or its brackets do not match")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise _corrupt(label, f"{name}: {error}") from error


def _decode_program(data: bytes, label: str) -> Program:
    raw = _decode(data, _ProgramFile, PROGRAM, label)
    return Program(**{name: getattr(raw, name) for name in _ProgramFile.__struct_fields__})


def _check_evidence(evidence: Evidence, operators: int, label: str) -> None:
    for name, times in (("planned", evidence.planned), ("measured", evidence.measured)):
        if len(times.start_us) != len(times.end_us) or len(times.start_us) not in (0, operators):
            raise _corrupt(label, f"{EVIDENCE}: {name} times of {len(times.start_us)} operators; expected none or {operators}")
        if any(not math.isfinite(time) for time in (*times.start_us, *times.end_us)):
            raise _corrupt(label, f"{EVIDENCE}: a {name} time is not finite")
    if len(evidence.solo_us) not in (0, operators) or any(not math.isfinite(time) for time in evidence.solo_us):
        raise _corrupt(label, f"{EVIDENCE}: {len(evidence.solo_us)} times alone; expected none or {operators}, all finite")


def _read_literals(data: bytes, program: Program, label: str) -> dict[str, torch.Tensor]:
    import safetensors
    import safetensors.torch
    import torch

    try:
        found: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise _corrupt(label, f"{LITERALS}: {error}") from error
    laid_out: dict[str, torch.Tensor] = {}
    for binding in program.bindings:
        if binding.source is not ConstantSource.LITERAL:
            continue
        spec = program.graph.values[binding.value].spec
        tensor = found.get(binding.name)
        if tensor is None or tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise _corrupt(label, f"{LITERALS}: {binding.name} is absent, or not {list(spec.shape)} {spec.dtype}")
        if spec.strides and tensor.stride() != spec.strides:
            needed = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True) if size > 0)
            if needed > 4 * max(spec.elements, 1):
                raise _corrupt(label, f"{LITERALS}: {binding.name} has strides {spec.strides}, which waste memory")
            # Overlapping strides cannot be written to element by element; such a literal stays dense.
            if needed >= spec.elements:
                tensor = torch.empty_strided(spec.shape, spec.strides, dtype=tensor.dtype).copy_(tensor)
        laid_out[binding.name] = tensor
    if extra := found.keys() - laid_out.keys():
        raise _corrupt(label, f"{LITERALS} holds tensors that the program does not read: {sorted(extra)[:3]!r}")
    return laid_out
