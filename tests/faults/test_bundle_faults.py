"""Damaged and forged bundles: each fault is refused with an error that names it, and the model runs as it came.

Forgers know the format: every file is edited by structure and the manifest's hashes made to match, so that the edit reaches the parsers and
the checks behind them.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autosched.core.errors import ArtifactCorrupt, ArtifactError, IncompatibleArtifact
from autosched.core.variants import Variant
from autosched.export.bundle import zip_files
from autosched.runtime.bundle.format import MANIFEST, SCHEMA, read_bundles
from autosched.runtime.load import FallbackWarning, load
from tests.conformance.bundle_forging import DATA, MODEL, OLD, SEVERAL, assert_the_models_answer, files_of, sealed, with_file, with_json
from tests.conformance.bundles import two_branches_bundle

_LEAVES = len(two_branches_bundle(MODEL).program.input_leaves)


def _zip(**options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", options.pop("method", zipfile.ZIP_STORED)) as archive:
        for name, data in options.pop("files", files_of(DATA)).items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _duplicate() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")
        for name, data in list(files_of(DATA).items())[:4]:
            archive.writestr(name, data)
        archive.writestr("manifest.json", b"{}")
    return buffer.getvalue()


def _flag(data: bytes, bit: int) -> bytes:
    forged = bytearray(data)
    place = forged.rindex(b"PK\x01\x02")
    forged[place + 8] |= bit
    return bytes(forged)


def _bomb() -> bytes:
    files = {**files_of(DATA), "shapes/0/evidence.json": b" " * (65 * 2**20)}
    return _zip(files=files, method=zipfile.ZIP_DEFLATED)


def _understated_bomb() -> bytes:
    """A directory that declares a small file, and a stream that inflates to a large one."""
    files = {**files_of(DATA), "shapes/0/evidence.json": b" " * (8 * 2**20)}
    data = bytearray(_zip(files=files, method=zipfile.ZIP_DEFLATED))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = 0
        while (place := data.find(signature, place)) >= 0:
            if int.from_bytes(data[place + offset : place + offset + 4], "little") == 8 * 2**20:
                data[place + offset : place + offset + 4] = (100).to_bytes(4, "little")
            place += 4
    return bytes(data)


def _shape_keys() -> list[Any]:
    found: list[Any] = json.loads(files_of(DATA)[MANIFEST])["shapes"]
    return found


def _much_text() -> bytes:
    files = files_of(DATA)
    blank = b" " * (60 * 2**20)
    files |= {f"shapes/{shape}/{name}.json": blank for shape in range(1, 4) for name in ("program", "evidence")}
    files |= {f"shapes/{shape}/schedule.json": b"" for shape in range(1, 4)}
    return _zip(files=files, method=zipfile.ZIP_DEFLATED)


def _twins() -> bytes:
    files = files_of(SEVERAL)
    manifest = json.loads(files[MANIFEST])
    manifest["shapes"][1] = manifest["shapes"][0]
    files |= {f"shapes/1/{name}.json": files[f"shapes/0/{name}.json"] for name in ("program", "schedule", "evidence")}
    return sealed({**files, MANIFEST: json.dumps(manifest).encode()})


def _foreign_literal() -> bytes:
    literals = safetensors.torch.save({"range": torch.arange(8.0), "7/range": torch.arange(8.0)})
    return with_file("literals.safetensors", literals)


def _literal(**tensors: torch.Tensor) -> bytes:
    return with_file("literals.safetensors", safetensors.torch.save(tensors))


def _key(**changes: str) -> Callable[[], bytes]:
    """The bundle with another key of its shape."""
    return lambda: _manifest(shapes=[{**_shape_keys()[0], **changes}])


def _unlisted() -> bytes:
    files = files_of(DATA)
    listed = json.loads(files[MANIFEST])["files"]
    del listed["shapes/0/schedule.json"]
    return _manifest(files=listed)


def _new_manifest_of_the_old_layout() -> bytes:
    return sealed({name.removeprefix("shapes/0/"): data for name, data in files_of(DATA).items()})


def _evidence(edit: Callable[[Any], Any]) -> Callable[[], bytes]:
    return lambda: with_json("evidence.json", edit)


def _manifest(base: bytes = DATA, **changes: Any) -> bytes:
    files = files_of(base)
    manifest = {**json.loads(files[MANIFEST]), **changes}
    return zip_files({**files, MANIFEST: json.dumps(manifest).encode()})


def _swapped() -> bytes:
    files = files_of(DATA)
    program, schedule = (f"shapes/0/{name}.json" for name in ("program", "schedule"))
    return sealed({**files, schedule: files[program], program: files[schedule]})


def _opened(context: object) -> object:
    """A call of one argument, an object with one attribute; it has as many leaves as the model's."""
    leaf = {"type": None, "context": None, "children_spec": []}
    node = {"type": "autosched.opened", "context": json.dumps(json.dumps(context)), "children_spec": [leaf]}
    args = {"type": "builtins.tuple", "context": "null", "children_spec": [node, *[leaf] * (_LEAVES - 1)]}
    kwargs = {"type": "builtins.dict", "context": "[]", "children_spec": []}
    return [1, {"type": "builtins.tuple", "context": "null", "children_spec": [args, kwargs]}]


def _tree(text: object) -> bytes:
    return with_json("program.json", lambda program: {**program, "input_tree": json.dumps(text) if not isinstance(text, str) else text})


def _default_dict(module: str, name: str) -> list[Any]:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": ["a", "b"]}
    return [1, {"type": "collections.defaultdict", "context": context, "children_spec": [leaf, leaf]}]


_HIDDEN_ENUM = '[NaN, {"\\u005f\\u005fenum\\u005f\\u005f": true, "fqn": "antigravity:x", "name": "y"}]'

_FAULTS: dict[str, tuple[Callable[[], bytes], type[ArtifactError], str]] = {
    "empty": (lambda: b"", ArtifactCorrupt, "empty"),
    "truncated": (lambda: DATA[: len(DATA) // 2], ArtifactCorrupt, "not a complete schedule file"),
    "text": (lambda: b"hello" * 100, ArtifactCorrupt, "not a complete schedule file"),
    "something behind it": (lambda: DATA + b"x", ArtifactCorrupt, "not a complete schedule file"),
    "something before it": (lambda: b"x" + DATA, ArtifactCorrupt, "not a complete schedule file"),
    "another zip": (lambda: _zip(files={"a.txt": b"hello"}), ArtifactCorrupt, "holds 'a.txt'"),
    "path traversal": (lambda: _zip(files={**dict(list(files_of(DATA).items())[:4]), "../../x": b""}), ArtifactCorrupt, "../../x"),
    "absolute path": (lambda: _zip(files={"/etc/passwd": b""}), ArtifactCorrupt, "/etc/passwd"),
    "one file too many": (lambda: _zip(files={**files_of(DATA), "more": b""}), ArtifactCorrupt, "holds 'more'"),
    "one file too few": (lambda: _zip(files=dict(list(files_of(DATA).items())[:4])), ArtifactCorrupt, "lacks"),
    "the same name twice": (_duplicate, ArtifactCorrupt, "twice"),
    "encrypted": (lambda: _flag(DATA, 1), ArtifactCorrupt, "encrypted"),
    "another compression": (lambda: _zip(method=zipfile.ZIP_BZIP2), ArtifactCorrupt, "method 12"),
    "bomb": (_bomb, ArtifactCorrupt, "expected at most"),
    "bomb that understates its size": (_understated_bomb, ArtifactCorrupt, "damaged zip|bytes"),
    "another format": (lambda: _manifest(format="x"), ArtifactCorrupt, "its format is 'x'"),
    "schema of the future": (
        lambda: _manifest(schema=SCHEMA + 1, created_by={"autosched": "9.1"}, news=1),
        IncompatibleArtifact,
        r"install autosched 9\.1 or newer$",
    ),
    "schema of the future by nobody": (
        lambda: _manifest(schema=SCHEMA + 1, created_by={}),
        IncompatibleArtifact,
        r"written by a newer autosched, this is autosched [\d.]+; install that one$",
    ),
    "commands in the version": (
        lambda: _manifest(schema=SCHEMA + 1, created_by={"autosched": "\x1b[2J"}),
        IncompatibleArtifact,
        r"written by a newer autosched, this is autosched [\d.]+; install that one$",
    ),
    "schema 2 that calls itself 1": (lambda: _manifest(schema=1), ArtifactCorrupt, "unknown field|required"),
    "schema 1 that calls itself 2": (lambda: _manifest(OLD, schema=2), ArtifactCorrupt, "unknown field|required"),
    "a shape too many in the manifest": (lambda: _manifest(shapes=_shape_keys() * 2), ArtifactCorrupt, "lists 2 shapes"),
    "no shapes": (lambda: _manifest(shapes=[]), ArtifactCorrupt, "lists 0 shapes"),
    "a folder too many": (
        lambda: sealed({**files_of(DATA), "shapes/1/program.json": b"{}"}),
        ArtifactCorrupt,
        "lacks",
    ),
    "a folder beyond the last": (lambda: sealed({**files_of(DATA), "shapes/64/program.json": b"{}"}), ArtifactCorrupt, "shapes/64"),
    "a folder with a sign": (lambda: sealed({**files_of(DATA), "shapes/+1/program.json": b"{}"}), ArtifactCorrupt, "no schedule file does"),
    "a folder with zeros": (lambda: sealed({**files_of(DATA), "shapes/00/program.json": b"{}"}), ArtifactCorrupt, "no schedule file does"),
    "both layouts at once": (
        lambda: sealed({**files_of(DATA), "program.json": b"{}", "schedule.json": b"{}", "evidence.json": b"{}"}),
        ArtifactCorrupt,
        "beside the parts of a schedule file",
    ),
    "a thousand entries": (lambda: _zip(files={f"{index}": b"" for index in range(1000)}), ArtifactCorrupt, "directory of 1000 files"),
    "text without end in many files": (_much_text, ArtifactCorrupt, "JSON files have"),
    "one shape twice": (_twins, ArtifactCorrupt, "answer the same call"),
    "literals of a shape that is not there": (_foreign_literal, ArtifactCorrupt, "no program reads"),
    "schema of the past": (lambda: _manifest(schema=0), ArtifactCorrupt, "its schema is 0"),
    "schema that is no number": (lambda: _manifest(schema="1"), ArtifactCorrupt, "Expected `int`"),
    "unknown manifest field": (lambda: _manifest(extra=1), ArtifactCorrupt, "unknown field"),
    "manifest that is no object": (lambda: zip_files({**files_of(DATA), MANIFEST: b"[]"}), ArtifactCorrupt, "Expected `object`"),
    "manifest of depth": (lambda: zip_files({**files_of(DATA), MANIFEST: b"[" * 10**6}), ArtifactCorrupt, "nested deeper"),
    "hash": (
        lambda: zip_files({**files_of(DATA), "shapes/0/evidence.json": files_of(DATA)["shapes/0/evidence.json"][::-1]}),
        ArtifactCorrupt,
        "sha256",
    ),
    "hash of an old file": (
        lambda: zip_files({**files_of(OLD), "evidence.json": files_of(OLD)["evidence.json"][::-1]}),
        ArtifactCorrupt,
        "sha256",
    ),
    "length": (lambda: zip_files({**files_of(DATA), "shapes/0/evidence.json": b"{}"}), ArtifactCorrupt, "has 2 bytes; the manifest says"),
    "files swapped, hashes fixed": (_swapped, ArtifactCorrupt, r"(program|schedule)\.json"),
    "depth": (lambda: with_file("program.json", b'{"graph":' * 10**6), ArtifactCorrupt, "nested deeper"),
    "brackets in strings are no depth": (lambda: with_file("schedule.json", b'{"a": "' + b"[" * 99 + b'"}'), ArtifactCorrupt, "required"),
    "literals cut": (lambda: with_file("literals.safetensors", files_of(DATA)["literals.safetensors"][:-1]), ArtifactCorrupt, "literals"),
    "literals of noise": (lambda: with_file("literals.safetensors", b"\xff" * 64), ArtifactCorrupt, "literals"),
    "a variant that nobody has": (
        lambda: with_json("schedule.json", lambda tree: tree["variant"].__setitem__(0, 200)),
        ArtifactCorrupt,
        f"variant 200; expected 0 to {max(Variant):d}",
    ),
    "a time that is none": (
        lambda: with_json("evidence.json", lambda tree: tree["report"]["strategies"][1].update(measured_us=0)),
        ArtifactCorrupt,
        "measured time is not positive",
    ),
    "a time below nought": (
        _evidence(lambda tree: tree["report"]["strategies"][1].update(measured_us=-1.0)),
        ArtifactCorrupt,
        "measured time is not positive",
    ),
    "more starts than ends": (_evidence(lambda tree: tree["planned"]["end_us"].pop() and None), ArtifactCorrupt, "planned times of"),
    "times of an operator too few": (
        _evidence(lambda tree: [times.pop() for times in tree["measured"].values()] and tree),
        ArtifactCorrupt,
        "measured times of",
    ),
    "a time of a single operator alone": (
        _evidence(lambda tree: {**tree, "solo_us": [1.0]}),
        ArtifactCorrupt,
        "1 times of operators alone",
    ),
    "a time without end": (
        lambda: with_file("evidence.json", files_of(DATA)["shapes/0/evidence.json"].replace(b'"end_us":[', b'"end_us":[1e999,', 1)),
        ArtifactCorrupt,
        "evidence.json",
    ),
    "a literal of another name": (lambda: _literal(other=torch.arange(8.0)), ArtifactCorrupt, "range is absent"),
    "a literal of another shape": (lambda: _literal(range=torch.arange(9.0)), ArtifactCorrupt, "range is absent, or not"),
    "a literal of another dtype": (lambda: _literal(range=torch.arange(8)), ArtifactCorrupt, "range is absent, or not"),
    "a literal that nobody reads": (
        lambda: _literal(range=torch.arange(8.0), more=torch.arange(8.0)),
        ArtifactCorrupt,
        "no program reads: \\['more'\\]",
    ),
    "a file that no shape has": (lambda: sealed({**files_of(DATA), "shapes/0/more.json": b"{}"}), ArtifactCorrupt, "no schedule file does"),
    "a manifest within a shape": (
        lambda: sealed({**files_of(DATA), "shapes/0/manifest.json": b"{}"}),
        ArtifactCorrupt,
        "no schedule file does",
    ),
    "a file that the manifest does not list": (_unlisted, ArtifactCorrupt, "the manifest lists"),
    "the old layout with a manifest of today": (_new_manifest_of_the_old_layout, ArtifactCorrupt, "the files are not those of as many"),
    "the key of another graph": (_key(graph="0" * 64), ArtifactCorrupt, "its hash is .* but the manifest says '000000000000'"),
    "the key of another model": (_key(model="0" * 64), ArtifactCorrupt, "not those of the manifest"),
    "a lane too far": (
        lambda: with_json("schedule.json", lambda schedule: {**schedule, "lane": [10**9, *schedule["lane"][1:]]}),
        ArtifactCorrupt,
        "lanes; expected at most",
    ),
    "no operators": (
        lambda: with_json("program.json", lambda program: {**program, "graph": {**program["graph"], "operators": []}}),
        ArtifactCorrupt,
        "outputs",
    ),
    "tree that imports a module": (lambda: _tree(_default_dict("antigravity", "x")), ArtifactCorrupt, "not a builtin"),
    "tree with a builtin that runs code": (lambda: _tree(_default_dict("builtins", "exec")), ArtifactCorrupt, "unexpected factory"),
    "tree with a hidden enumeration": (
        lambda: _tree(
            [
                1,
                {
                    "type": "builtins.dict",
                    "context": _HIDDEN_ENUM,
                    "children_spec": [{"type": None, "context": None, "children_spec": []}] * 2,
                },
            ]
        ),
        ArtifactCorrupt,
        "plain keys|enumeration",
    ),
    "tree with an object of no names": (lambda: _tree(_opened(["State", [], [], []])), ArtifactCorrupt, "1 items with 0 names"),
    "tree with an object that is no text": (lambda: _tree(_opened({"kind": "State"})), ArtifactCorrupt, "cannot be made"),
    "tree of depth": (lambda: _tree("[1," * 10**5), ArtifactCorrupt, "not readable"),
}


@pytest.mark.timeout(60)  # what is refused is refused at once
@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    make, error, words = _FAULTS[name]
    path = tmp_path / "bad.autosched"
    path.write_bytes(make())
    with pytest.raises(error, match=words) as caught:
        read_bundles(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 4
    assert str(caught.value).replace("\n", "").isprintable()
    with pytest.warns(FallbackWarning):
        assert_the_models_answer(load(path, MODEL))


def test_a_thread_count_that_would_end_the_process_is_refused() -> None:
    def widen(schedule: Any) -> Any:
        return {**schedule, "width": [1024] * len(schedule["width"])}

    with pytest.raises(IncompatibleArtifact, match="1024 threads"):
        load(with_json("schedule.json", widen), MODEL, strict=True)


def test_a_bundle_of_which_no_times_are_known_is_as_good() -> None:
    data = with_json("evidence.json", lambda tree: tree.update(planned={}, measured={}, solo_us=[]))
    assert_the_models_answer(load(data, MODEL, strict=True))


def test_a_compressed_bundle_is_as_good() -> None:
    assert_the_models_answer(load(_zip(method=zipfile.ZIP_DEFLATED), MODEL, strict=True))
