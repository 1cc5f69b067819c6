"""Damaged and forged bundles: a typed error or the same answer; never a crash, a hang, another answer, or code run.

Forgers know the format: beside flipped bytes, every file is edited by structure and the manifest's hashes made to match, so that the
edit reaches the parsers and the checks behind them.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosched.core.errors import ArtifactCorrupt, ArtifactError, AutoschedError, IncompatibleArtifact, InputMismatch
from autosched.core.program_json import decode_program
from autosched.export.bundle import encode_bundle, zip_files
from autosched.runtime.bundle_format import MANIFEST, model_fingerprint, read_bundles
from autosched.runtime.load import FallbackWarning, load
from autosched.runtime.numerics import compare
from autosched.runtime.program_check import check_program
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import encode_schema_1, shapes_of, two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs

Files = dict[str, bytes]

_MODEL = TwoBranches().eval()
_DATA = encode_bundle(two_branches_bundle(_MODEL))
_OLD = encode_schema_1(two_branches_bundle(_MODEL))
_LEAVES = len(two_branches_bundle(_MODEL).program.input_leaves)
_SEVERAL = encode_bundle(*shapes_of(_MODEL, 1, 4, 6))


def files_of(data: bytes) -> Files:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sealed(files: Files) -> bytes:
    """A bundle of ``files`` whose manifest agrees with them."""
    manifest = json.loads(files[MANIFEST])
    entries = {name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items() if name != MANIFEST}
    manifest["files"] = entries
    return zip_files({**files, MANIFEST: json.dumps(manifest).encode()})


def with_file(name: str, data: bytes) -> bytes:
    files = files_of(_DATA)
    return sealed({**files, _place(files, name): data})


def _place(files: Files, name: str) -> str:
    """Where the file of the first shape called ``name`` is, whatever the schema."""
    return name if name in files else f"shapes/0/{name}"


def with_json(name: str, edit: Callable[[Any], Any], base: bytes = _DATA) -> bytes:
    files = files_of(base)
    name = _place(files, name)
    tree = json.loads(files[name])
    result = edit(tree)
    return sealed({**files, name: json.dumps(tree if result is None else result).encode()})


def _zip(**options: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", options.pop("method", zipfile.ZIP_STORED)) as archive:
        for name, data in options.pop("files", files_of(_DATA)).items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _duplicate() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")
        for name, data in list(files_of(_DATA).items())[:4]:
            archive.writestr(name, data)
        archive.writestr("manifest.json", b"{}")
    return buffer.getvalue()


def _flag(data: bytes, bit: int) -> bytes:
    forged = bytearray(data)
    place = forged.rindex(b"PK\x01\x02")
    forged[place + 8] |= bit
    return bytes(forged)


def _bomb() -> bytes:
    files = {**files_of(_DATA), "shapes/0/evidence.json": b" " * (65 * 2**20)}
    return _zip(files=files, method=zipfile.ZIP_DEFLATED)


def _understated_bomb() -> bytes:
    """A directory that declares a small file, and a stream that inflates to a large one."""
    files = {**files_of(_DATA), "shapes/0/evidence.json": b" " * (8 * 2**20)}
    data = bytearray(_zip(files=files, method=zipfile.ZIP_DEFLATED))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = 0
        while (place := data.find(signature, place)) >= 0:
            if int.from_bytes(data[place + offset : place + offset + 4], "little") == 8 * 2**20:
                data[place + offset : place + offset + 4] = (100).to_bytes(4, "little")
            place += 4
    return bytes(data)


def _evidence_bytes() -> int:
    return len(files_of(_DATA)["shapes/0/evidence.json"])


def _shape_keys() -> list[Any]:
    found: list[Any] = json.loads(files_of(_DATA)[MANIFEST])["shapes"]
    return found


def _much_text() -> bytes:
    files = files_of(_DATA)
    blank = b" " * (60 * 2**20)
    files |= {f"shapes/{shape}/{name}.json": blank for shape in range(1, 4) for name in ("program", "evidence")}
    files |= {f"shapes/{shape}/schedule.json": b"" for shape in range(1, 4)}
    return _zip(files=files, method=zipfile.ZIP_DEFLATED)


def _twins() -> bytes:
    files = files_of(_SEVERAL)
    manifest = json.loads(files[MANIFEST])
    manifest["shapes"][1] = manifest["shapes"][0]
    files |= {f"shapes/1/{name}.json": files[f"shapes/0/{name}.json"] for name in ("program", "schedule", "evidence")}
    return sealed({**files, MANIFEST: json.dumps(manifest).encode()})


def _foreign_literal() -> bytes:
    literals = safetensors.torch.save({"range": torch.arange(8.0), "7/range": torch.arange(8.0)})
    return with_file("literals.safetensors", literals)


def _manifest(base: bytes = _DATA, **changes: Any) -> bytes:
    files = files_of(base)
    manifest = {**json.loads(files[MANIFEST]), **changes}
    return zip_files({**files, MANIFEST: json.dumps(manifest).encode()})


def _swapped() -> bytes:
    files = files_of(_DATA)
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
    "truncated": (lambda: _DATA[: len(_DATA) // 2], ArtifactCorrupt, "not a complete bundle"),
    "text": (lambda: b"hello" * 100, ArtifactCorrupt, "not a complete bundle"),
    "something behind it": (lambda: _DATA + b"x", ArtifactCorrupt, "not a complete bundle"),
    "something before it": (lambda: b"x" + _DATA, ArtifactCorrupt, "not a complete bundle"),
    "another zip": (lambda: _zip(files={"a.txt": b"hello"}), ArtifactCorrupt, "holds 'a.txt'"),
    "path traversal": (lambda: _zip(files={**dict(list(files_of(_DATA).items())[:4]), "../../x": b""}), ArtifactCorrupt, "../../x"),
    "absolute path": (lambda: _zip(files={"/etc/passwd": b""}), ArtifactCorrupt, "/etc/passwd"),
    "one file too many": (lambda: _zip(files={**files_of(_DATA), "more": b""}), ArtifactCorrupt, "holds 'more'"),
    "one file too few": (lambda: _zip(files=dict(list(files_of(_DATA).items())[:4])), ArtifactCorrupt, "lacks"),
    "the same name twice": (_duplicate, ArtifactCorrupt, "twice"),
    "encrypted": (lambda: _flag(_DATA, 1), ArtifactCorrupt, "encrypted"),
    "another compression": (lambda: _zip(method=zipfile.ZIP_BZIP2), ArtifactCorrupt, "method 12"),
    "bomb": (_bomb, ArtifactCorrupt, "expected at most"),
    "bomb that understates its size": (_understated_bomb, ArtifactCorrupt, "damaged zip|bytes"),
    "another format": (lambda: _manifest(format="x"), ArtifactCorrupt, "its format is 'x'"),
    "schema of the future": (
        lambda: _manifest(schema=7, created_by={"autosched": "9.1"}, news=1),
        IncompatibleArtifact,
        r"install autosched 9\.1 or newer",
    ),
    "schema of the future by nobody": (lambda: _manifest(schema=7, created_by={}), IncompatibleArtifact, "install autosched a newer"),
    "commands in the version": (
        lambda: _manifest(schema=7, created_by={"autosched": "\x1b[2J"}),
        IncompatibleArtifact,
        "install autosched a newer",
    ),
    "schema 2 that calls itself 1": (lambda: _manifest(schema=1), ArtifactCorrupt, "unknown field|required"),
    "schema 1 that calls itself 2": (lambda: _manifest(_OLD, schema=2), ArtifactCorrupt, "unknown field|required"),
    "a shape too many in the manifest": (lambda: _manifest(shapes=_shape_keys() * 2), ArtifactCorrupt, "lists 2 shapes"),
    "no shapes": (lambda: _manifest(shapes=[]), ArtifactCorrupt, "lists 0 shapes"),
    "a folder too many": (
        lambda: sealed({**files_of(_DATA), "shapes/1/program.json": b"{}"}),
        ArtifactCorrupt,
        "lacks",
    ),
    "a folder beyond the last": (lambda: sealed({**files_of(_DATA), "shapes/64/program.json": b"{}"}), ArtifactCorrupt, "shapes/64"),
    "a folder with a sign": (lambda: sealed({**files_of(_DATA), "shapes/+1/program.json": b"{}"}), ArtifactCorrupt, "no bundle does"),
    "a folder with zeros": (lambda: sealed({**files_of(_DATA), "shapes/00/program.json": b"{}"}), ArtifactCorrupt, "no bundle does"),
    "both layouts at once": (
        lambda: sealed({**files_of(_DATA), "program.json": b"{}", "schedule.json": b"{}", "evidence.json": b"{}"}),
        ArtifactCorrupt,
        "beside the files of a bundle",
    ),
    "a thousand entries": (lambda: _zip(files={f"{index}": b"" for index in range(1000)}), ArtifactCorrupt, "directory of 1000 files"),
    "text without end in many files": (_much_text, ArtifactCorrupt, "JSON files have"),
    "one shape twice": (_twins, ArtifactCorrupt, "answer the same call"),
    "literals of a shape that is not there": (_foreign_literal, ArtifactCorrupt, "no program reads"),
    "schema of the past": (lambda: _manifest(schema=0), ArtifactCorrupt, "its schema is 0"),
    "schema that is no number": (lambda: _manifest(schema="1"), ArtifactCorrupt, "Expected `int`"),
    "unknown manifest field": (lambda: _manifest(extra=1), ArtifactCorrupt, "unknown field"),
    "manifest that is no object": (lambda: zip_files({**files_of(_DATA), MANIFEST: b"[]"}), ArtifactCorrupt, "Expected `object`"),
    "manifest of depth": (lambda: zip_files({**files_of(_DATA), MANIFEST: b"[" * 10**6}), ArtifactCorrupt, "nested deeper"),
    "hash": (
        lambda: zip_files({**files_of(_DATA), "shapes/0/evidence.json": files_of(_DATA)["shapes/0/evidence.json"][::-1]}),
        ArtifactCorrupt,
        "sha256",
    ),
    "length": (lambda: zip_files({**files_of(_DATA), "shapes/0/evidence.json": b"{}"}), ArtifactCorrupt, "the manifest says"),
    "files swapped, hashes fixed": (_swapped, ArtifactCorrupt, r"(program|schedule)\.json"),
    "depth": (lambda: with_file("program.json", b'{"graph":' * 10**6), ArtifactCorrupt, "nested deeper"),
    "brackets in strings are no depth": (lambda: with_file("schedule.json", b'{"a": "' + b"[" * 99 + b'"}'), ArtifactCorrupt, "required"),
    "literals cut": (lambda: with_file("literals.safetensors", files_of(_DATA)["literals.safetensors"][:-1]), ArtifactCorrupt, "literals"),
    "literals of noise": (lambda: with_file("literals.safetensors", b"\xff" * 64), ArtifactCorrupt, "literals"),
    "a variant that nobody has": (
        lambda: with_json("schedule.json", lambda tree: tree["variant"].__setitem__(0, 200)),
        ArtifactCorrupt,
        "variant 200; expected 0 to 5",
    ),
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


@pytest.mark.parametrize("name", _FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    make, error, words = _FAULTS[name]
    path = tmp_path / "bad.autosched"
    path.write_bytes(make())
    began = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        read_bundles(path)
    assert time.monotonic() - began < 30  # a hang guard, not a measurement
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 4
    assert str(caught.value).replace("\n", "").isprintable()
    with pytest.warns(FallbackWarning):
        assert_the_models_answer(load(path, _MODEL))


def test_a_thread_count_that_would_end_the_process_is_refused() -> None:
    def widen(schedule: Any) -> Any:
        return {**schedule, "width": [1024] * len(schedule["width"])}

    with pytest.raises(IncompatibleArtifact, match="1024 threads"):
        load(with_json("schedule.json", widen), _MODEL, strict=True)


def test_a_compressed_bundle_is_as_good() -> None:
    assert_the_models_answer(load(_zip(method=zipfile.ZIP_DEFLATED), _MODEL, strict=True))


def assert_the_models_answer(loaded: Callable[..., Any], rows: int = 4) -> None:
    args, kwargs = two_branches_inputs(11, rows)
    with torch.no_grad():
        result, expected = loaded(*args, **kwargs), _MODEL(*args, **kwargs)
    assert list(result) == list(expected)
    assert result["name"] == expected["name"]
    assert compare(output_tensors(result), output_tensors(expected)).within_tolerance


def attempt(data: bytes, *, eager: bool = True) -> str:
    """Load and call whatever ``data`` is; the state it ended in. Anything but a typed error or the right answer fails the test."""
    end, message = "same answer", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load(data, _MODEL, strict=True, prepare="all" if eager else "first-use")
            for rows in (1, 4, 6) if len(loaded.report().shapes) > 1 else (4,):
                assert_the_models_answer(loaded, rows)
        except (ArtifactError, InputMismatch) as error:
            end, message = type(error).__name__, str(error)
    assert message.replace("\n", "").isprintable()
    return end


_REFS = ({"type": "ref"}, {"type": "ref", "value": 0}, {"type": "ref", "value": 10**6}, {"type": "ref", "value": 5})
_LITERALS = (
    {"type": "torch", "kind": "dtype", "name": "float64"},
    {"type": "torch", "kind": "device", "name": "cuda"},
    {"type": "torch", "kind": "layout", "name": "_mkldnn"},
    {"type": "float", "name": "nan"},
    {"type": "list", "items": []},
)
_TARGETS = (
    "aten::relu_.default",
    "aten::mul.Tensor",
    "aten::t.default",
    "aten::as_strided.default",
    "aten::set_.default",
    "aten::from_file.default",
    "aten::empty.memory_format",
    "aten::resize_.default",
    "aten::__and__.Tensor",
    "aten::sub.Tensor",
    "aten::mm.out",
    "prims::view_of.default",
    "builtins::eval.default",
)
_WORDS = ("input", "constant", "intermediate", "internal", "parameter", "literal", "float64", "int64", "bool")
_NUMBERS = (None, True, 0, 1, -1, 2, 7, 255, 2**31, 2**63, -(2**63), 10**30, 0.5, -1e308)
_ODDITIES: tuple[Any, ...] = ("", "x", "a" * 5000, "\x1b[31m", [], {}, [0], [[]])
_EDITS: tuple[Any, ...] = (*_NUMBERS, *_ODDITIES, *_REFS, *_LITERALS, *_TARGETS, *_WORDS)


def structural_edit(rng: random.Random, name: str, base: bytes) -> bytes:
    """One to three random changes somewhere in the tree of one JSON file, hashes made to match."""

    def edit(tree: Any) -> Any:
        for _ in range(rng.randint(1, 3)):
            parents = [node for node in _nodes(tree) if node]
            if parents:
                _change(rng, rng.choice(parents), parents)
        return tree

    return with_json(name, edit, base)


def forged_program(rng: random.Random, base: bytes) -> bytes:
    """A changed program under keys made to match it: what reaches the binding, the audit and the comparison."""
    shape = rng.choice(_folders(base))
    files = files_of(structural_edit(rng, f"{shape}program.json", base))
    try:
        program = decode_program(files[f"{shape}program.json"])
        check_program(program)
        graph_hash, fingerprint = program.graph.hash, model_fingerprint(program)
    except (AutoschedError, msgspec.MsgspecError, KeyError, IndexError, OverflowError):
        return sealed(files)
    manifest, schedule = json.loads(files[MANIFEST]), json.loads(files[f"{shape}schedule.json"])
    key = manifest["shapes"][int(shape.split("/")[1])] if shape else manifest["key"]
    key |= {"graph": graph_hash, "model": fingerprint}
    schedule["graph_hash"] = graph_hash
    if rng.random() < 0.5:
        count = len(program.graph)
        schedule |= {"order": list(range(count)), **{name: [0] * count for name in ("lane", "priority", "variant")}, "width": [1] * count}
        schedule["extra_edges"] = []
    return sealed({**files, MANIFEST: json.dumps(manifest).encode(), f"{shape}schedule.json": json.dumps(schedule).encode()})


def _folders(base: bytes) -> list[str]:
    """The folder of each shape; nothing for the first schema, which had none."""
    return [name.removesuffix("program.json") for name in sorted(files_of(base)) if name.endswith("program.json")]


def _nodes(tree: Any) -> list[Any]:
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (dict, list)):
            found.append(node)
            stack.extend(node.values() if isinstance(node, dict) else node)
    return found


def _change(rng: random.Random, node: Any, others: list[Any]) -> None:
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    value = node[key]
    draw = rng.random()
    if draw < 0.15:
        del node[key]
    elif draw < 0.25:
        node[key if isinstance(node, dict) else slice(key, key)] = (
            copy.deepcopy(value) if isinstance(node, dict) else [copy.deepcopy(value)]
        )
    elif draw < 0.35 and isinstance(node, list):
        rng.shuffle(node)
    elif draw < 0.45 and isinstance(node, dict):
        node[rng.choice(("extra", "lane", "operators", "__enum__"))] = value
    elif draw < 0.65 and isinstance(value, int):
        node[key] = value + rng.choice((-2, -1, 1, 2, 64))
    elif draw < 0.75:
        donor = rng.choice(others)
        node[key] = copy.deepcopy(donor[rng.choice(list(donor)) if isinstance(donor, dict) else rng.randrange(len(donor))])
    else:
        node[key] = copy.deepcopy(rng.choice(_EDITS))


def byte_edit(rng: random.Random, data: bytes) -> bytes:
    """One to four flipped, cut, doubled or overwritten places."""
    forged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not forged:
            break
        place = rng.randrange(len(forged))
        draw = rng.random()
        if draw < 0.6:
            forged[place] ^= 1 << rng.randrange(8)
        elif draw < 0.7:
            del forged[place : place + rng.randint(1, 64)]
        elif draw < 0.8:
            forged[place:place] = forged[place : place + rng.randint(1, 64)]
        elif draw < 0.9:
            forged[place] = rng.randrange(256)
        else:
            del forged[place:]
    return bytes(forged)


def fuzz_case(seed: int) -> bytes:
    """Three kinds of files in turn (one shape, several, the first schema), four kinds of damage in turn."""
    rng = random.Random(seed)
    base = (_DATA, _SEVERAL, _OLD)[seed // 4 % 3]
    kind = seed % 4
    if kind == 0:
        return byte_edit(rng, base)
    files = files_of(base)
    if kind == 1:
        name = rng.choice(sorted(set(files) - {MANIFEST}))
        return sealed({**files, name: byte_edit(rng, files[name])})
    if kind == 2:
        name = rng.choice(sorted(name for name in files if name.endswith(".json")))
        return structural_edit(rng, name, base)
    return forged_program(rng, base)


def fuzz(seeds: range) -> dict[str, int]:
    ends: dict[str, int] = {}
    for seed in seeds:
        try:
            end = attempt(fuzz_case(seed), eager=seed % 5 > 0)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        ends[end] = ends.get(end, 0) + 1
    return ends


def test_a_few_hundred_forgeries() -> None:
    ends = fuzz(range(400))
    assert ends.keys() - {"InputMismatch"} == {"ArtifactCorrupt", "IncompatibleArtifact", "same answer"}
    ends.pop("InputMismatch", None)
    assert min(ends.values()) >= 4


@pytest.mark.slow
def test_thousands_of_forgeries() -> None:
    """The same ones in every run: a change of the reader is what they are for, not luck."""
    ends = fuzz(range(1000, 4000))
    assert sum(ends.values()) == 3000
    ends.pop("InputMismatch", None)
    assert min(ends.values()) >= 30


_JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _edited_bundles(draw: st.DrawFn) -> bytes:
    """A bundle in which one place of one JSON file holds any other JSON, or one file other bytes; hashes made to match."""
    base = draw(st.sampled_from((_DATA, _SEVERAL, _OLD)))
    files = files_of(base)
    name = draw(st.sampled_from(sorted(files)))
    if not name.endswith(".json"):
        return sealed({**files, name: draw(st.binary(max_size=64))})
    tree = json.loads(files[name])
    parents = [node for node in _nodes(tree) if node]
    parent = parents[draw(st.integers(0, len(parents) - 1))]
    key = draw(st.sampled_from(sorted(parent))) if isinstance(parent, dict) else draw(st.integers(0, len(parent) - 1))
    parent[key] = draw(_JSON_VALUES)
    return sealed({**files, name: json.dumps(tree).encode()})


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(_edited_bundles())
def test_any_json_anywhere_is_an_error_or_the_same_answer(data: bytes) -> None:
    assert attempt(data) in ("ArtifactCorrupt", "IncompatibleArtifact", "InputMismatch", "same answer")
