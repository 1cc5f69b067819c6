"""Forged bundles by the thousand: a typed error or the same answer; never a crash, a hang, another answer, or code run.

Beside flipped bytes, every file is edited by structure and the manifest's hashes made to match, so that the edit reaches the parsers and
the checks behind them.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosched.core.errors import ArtifactError, AutoschedError, InputMismatch
from autosched.core.program_json import decode_program
from autosched.runtime.bundle.format import MANIFEST, model_fingerprint
from autosched.runtime.bundle.program_check import check_program
from autosched.runtime.load import load
from tests.conformance.bundle_forging import DATA, MODEL, OLD, SEVERAL, assert_the_models_answer, files_of, sealed, with_json


def attempt(data: bytes, *, eager: bool = True) -> str:
    """Load and call whatever ``data`` is; the state it ended in. Anything but a typed error or the right answer fails the test."""
    end, message = "same answer", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load(data, MODEL, strict=True, prepare="all" if eager else "first-use")
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
    base = (DATA, SEVERAL, OLD)[seed // 4 % 3]
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
    base = draw(st.sampled_from((DATA, SEVERAL, OLD)))
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
