"""A bundle of :class:`tests.conformance.graphs.TwoBranches`, made without the tuner."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile

import msgspec

from autosched.core.records import DeviceKey, Failure, FailureKind, SoftwareKey
from autosched.core.report import StrategyRow, TuneReport
from autosched.core.schedule import Schedule
from autosched.export.bundle import encode_bundle, make_bundle, zip_files
from autosched.runtime.bundle.format import FORMAT, MANIFEST, Bundle, Evidence, FileEntry, ManifestOne, OperatorTimes
from autosched.runtime.host_key import cpu_device_key, software_key
from tests.conformance.graphs import TwoBranches, random_placement, two_branches_program


def evidence_for(operators: int, device: DeviceKey, graph_hash: str) -> Evidence:
    """Evidence with every field filled; its figures are of no run."""
    rows = (
        StrategyRow("sequential", True, 12.0, 11.5, (11.0, 12.0), 1.0, 1.0, 4096, 0.0, None),
        StrategyRow("beam", False, 10.0, 10.5, (10.0, 11.0), 1.095, 1.095, 8192, 1e-7, None),
        StrategyRow("compiled", True, None, None, None, None, None, None, None, Failure(FailureKind.UNAVAILABLE, "no compiler")),
    )
    report = TuneReport(
        "autosched:two_branches",
        graph_hash,
        device,
        "aten",
        operators,
        "beam",
        "sequential",
        "beam is faster",
        0.9,
        0.95,
        rows,
        12,
        1,
        1.5,
        0.7,
        3,
        "quick",
    )
    starts = tuple(float(index) for index in range(operators))
    times = OperatorTimes(starts, tuple(start + 0.9 for start in starts))
    return Evidence(report, (("load", "0.1"),), (("search", 3),), times, times)


def two_branches_bundle(model: TwoBranches, *, lanes: int = 2, schedule: Schedule | None = None, rows: int = 4) -> Bundle:
    """A bundle for ``model`` on this host, for ``rows`` rows, on a random schedule of ``lanes`` lanes by default."""
    program, literals = two_branches_program(model, rows)
    chosen = schedule if schedule is not None else random_placement(random.Random(5), program.graph, lanes)
    device: DeviceKey = cpu_device_key()
    software: SoftwareKey = software_key()
    evidence = evidence_for(len(program.graph), device, program.graph.hash)
    return make_bundle(program, chosen, evidence, literals, device, software)


def shapes_of(model: TwoBranches, *rows: int, lanes: int = 2) -> list[Bundle]:
    """Bundles for several numbers of rows, to be encoded as one."""
    return [two_branches_bundle(model, lanes=lanes, rows=count) for count in rows]


def encode_schema_1(bundle: Bundle) -> bytes:
    """A bundle as the first schema laid it out; nothing else writes it any more."""
    with zipfile.ZipFile(io.BytesIO(encode_bundle(bundle))) as archive:
        files = {name.removeprefix("shapes/0/"): archive.read(name) for name in archive.namelist() if name != MANIFEST}
    files = dict(sorted(files.items()))
    entries = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    manifest = msgspec.json.encode(ManifestOne(FORMAT, 1, bundle.created_by, bundle.key, entries), order="sorted")
    return zip_files({MANIFEST: manifest, **files})
