"""Writing a bundle: equal content gives equal bytes, and a reader sees the old file or the new one, never half of one."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import os
import platform
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import autosched
from autosched.core.atomic_write import write_atomically
from autosched.core.errors import UnsupportedGraph, UsageError, why_of
from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.schedule import Schedule
from autosched.runtime.bundle.format import (
    EVIDENCE,
    FORMAT,
    LITERALS,
    MANIFEST,
    MAX_SHAPES,
    PROGRAM,
    SCHEDULE,
    Bundle,
    BundleKey,
    CreatedBy,
    Evidence,
    FileEntry,
    HostKey,
    Manifest,
    ShapeKey,
    model_fingerprint,
    read_bundles,
    schema_for,
    shape_file,
)
from autosched.runtime.bundle.zip import MAX_BUNDLE_BYTES
from autosched.runtime.host_key import numerics_key

if TYPE_CHECKING:
    import torch

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip can hold
_UNIX = 3
_MIB = 2**20
_ROOM_BYTES = 64 * _MIB  # for programs, schedules and evidence
_ZIP_BYTES = 2 * _MIB  # for the manifest and the zip's own directory
_REGISTER = "Make large tensors of the model buffers (register_buffer), which are not in the file."


def make_bundle(
    program: Program,
    schedule: Schedule,
    evidence: Evidence,
    literals: Mapping[str, torch.Tensor],
    device: DeviceKey,
    software: SoftwareKey,
    *,
    numerics: tuple[tuple[str, str], ...] | None = None,
) -> Bundle:
    """Put a bundle together with its key.

    Args:
        literals: tensors of the program's ``literal`` bindings, by name.
        device, software: keys of the machine the schedule was measured on.
        numerics: settings it was measured under; by default this process's.
    """
    import torch

    key = BundleKey(
        graph=program.graph.hash,
        device=device,
        software=software,
        numerics=numerics if numerics is not None else numerics_key(device.kind),
        model=model_fingerprint(program),
    )
    created_by = CreatedBy(autosched.__version__, str(torch.__version__), platform.python_version())
    # The path of the file is no part of what is in it, and raw times are for whoever ran the job.
    evidence = dataclasses.replace(evidence, report=dataclasses.replace(evidence.report, bundle=None, rounds=()))
    return Bundle(program, schedule, evidence, key, created_by, dict(literals))


def encode_bundle(bundle: Bundle, *more: Bundle) -> bytes:
    """The bytes of a bundle; equal bundles give equal bytes.

    Args:
        bundle, more: one for each shape of inputs, measured on one host by one version; literals that are equal are written once.

    Raises:
        UsageError: if a figure is not finite (JSON cannot write it), the shapes are of different hosts or too many, or all is too large.
        ArtifactCorrupt: if what was written would not be read back; the bundle's parts do not fit together.
    """
    shapes = (bundle, *more)
    host = HostKey(bundle.key.device, bundle.key.software, bundle.key.numerics)
    if any(HostKey(item.key.device, item.key.software, item.key.numerics) != host for item in more):
        raise UsageError("the shapes of one file were tuned on different machines, versions or settings; tune them in one run")
    if len(shapes) > MAX_SHAPES:
        raise UsageError(f"{len(shapes)} shapes; a schedule file holds at most {MAX_SHAPES}. Write several files.")
    for item in shapes:
        require_literals_fit(item.literals.values())
    files = {LITERALS: _encode_literals([item.literals for item in shapes])}
    for index, item in enumerate(shapes):
        _require_finite(item)
        files[shape_file(index, EVIDENCE)] = msgspec.json.encode(item.evidence, order="sorted")
        files[shape_file(index, PROGRAM)] = encode_program(item.program)
        files[shape_file(index, SCHEDULE)] = item.schedule.to_json()
    entries = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    keys = tuple(ShapeKey(item.key.graph, item.key.model) for item in shapes)
    manifest = msgspec.json.encode(Manifest(FORMAT, schema_for(shapes), bundle.created_by, host, keys, entries), order="sorted")
    size = sum(map(len, files.values())) + _ZIP_BYTES
    if size > MAX_BUNDLE_BYTES:
        raise UsageError(f"the schedule file has {size} bytes; expected at most {MAX_BUNDLE_BYTES}. {_REGISTER}")
    data = zip_files({MANIFEST: manifest, **files})
    read_bundles(data)
    return data


def require_literals_fit(literals: Iterable[torch.Tensor]) -> None:
    """Refuse a model whose own tensors, which travel in a bundle, do not leave room in it for the rest: asked before anything is measured.

    Raises:
        UnsupportedGraph: saying how many bytes they have.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in literals)
    if size > MAX_BUNDLE_BYTES - _ROOM_BYTES:
        raise UnsupportedGraph(
            f"the model has {size} bytes in tensors that are neither parameters nor buffers, and those travel in the file; expected at "
            f"most {MAX_BUNDLE_BYTES - _ROOM_BYTES}. {_REGISTER}"
        )


def zip_files(files: Mapping[str, bytes]) -> bytes:
    """A zip of ``files``, stored, in the order given, with fixed times and modes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED, allowZip64=False) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = _UNIX
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def write_bundle(path: str | os.PathLike[str], bundle: Bundle, *more: Bundle) -> Path:
    """Write ``bundle``, and further shapes of it, to ``path``, replacing what is there in one step.

    Raises:
        UsageError: if the folder is missing or not writable, or the disk is full; what was at ``path`` is still there.
    """
    target = Path(path)
    data = encode_bundle(bundle, *more)
    try:
        write_atomically(target, data)
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        raise UsageError(
            f"cannot write {target}: {why_of(error)} ({len(data)} bytes). Choose a folder that exists, is writable and has room."
        ) from error
    return target


def _encode_literals(shapes: Sequence[Mapping[str, torch.Tensor]]) -> bytes:
    """One file for all shapes: ``name`` where every shape that has it has the same tensor, else ``N/name`` for shape ``N``."""
    import safetensors.torch
    import torch

    from autosched.runtime.bundle.tensor_bytes import to_stored

    # Two names may share memory, which the format refuses; each gets its own dense copy.
    dense = [
        {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in literals.items()}
        for literals in shapes
    ]
    found: dict[str, torch.Tensor] = {}
    for name in sorted({name for literals in dense for name in literals}):
        held = {index: literals[name] for index, literals in enumerate(dense) if name in literals}
        first = next(iter(held.values()))
        if all(_identical(first, tensor) for tensor in held.values()):
            found[name] = first
        else:
            found.update({f"{index}/{name}": tensor for index, tensor in held.items()})
    return bytes(safetensors.torch.save({name: to_stored(tensor) for name, tensor in sorted(found.items())}))


def _identical(first: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if first is other:
        return True
    if first.shape != other.shape or first.dtype != other.dtype:
        return False
    # As bytes: NaN is equal to itself here, and 0.0 differs from -0.0.
    return torch.equal(first.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _require_finite(bundle: Bundle) -> None:
    times = (bundle.evidence.planned, bundle.evidence.measured)
    figures: list[tuple[str, float]] = [("operator time", time) for item in times for time in (*item.start_us, *item.end_us)]
    figures += [("an operator's time alone", time) for time in bundle.evidence.solo_us]
    report = bundle.evidence.report
    figures += [(name, bound) for name in ("critical_path_us", "work_us") if (bound := getattr(report, name)) is not None]
    figures += [(name, getattr(report, name)) for name in ("ratio_low", "ratio_high", "search_s", "noise_floor_pct")]
    for row in report.strategies:
        named = ("predicted_us", "measured_us", "speedup_vs_sequential", "speedup_vs_best_baseline", "max_abs_error")
        figures += [(f"{row.name}.{name}", getattr(row, name)) for name in named if getattr(row, name) is not None]
        figures += [(f"{row.name}.ci_us", bound) for bound in row.ci_us or ()]
    for item in bundle.program.inputs:
        figures += [("an input's mean", item.mean), ("an input's deviation", item.std)]
    for what, figure in figures:
        if not math.isfinite(figure):
            raise UsageError(f"{what} is {figure}; a schedule file holds finite figures only. Store a failure, or no figure, instead.")
