"""The ``.autosched`` file: what is in it, and how to read one that may come from a stranger.

A bundle is a zip of ``manifest.json`` (format, schema number, keys, sha256 of every other file), ``literals.safetensors`` (tensors
written in the model's code; never its weights), and, for each shape of inputs it was tuned for, a folder ``shapes/N`` with
``program.json``, ``schedule.json`` and ``evidence.json``. Schema 1 had one shape and no folders; it is migrated on reading. Schemas after
2 are written only where there is a variant, a mode of Inductor, or a model that changes memory or decides by its own tensors, which earlier
readers do not know, so that they refuse it by its number.
Reading goes from the cheapest distrust to the dearest: sizes from the zip directory, manifest, hash of every file before any
parser sees it, strict decoding, checks of the programs, and last the legality oracle.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import autosched
from autosched.core.decoding import decode_json
from autosched.core.errors import IllegalSchedule, IncompatibleArtifact, InvalidGraph, UsageError
from autosched.core.program import ConstantSource, Program
from autosched.core.program_json import decode_program
from autosched.core.schedule import Schedule, require_legal
from autosched.core.variants import Variant
from autosched.runtime.bundle.json_nesting import nests_within
from autosched.runtime.bundle.program_check import check_program
from autosched.runtime.bundle.values import (
    EVIDENCE,
    FORMAT,
    LITERALS,
    MANIFEST,
    MAX_SHAPES,
    PER_SHAPE,
    PROGRAM,
    SCHEDULE,
    SCHEMA,
    Bundle,
    BundleKey,
    CreatedBy,
    Evidence,
    FileEntry,
    HostKey,
    Manifest,
    ManifestOne,
    OperatorTimes,
    ShapeKey,
    migrate,
    model_fingerprint,
    schema_for,
    shape_file,
)
from autosched.runtime.bundle.zip import Limits, corrupt, printable, read_file, unzip
from autosched.runtime.shapes import call_key, describe_shape

if TYPE_CHECKING:
    import torch

__all__ = [
    "EVIDENCE", "FORMAT", "LITERALS", "MANIFEST", "MAX_SHAPES", "PER_SHAPE", "PROGRAM", "SCHEDULE", "SCHEMA",
    "Bundle", "BundleKey", "CreatedBy", "Evidence", "FileEntry", "HostKey", "Manifest", "ManifestOne", "OperatorTimes", "ShapeKey",
    "label_of", "migrate", "model_fingerprint", "printable", "read_bundle", "read_bundles", "schema_for", "shape_file",
]  # fmt: skip

_MIB = 2**20
MAX_FILE_BYTES: Mapping[str, int] = {
    MANIFEST: 1 * _MIB,
    PROGRAM: 64 * _MIB,
    SCHEDULE: 16 * _MIB,
    EVIDENCE: 64 * _MIB,
    LITERALS: 1024 * _MIB,
}
_SHARED = (MANIFEST, LITERALS)
_MAX_TEXT_BYTES = 256 * _MIB
_MAX_JSON_DEPTH = 48
_MAX_LANES = 128  # planning takes memory in proportion to operators times lanes
_VERSION = re.compile(r"[0-9A-Za-z.+!-]{1,40}")
_SHAPE_FILE = re.compile(r"shapes/(0|[1-9][0-9]?)/([a-z]+\.json)")

T = TypeVar("T")


def read_bundle(source: str | os.PathLike[str] | bytes) -> Bundle:
    """Read a bundle of one shape; as :func:`read_bundles`.

    Raises:
        UsageError: also if it holds several shapes.
    """
    found = read_bundles(source)
    if len(found) > 1:
        shapes = "; ".join(describe_shape(bundle.program) for bundle in found)
        raise UsageError(f"{label_of(source)} holds {len(found)} shapes: {shapes}. Name one with --shape, or call read_bundles().")
    return found[0]


def read_bundles(source: str | os.PathLike[str] | bytes) -> tuple[Bundle, ...]:
    """Read a bundle, one value for each shape in it, and check all that can be checked without the model.

    Args:
        source: a path, or the bytes of a bundle.

    Raises:
        UsageError: if there is no readable file at the path.
        ArtifactCorrupt: if it is not what its writer wrote.
        IncompatibleArtifact: if a newer autosched wrote it; the message says which version reads it.
    """
    label = label_of(source)
    data = source if isinstance(source, bytes) else read_file(Path(source))
    files = unzip(data, _LIMITS, label)
    manifest, files = _read_manifest(files.pop(MANIFEST), files, label)
    programs = [_read_program(files[shape_file(shape, PROGRAM)], manifest, shape, label) for shape in range(len(manifest.shapes))]
    if len({call_key(program) for program in programs}) < len(programs):
        raise corrupt(label, "two of its shapes answer the same call")
    literals = _read_literals(files[LITERALS], programs, label)
    bundles: list[Bundle] = []
    for shape, (program, own) in enumerate(zip(programs, literals, strict=True)):
        place = shape_file(shape, SCHEDULE)
        schedule = _decode(files[place], Schedule, place, label)
        if schedule.lane_slots > _MAX_LANES:
            raise corrupt(label, f"{place}: {schedule.lane_slots} lanes; expected at most {_MAX_LANES}")
        if unknown := set(schedule.variant) - set(Variant):
            raise corrupt(label, f"{place}: variant {min(unknown)}; expected {min(Variant):d} to {max(Variant):d}")
        try:
            require_legal(program.graph, schedule)
        except IllegalSchedule as error:
            raise corrupt(label, f"{place}: {error}") from error
        evidence = _read_evidence(files[shape_file(shape, EVIDENCE)], shape, len(program.graph), label)
        bundles.append(Bundle(program, schedule, evidence, manifest.key(shape), manifest.created_by, own))
    return tuple(bundles)


def label_of(source: str | os.PathLike[str] | bytes) -> str:
    """What to call a bundle in messages.

    Raises:
        UsageError: if it is neither a path nor bytes.
    """
    if isinstance(source, bytes):
        return "the schedule file"
    try:
        return os.fspath(source)
    except TypeError as error:
        raise UsageError(f"a schedule cannot be read from a {type(source).__name__}; expected a path or bytes") from error


def _max_bytes(name: str) -> int | None:
    if name in MAX_FILE_BYTES:
        return MAX_FILE_BYTES[name]
    found = _SHAPE_FILE.fullmatch(name)
    if found is None or int(found[1]) >= MAX_SHAPES or found[2] not in PER_SHAPE:
        return None
    return MAX_FILE_BYTES[found[2]]


def _complete(names: Sequence[str]) -> str:
    held = set(names)
    if not held & set(PER_SHAPE):
        shapes = max(1, sum(name.endswith("/" + PROGRAM) for name in names))
        wanted = {*_SHARED, *(shape_file(shape, name) for shape in range(shapes) for name in PER_SHAPE)}
    else:
        wanted = {*_SHARED, *PER_SHAPE}
    if missing := sorted(wanted - held):
        return f"it lacks {missing[:5]}"
    if extra := sorted(held - wanted):
        return f"it holds {extra[:5]} beside the parts of a schedule file"
    return ""


_LIMITS = Limits(len(_SHARED) + len(PER_SHAPE) * MAX_SHAPES, _max_bytes, _complete, _MAX_TEXT_BYTES)


class _Header(msgspec.Struct, frozen=True):
    format: str
    schema: int
    created_by: dict[str, Any] = {}


def _read_manifest(data: bytes, files: dict[str, bytes], label: str) -> tuple[Manifest, dict[str, bytes]]:
    header = _decode(data, _Header, MANIFEST, label)
    if header.format != FORMAT:
        raise corrupt(label, f"its format is {header.format[:40]!r}; expected {FORMAT!r}")
    if header.schema > SCHEMA:
        writer = header.created_by.get("autosched")
        known = isinstance(writer, str) and _VERSION.fullmatch(writer)
        by, able = (f"autosched {writer}", f"autosched {writer} or newer") if known else ("a newer autosched", "that one")
        raise IncompatibleArtifact(
            label,
            [
                f"schema: {header.schema} there, at most {SCHEMA} here: it was written by {by}, this is autosched {autosched.__version__}; "
                f"install {able}"
            ],
            what_to_do="",
        )
    if header.schema < 1:
        raise corrupt(label, f"its schema is {header.schema}; expected 1 to {SCHEMA}")
    if header.schema == 1:
        first = _decode(data, ManifestOne, MANIFEST, label)
        _check_hashes(first.files, files, label)
        return migrate(first, files)
    manifest = _decode(data, Manifest, MANIFEST, label)
    _check_hashes(manifest.files, files, label)
    if len(files) != 1 + len(PER_SHAPE) * len(manifest.shapes) or shape_file(0, PROGRAM) not in files:
        raise corrupt(label, f"the manifest lists {len(manifest.shapes)} shapes; the files are not those of as many")
    return manifest, files


def _check_hashes(entries: Mapping[str, FileEntry], files: Mapping[str, bytes], label: str) -> None:
    if entries.keys() != files.keys():
        raise corrupt(label, f"the manifest lists {sorted(entries)[:8]}; the file holds {sorted(files)[:8]}")
    for name, data in files.items():
        entry = entries[name]
        if entry.bytes != len(data):
            raise corrupt(label, f"{name} has {len(data)} bytes; the manifest says {entry.bytes}")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise corrupt(label, f"{name} has another sha256 than the manifest says")


def _parse(data: bytes, decode: Callable[[bytes], T], name: str, label: str) -> T:
    if not nests_within(data, _MAX_JSON_DEPTH):
        raise corrupt(label, f"{name} is nested deeper than {_MAX_JSON_DEPTH} levels, or its brackets do not match")
    try:
        return decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise corrupt(label, f"{name}: {error}") from error


def _decode(data: bytes, kind: type[T], name: str, label: str) -> T:
    return _parse(data, lambda text: decode_json(text, kind), name, label)


def _read_program(data: bytes, manifest: Manifest, shape: int, label: str) -> Program:
    place, key = shape_file(shape, PROGRAM), manifest.shapes[shape]
    program = _parse(data, decode_program, place, label)
    try:
        check_program(program)
        if program.graph.hash != key.graph:
            raise InvalidGraph(f"its hash is {program.graph.hash[:12]}, but the manifest says {key.graph[:12]!r}")
        if model_fingerprint(program) != key.model:
            raise InvalidGraph("its parameters are not those of the manifest")
    except InvalidGraph as error:
        raise corrupt(label, f"{place}: {error}") from error
    except (KeyError, IndexError, OverflowError, RecursionError, ValueError, TypeError) as error:
        # A forged program may break an assumption that no check names; it is still the file that is wrong.
        raise corrupt(label, f"{place}: inconsistent ({type(error).__name__}: {error})") from error
    return program


def _read_evidence(data: bytes, shape: int, operators: int, label: str) -> Evidence:
    place = shape_file(shape, EVIDENCE)
    evidence = _decode(data, Evidence, place, label)
    for name, times in (("planned", evidence.planned), ("measured", evidence.measured)):
        if len(times.start_us) != len(times.end_us) or len(times.start_us) not in (0, operators):
            raise corrupt(label, f"{place}: {name} times of {len(times.start_us)} operators; expected none or {operators}")
    if any(row.measured_us is not None and row.measured_us <= 0.0 for row in evidence.report.strategies):
        raise corrupt(label, f"{place}: a strategy's measured time is not positive")
    if len(evidence.solo_us) not in (0, operators):
        raise corrupt(label, f"{place}: {len(evidence.solo_us)} times of operators alone; expected none or {operators}")
    return evidence


def _read_literals(data: bytes, programs: Sequence[Program], label: str) -> list[dict[str, torch.Tensor]]:
    """For each shape its literals. One called ``N/name`` is shape ``N``'s own ``name``, every other one belongs to all shapes."""
    import safetensors
    import safetensors.torch

    try:
        found: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise corrupt(label, f"{LITERALS}: {error}") from error
    used: set[str] = set()
    shared: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    laid_out: list[dict[str, torch.Tensor]] = []
    for shape, program in enumerate(programs):
        own: dict[str, torch.Tensor] = {}
        for binding in program.bindings:
            if binding.source is not ConstantSource.LITERAL:
                continue
            name = f"{shape}/{binding.name}" if f"{shape}/{binding.name}" in found else binding.name
            used.add(name)
            layout = program.graph.values[binding.value].spec.strides
            if (name, layout) not in shared:
                shared[name, layout] = _lay_out(found.get(name), program, binding.value, binding.name, label)
            own[binding.name] = shared[name, layout]
            _check_literal(own[binding.name], program, binding.value, binding.name, label)
        laid_out.append(own)
    if extra := found.keys() - used:
        raise corrupt(label, f"{LITERALS} holds tensors that no program reads: {sorted(extra)[:3]!r}")
    return laid_out


def _check_literal(tensor: torch.Tensor | None, program: Program, value: int, name: str, label: str) -> torch.Tensor:
    spec = program.graph.values[value].spec
    if tensor is None or tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
        raise corrupt(label, f"{LITERALS}: {name} is absent, or not {list(spec.shape)} {spec.dtype}")
    return tensor


def _lay_out(found: torch.Tensor | None, program: Program, value: int, name: str, label: str) -> torch.Tensor:
    import torch

    from autosched.runtime.bundle.tensor_bytes import from_stored

    spec = program.graph.values[value].spec
    if found is not None:
        found = from_stored(found, spec.dtype, spec.shape)
    tensor = _check_literal(found, program, value, name, label)
    if not spec.strides or tensor.stride() == spec.strides:
        return tensor
    needed = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True) if size > 0)
    if needed > 4 * max(spec.elements, 1):
        raise corrupt(label, f"{LITERALS}: {name} has strides {spec.strides}, which waste memory")
    # Overlapping strides cannot be written to element by element; such a literal stays dense.
    if needed < spec.elements:
        return tensor
    return torch.empty_strided(spec.shape, spec.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
