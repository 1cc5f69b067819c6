"""What a bundle holds, as values: the manifest of each schema, the evidence, and the bundle in memory. Nothing here reads a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from autosched.core.graph import OpGraph
from autosched.core.program import ConstantSource, Program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.report import TuneReport
from autosched.core.schedule import Schedule
from autosched.core.variants import WHOLE, Variant

if TYPE_CHECKING:
    import torch

FORMAT = "autosched.bundle"
SCHEMA = 12
MANIFEST = "manifest.json"
PROGRAM = "program.json"
SCHEDULE = "schedule.json"
EVIDENCE = "evidence.json"
LITERALS = "literals.safetensors"
PER_SHAPE = (PROGRAM, SCHEDULE, EVIDENCE)
MAX_SHAPES = 64


def schema_for(shapes: Iterable[Bundle]) -> int:
    """The lowest schema number whose readers know everything in ``shapes``: 7 for a model that decides by its own tensors what runs, 5 for
    one that changes its buffers or inputs, 4 for modes of Inductor, those of ``_SINCE`` for variants, else 2.
    """
    needed = 2
    for item in shapes:
        program = item.program
        if program.decided:
            needed = max(needed, 7)
        if program.state or program.writes:
            needed = max(needed, 5)
        if program.frozen or program.choices or program.lowering in WHOLE[1:]:
            needed = max(needed, 4)
        needed = max([needed, *(_SINCE.get(variant, 2) for variant in item.schedule.variant)])
    return needed


_SINCE: dict[int, int] = {
    Variant.HALF_SMS: 3,
    Variant.CUDNN_FUSED: 4,
    Variant.CUBLASLT: 6,
    Variant.WINOGRAD_2: 7,
    Variant.WINOGRAD_4: 7,
    Variant.OWN_PRODUCT: 8,
    Variant.OWN_CONVOLUTION: 9,
    Variant.OWN_RECURRENCE: 9,
    Variant.OWN_ATTENTION: 10,
    Variant.OWN_CHAIN: 11,
    Variant.OWN_POOLING: 12,
}
"""The schema whose readers were the first to know a variant."""


def shape_file(shape: int, name: str) -> str:
    """Where file ``name`` of a shape is in the zip (since schema 2).

    >>> shape_file(3, "schedule.json")
    'shapes/3/schedule.json'
    """
    return f"shapes/{shape}/{name}"


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
    """What a schedule was made for.

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


class HostKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of :class:`BundleKey` that all shapes of a file share: where they were measured."""

    device: DeviceKey
    software: SoftwareKey
    numerics: tuple[tuple[str, str], ...]


class ShapeKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of :class:`BundleKey` that each shape has for itself: what was measured."""

    graph: str
    model: str


class ManifestOne(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``manifest.json`` of schema 1: one shape, its files beside the manifest. Read for ever, written no more."""

    format: str
    schema: int
    created_by: CreatedBy
    key: BundleKey
    files: dict[str, FileEntry]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``manifest.json`` since schema 2; later schemas know more variants of operators, modes of Inductor and kinds of models.

    The files of shape ``i`` are in the folder ``shapes/i``, literals are shared.
    """

    format: str
    schema: int
    created_by: CreatedBy
    host: HostKey
    shapes: tuple[ShapeKey, ...]
    files: dict[str, FileEntry]

    def key(self, shape: int) -> BundleKey:
        """The key of one shape."""
        own = self.shapes[shape]
        return BundleKey(own.graph, self.host.device, self.host.software, self.host.numerics, own.model)


def migrate(manifest: ManifestOne, files: Mapping[str, bytes]) -> tuple[Manifest, dict[str, bytes]]:
    """A bundle of schema 1 as one of schema 2 with a single shape: names move, contents stay byte for byte.

    Args:
        files: every file but the manifest, by name.
    """
    key = manifest.key
    moved = {name: shape_file(0, name) if name in PER_SHAPE else name for name in files}
    return (
        Manifest(
            manifest.format,
            2,
            manifest.created_by,
            HostKey(key.device, key.software, key.numerics),
            (ShapeKey(key.graph, key.model),),
            {moved.get(name, name): entry for name, entry in manifest.files.items()},
        ),
        {moved[name]: data for name, data in files.items()},
    )


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
        solo_us: time of each operator alone, at the width the schedule gives it, microseconds, by operator index. Empty if unknown.
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
    """A schedule tuned for one shape of inputs, with everything needed to run it on the model it was made for.

    A file may hold several. ``literals`` are CPU tensors by name, laid out as the program's value table says.
    """

    program: Program
    schedule: Schedule
    evidence: Evidence
    key: BundleKey
    created_by: CreatedBy
    literals: Mapping[str, torch.Tensor] = field(default_factory=dict)


def model_fingerprint(program: Program) -> str:
    """Digest of the names, shapes and dtypes of every parameter and buffer that ``program`` takes from its model, or changes there."""
    graph: OpGraph = program.graph
    rows = [
        [binding.source, binding.name, graph.values[binding.value].spec.shape, graph.values[binding.value].spec.dtype]
        for binding in (*program.bindings, *program.state)
        if binding.source is not ConstantSource.LITERAL
    ]
    return hashlib.sha256(msgspec.json.encode(sorted(rows))).hexdigest()
