"""Bundles: what is written is read back, equal content is equal bytes, and a failed write leaves the old file alone."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autosched.core.errors import ArtifactCorrupt, IllegalSchedule, IncompatibleArtifact, UnsupportedGraph, UsageError
from autosched.core.program import ConstantSource
from autosched.core.program_json import encode_program
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering, Variant
from autosched.export import bundle as writer
from autosched.export.bundle import encode_bundle, require_literals_fit, write_bundle
from autosched.runtime.bundle.format import Bundle, ManifestOne, migrate, read_bundle, read_bundles, schema_for
from autosched.runtime.inductor.modes import Mode, mode_of
from autosched.runtime.kernels import bind, gather_constants
from autosched.runtime.numerics import compare
from autosched.runtime.plan import make_plan
from autosched.runtime.state import state_of
from autosched.runtime.trees import flatten_inputs, output_tensors
from tests.conformance.bundles import encode_schema_1, shapes_of, two_branches_bundle
from tests.conformance.deciding import Deciding
from tests.conformance.graphs import TwoBranches, two_branches_inputs
from tests.conformance.stateful import ReadBeforeAndAfter, made

_GOLDEN = Path(__file__).resolve().parents[1] / "compat" / "bundle"
_OF_ONE_SHAPE = [f"shapes/0/{name}.json" for name in ("evidence", "program", "schedule")]


@pytest.fixture
def bundle() -> Bundle:
    return two_branches_bundle(TwoBranches().eval())


def _assert_same(read: Bundle, written: Bundle) -> None:
    for name in ("program", "schedule", "evidence", "key", "created_by"):
        assert getattr(read, name) == getattr(written, name)
    assert read.literals.keys() == written.literals.keys()
    assert all(torch.equal(read.literals[name], written.literals[name]) for name in read.literals)


def test_a_written_bundle_is_read_back(bundle: Bundle, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "model.autosched", bundle)
    _assert_same(read_bundle(path), bundle)
    _assert_same(read_bundle(str(path)), bundle)
    _assert_same(read_bundle(path.read_bytes()), bundle)


def test_equal_bundles_are_equal_bytes(bundle: Bundle) -> None:
    data = encode_bundle(bundle)
    assert encode_bundle(two_branches_bundle(TwoBranches().eval())) == data
    assert encode_bundle(read_bundle(data)) == data


def test_a_bundle_holds_no_weights_and_only_known_files(bundle: Bundle, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "model.autosched", bundle)
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == sorted(["literals.safetensors", "manifest.json", *_OF_ONE_SHAPE])
        manifest = json.loads(archive.read("manifest.json"))
        assert b"left.weight" not in archive.read("literals.safetensors")
    assert manifest["format"] == "autosched.bundle"
    assert manifest["schema"] == 2
    assert set(manifest["host"]) == {"device", "software", "numerics"}
    assert [set(shape) for shape in manifest["shapes"]] == [{"graph", "model"}]
    assert set(manifest["files"]) == {"literals.safetensors", *_OF_ONE_SHAPE}


def test_the_path_of_the_file_is_not_in_the_file(bundle: Bundle) -> None:
    evidence = dataclasses.replace(bundle.evidence, report=dataclasses.replace(bundle.evidence.report, bundle="/somewhere/private"))
    made = writer.make_bundle(bundle.program, bundle.schedule, evidence, bundle.literals, bundle.key.device, bundle.key.software)
    assert b"private" not in encode_bundle(made)


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_figures_that_json_cannot_hold_are_refused(bundle: Bundle, figure: float) -> None:
    report = dataclasses.replace(bundle.evidence.report, noise_floor_pct=figure)
    broken = dataclasses.replace(bundle, evidence=dataclasses.replace(bundle.evidence, report=report))
    with pytest.raises(UsageError, match="noise_floor_pct"):
        encode_bundle(broken)


def test_a_schedule_of_another_graph_is_not_written(bundle: Bundle) -> None:
    schedule = dataclasses.replace(bundle.schedule, graph_hash="0" * 64)
    with pytest.raises(ArtifactCorrupt, match="made for graph"):
        encode_bundle(dataclasses.replace(bundle, schedule=schedule))
    with pytest.raises((ArtifactCorrupt, IllegalSchedule)):
        encode_bundle(dataclasses.replace(bundle, schedule=dataclasses.replace(bundle.schedule, order=())))


def test_a_missing_folder_is_a_usage_error(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        write_bundle(tmp_path / "absent" / "model.autosched", bundle)
    with pytest.raises(UsageError, match="cannot write"):
        write_bundle("null\0byte.autosched", bundle)


def test_a_folder_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_bundle(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        read_bundle(tmp_path / "absent.autosched")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="not a regular file"):
        read_bundle(path)


def test_a_full_disk_leaves_the_old_file(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.autosched"
    path.write_bytes(b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        write_bundle(path, bundle)
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["model.autosched"]


def test_readers_see_old_or_new_but_never_half(tmp_path: Path) -> None:
    bundles = [two_branches_bundle(TwoBranches().eval(), lanes=lanes) for lanes in (1, 2)]
    sound = {encode_bundle(bundle) for bundle in bundles}
    path = write_bundle(tmp_path / "model.autosched", bundles[0])
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.is_set():
            write_bundle(path, bundles[count % 2])
            count += 1

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(path.read_bytes() in sound for _ in range(300))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_literal_keeps_its_strides() -> None:
    bundle = two_branches_bundle(TwoBranches().eval())
    data = encode_bundle(dataclasses.replace(bundle, literals={"range": torch.arange(16.0)[::2] / 2}))
    literal = read_bundle(data).literals["range"]
    assert literal.stride() == (1,)
    assert torch.equal(literal, torch.arange(8.0))


def _with_strides(strides: tuple[int, ...]) -> bytes:
    """A bundle whose only literal, eight numbers, is to be laid out with ``strides``."""
    bundle = two_branches_bundle(TwoBranches().eval())
    place = next(binding.value for binding in bundle.program.bindings if binding.source is ConstantSource.LITERAL)
    values = list(bundle.program.graph.values)
    values[place] = dataclasses.replace(values[place], spec=dataclasses.replace(values[place].spec, strides=strides))
    program = dataclasses.replace(bundle.program, graph=dataclasses.replace(bundle.program.graph, values=tuple(values)))
    key = bundle.key
    made = writer.make_bundle(program, sequential(program.graph), bundle.evidence, bundle.literals, key.device, key.software)
    return encode_bundle(made)


@pytest.mark.parametrize(
    ("strides", "laid_out"),
    [((), (1,)), ((1,), (1,)), ((2,), (2,)), ((4,), (4,)), ((0,), (1,))],  # eight in one place cannot be written one by one
)
def test_a_literal_is_laid_out_as_its_program_says(strides: tuple[int, ...], laid_out: tuple[int, ...]) -> None:
    literal = read_bundle(_with_strides(strides)).literals["range"]
    assert literal.stride() == laid_out
    assert torch.equal(literal, torch.arange(8.0))


def test_a_literal_that_would_be_mostly_gaps_is_refused() -> None:
    with pytest.raises(ArtifactCorrupt, match="waste memory"):
        read_bundle(_with_strides((5,)))


def test_a_bundle_of_two_shapes_is_not_read_as_one() -> None:
    data = encode_bundle(*shapes_of(TwoBranches().eval(), 1, 4))
    assert len(read_bundles(data)) == 2
    with pytest.raises(UsageError, match="holds 2 shapes"):
        read_bundle(data)


def test_a_sequential_schedule_travels_too() -> None:
    bundle = two_branches_bundle(TwoBranches().eval())
    plain = dataclasses.replace(bundle, schedule=sequential(bundle.program.graph, width=2))
    assert read_bundle(encode_bundle(plain)).schedule == plain.schedule


def test_a_variant_that_schema_2_lacks_raises_the_schema_and_no_other_does(bundle: Bundle) -> None:
    def schema(variant: int) -> int:
        schedule = dataclasses.replace(bundle.schedule, variant=(variant,) * len(bundle.program.graph))
        data = encode_bundle(dataclasses.replace(bundle, schedule=schedule))
        assert read_bundle(data).schedule.variant == schedule.variant
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found: int = json.loads(archive.read("manifest.json"))["schema"]
        return found

    assert [schema(variant) for variant in Variant] == [2, 2, 2, 2, 3, 4, 6, 7, 7, 8, 9, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("schema", "batches"),
    [("1", [4]), ("2", [1, 4]), *((schema, [1]) for schema in ("3", "4-variant", "6", "7-variant", "8", "9", "10", "11"))],
)
def test_the_golden_bundle_of_every_schema_still_runs(schema: str, batches: list[int]) -> None:
    bundles = read_bundles(_GOLDEN / f"schema-{schema}.autosched")
    model = TwoBranches(seed=0).eval()
    assert len(bundles) == len(batches)
    for bundle, rows in zip(bundles, batches, strict=True):
        bound = bind(bundle.program, gather_constants(bundle.program, model, bundle.literals))
        make_plan(bundle.program.graph, bundle.schedule)
        args, kwargs = two_branches_inputs(9, rows)
        with torch.no_grad():
            expected = output_tensors(model(*args, **kwargs))
        assert compare(bound.run(flatten_inputs(bundle.program, args, kwargs)), expected).within_tolerance
        assert bundle.evidence.report.chosen == "beam"
        assert bundle.key.device.name == "golden processor"


def test_a_mode_of_inductors_raises_the_schema_and_its_golden_bundle_says_which(bundle: Bundle) -> None:
    def schema(**changes: Any) -> int:
        changed = dataclasses.replace(bundle, program=dataclasses.replace(bundle.program, **changes))
        with zipfile.ZipFile(io.BytesIO(encode_bundle(changed))) as archive:
            found: int = json.loads(archive.read("manifest.json"))["schema"]
        return found

    source = encode_program(bundle.program).decode()
    assert schema(lowering="inductor", source=source) == 2
    assert schema(lowering="max_autotune", source=source) == 4
    assert schema(lowering="inductor", source=source, frozen=True) == 4
    assert schema(lowering="inductor", source=source, choices=(("mm", "mm"),)) == 4
    [golden] = read_bundles(_GOLDEN / "schema-4.autosched")
    mode = mode_of(golden.program, "cuda")
    assert (mode.lowering, mode.frozen) == (Lowering.MAX_AUTOTUNE, True)
    assert mode.choices[0] == ("mm float32[1, 8], float32[8, 4]", "triton_mm BLOCK_K=32, BLOCK_M=16")
    # What was written before modes were: Inductor's defaults, its constants given to the code on a GPU.
    before = dataclasses.replace(bundle.program, lowering="inductor")
    assert [mode_of(before, kind) for kind in ("cpu", "cuda")] == [Mode(), Mode(frozen=False)]


def test_schema_1_is_migrated_without_changing_a_byte_of_its_files(bundle: Bundle) -> None:
    old = encode_schema_1(bundle)
    _assert_same(read_bundle(old), bundle)
    with zipfile.ZipFile(io.BytesIO(old)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    first = msgspec.json.decode(files.pop("manifest.json"), type=ManifestOne)
    before = dict(files)
    manifest, moved = migrate(first, files)
    assert files == before
    assert sorted(moved.values()) == sorted(files.values())
    assert (manifest.format, manifest.schema, manifest.created_by) == (first.format, 2, first.created_by)
    assert manifest.key(0) == bundle.key
    assert {name: entry.sha256 for name, entry in manifest.files.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in moved.items()
    }


def test_several_shapes_travel_in_one_file_and_share_literals(tmp_path: Path) -> None:
    shapes = shapes_of(TwoBranches().eval(), 1, 4, 16)
    path = write_bundle(tmp_path / "model.autosched", *shapes)
    read = read_bundles(path)
    assert len(read) == 3
    for one, other in zip(read, shapes, strict=True):
        _assert_same(one, other)
    assert len({bundle.literals["range"].data_ptr() for bundle in read}) == 1
    assert encode_bundle(*read) == path.read_bytes()
    with pytest.raises(UsageError, match=r"holds 3 shapes: \[1, 8\] float32"):
        read_bundle(path)


def test_literals_that_differ_between_shapes_are_kept_apart() -> None:
    shapes = shapes_of(TwoBranches().eval(), 1, 4)
    shapes[1] = dataclasses.replace(shapes[1], literals={"range": torch.arange(8.0) + 1.0})
    first, last = read_bundles(encode_bundle(*shapes))
    assert torch.equal(first.literals["range"], torch.arange(8.0))
    assert torch.equal(last.literals["range"], torch.arange(8.0) + 1.0)


def test_shapes_that_do_not_belong_together_are_not_written(bundle: Bundle) -> None:
    with pytest.raises(ArtifactCorrupt, match="two of its shapes answer the same call"):
        encode_bundle(bundle, two_branches_bundle(TwoBranches().eval(), lanes=3))
    other = dataclasses.replace(bundle, key=msgspec.structs.replace(bundle.key, numerics=(("deterministic", "True"),)))
    with pytest.raises(UsageError, match="different machines"):
        encode_bundle(bundle, other)
    with pytest.raises(UsageError, match="at most 64"):
        encode_bundle(*[bundle] * 65)


def test_a_model_that_changes_memory_raises_the_schema_and_its_golden_bundle_is_loaded() -> None:
    [golden] = read_bundles(_GOLDEN / "schema-5.autosched")
    assert [binding.name for binding in golden.program.state] == ["memory", "count"]
    assert [item.target for item in golden.program.writes] == [binding.value for binding in golden.program.state]
    data = encode_bundle(golden)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert json.loads(archive.read("manifest.json"))["schema"] == 5
    model = made(ReadBeforeAndAfter)
    bound = bind(golden.program, gather_constants(golden.program, model, golden.literals))
    outputs = bound.run([torch.ones(4, 8), *state_of(golden.program, model)])
    place = dict(zip(golden.program.graph.outputs, outputs, strict=True))
    written = [place[item.value] for item in golden.program.writes]
    assert torch.equal(written[0], torch.ones(4, 8))
    assert int(written[1]) == 1


def test_a_model_that_changes_memory_in_a_variant_of_a_later_schema_raises_it_further() -> None:
    [golden] = read_bundles(_GOLDEN / "schema-5.autosched")
    variant = (int(Variant.CUBLASLT), *golden.schedule.variant[1:])
    assert schema_for([golden]) == 5
    # Readers from before know neither: a model may change what it is given and nothing of its own, or read what it never writes.
    for absent in ("state", "writes"):
        assert schema_for([dataclasses.replace(golden, program=dataclasses.replace(golden.program, **{absent: ()}))]) == 5
    assert schema_for([golden, dataclasses.replace(golden, schedule=dataclasses.replace(golden.schedule, variant=variant))]) == 6


def test_a_model_that_decides_by_its_own_tensors_raises_the_schema_and_its_golden_bundle_asks_for_their_numbers() -> None:
    [golden] = read_bundles(_GOLDEN / "schema-7.autosched")
    assert [(item.source, item.name) for item in golden.program.decided] == [("buffer", "limited"), ("parameter", "gate")]
    with zipfile.ZipFile(io.BytesIO(encode_bundle(golden))) as archive:
        assert json.loads(archive.read("manifest.json"))["schema"] == 7
    model = Deciding()
    bound = bind(golden.program, gather_constants(golden.program, model, golden.literals))
    assert torch.equal(bound.run([torch.full((4, 8), 3.0)])[0], torch.full((4, 8), 2.0))
    model.limited.fill_(False)
    with pytest.raises(IncompatibleArtifact, match="buffer limited, by which the model decides what runs: other numbers here"):
        gather_constants(golden.program, model, golden.literals)


def test_literals_that_leave_no_room_are_refused_before_they_are_written(bundle: Bundle) -> None:
    large = torch.zeros(1).expand(2**28)
    require_literals_fit([torch.zeros(8)])
    with pytest.raises(UnsupportedGraph, match=r"1073741824 bytes in tensors.*register_buffer"):
        require_literals_fit([large])
    with pytest.raises(UnsupportedGraph, match="neither parameters nor buffers"):
        encode_bundle(dataclasses.replace(bundle, literals={**bundle.literals, "large": large}))


def test_a_bundle_larger_than_may_be_read_is_not_written(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_ZIP_BYTES", 2**30)
    with pytest.raises(UsageError, match=r"the schedule file has \d+ bytes; expected at most 1073741824"):
        encode_bundle(bundle)


def test_a_message_names_no_bytes_and_refuses_what_holds_no_schedule() -> None:
    with pytest.raises(ArtifactCorrupt, match="cannot read the schedule file: the file is empty"):
        read_bundles(b"")
    number: Any = 7
    with pytest.raises(UsageError, match="cannot be read from a int; expected a path or bytes"):
        read_bundles(number)
