"""Bundles taken apart and put together again with something else in them, as somebody would who knows the format."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from autosched.export.bundle import encode_bundle, zip_files
from autosched.runtime.bundle.format import MANIFEST
from autosched.runtime.numerics import compare
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import encode_schema_1, shapes_of, two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs

Files = dict[str, bytes]

MODEL = TwoBranches().eval()
DATA = encode_bundle(two_branches_bundle(MODEL))
OLD = encode_schema_1(two_branches_bundle(MODEL))
SEVERAL = encode_bundle(*shapes_of(MODEL, 1, 4, 6))


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
    """The bundle with another file called ``name``."""
    files = files_of(DATA)
    return sealed({**files, _place(files, name): data})


def _place(files: Files, name: str) -> str:
    """Where the file of the first shape called ``name`` is, whatever the schema."""
    return name if name in files else f"shapes/0/{name}"


def with_json(name: str, edit: Callable[[Any], Any], base: bytes = DATA) -> bytes:
    """A bundle in which one JSON file is what ``edit`` makes of it, or returns."""
    files = files_of(base)
    name = _place(files, name)
    tree = json.loads(files[name])
    result = edit(tree)
    return sealed({**files, name: json.dumps(tree if result is None else result).encode()})


def assert_the_models_answer(loaded: Callable[..., Any], rows: int = 4) -> None:
    args, kwargs = two_branches_inputs(11, rows)
    with torch.no_grad():
        result, expected = loaded(*args, **kwargs), MODEL(*args, **kwargs)
    assert list(result) == list(expected)
    assert result["name"] == expected["name"]
    assert compare(output_tensors(result), output_tensors(expected)).within_tolerance
