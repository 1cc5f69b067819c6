"""A whole program compiled once on this machine: found again by a process that compiles nothing, and by nobody else."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from autosched.capture.build import build_program
from autosched.capture.export import draft_of
from autosched.config import regions_dir
from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.device.worker_tensors import read_tensors, write_tensors
from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor import kept as inductor_kept
from autosched.runtime.inductor.bind import Recording, bound_of, record
from autosched.runtime.inductor.common import Compiled
from autosched.runtime.inductor.compile import compile_whole
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.regions.store import RegionStore
from tests.conformance.compiling import compiling
from tests.conformance.forked import run_forked

pytestmark = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")


class Net(nn.Module):
    """A convolution with a batch norm to fold, a small buffer that is written into the code, a layer whose weight is packed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(4, generator=generator))
        with torch.no_grad():
            for tensor in (*self.parameters(), self.norm.running_mean, self.norm.running_var):
                assert tensor is not None
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))) * self.scale


def source_of(seed: int) -> tuple[Program, dict[int, torch.Tensor]]:
    program, constants = build_program(draft_of(Net(seed).eval(), (torch.randn(2, 3, 8, 8),)), "aten")
    return program, dict(constants)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiling(tmp_path_factory.mktemp("cache"), threads=1):
        yield


@pytest.fixture(scope="module")
def recorded() -> tuple[Program, dict[int, torch.Tensor], Recording]:
    """A program compiled, and kept, by this process."""
    program, constants = source_of(0)
    before = inductor_kept.counts.kept
    recording = record(program, constants, "cpu")
    assert isinstance(recording, Recording), recording.reason
    assert inductor_kept.counts.kept == before + 1
    return program, constants, recording


def key_of(bound: BoundProgram, inputs: list[torch.Tensor], *, freeze: bool = True) -> str:
    read = {value for operator in bound.program.graph.operators for value in operator.reads}
    constants = [value for value in sorted(read) if bound.constants[value] is not None]
    return inductor_kept.key_of(bound, constants, inputs, {}, Mode(frozen=freeze))


def kept_entry() -> tuple[str, Path]:
    """Text and file of the one entry."""
    (path,) = regions_dir().iterdir()
    return msgspec.json.decode(path.read_bytes())["source"], path


_SECOND = """
import sys
import torch
from pathlib import Path
from autosched.core.program_json import decode_program
from autosched.device.worker_tensors import read_tensors, write_tensors
from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor import kept as inductor_kept
from autosched.runtime.inductor.bind import bound_of, record
from autosched.runtime.kernels import random_inputs

def compiler(*args, **kwargs):
    raise AssertionError("the compiler was called")

torch.set_num_threads(1)
inductor_compile._compile = compiler
folder = Path(sys.argv[1])
program = decode_program((folder / "program.json").read_bytes())
constants = {int(name): tensor for name, tensor in read_tensors(folder / "constants").items()}
recording = record(program, constants, "cpu")
assert inductor_kept.counts == inductor_kept.Counts(found=1, kept=0), (recording, inductor_kept.counts)
outputs = bound_of(recording, program, constants, torch.device("cpu")).run(random_inputs(program, 5))
write_tensors(folder / "outputs", {str(place): item for place, item in enumerate(outputs)})
"""


def test_a_second_process_compiles_nothing_and_computes_the_same(
    recorded: tuple[Program, dict[int, torch.Tensor], Recording], tmp_path: Path
) -> None:
    program, constants, recording = recorded
    (tmp_path / "program.json").write_bytes(encode_program(program))
    write_tensors(tmp_path / "constants", {str(value): tensor for value, tensor in constants.items()})
    done = run_forked(_SECOND, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = read_tensors(tmp_path / "outputs")
    ours = bound_of(recording, program, constants, torch.device("cpu")).run(random_inputs(program, 5))
    assert [torch.equal(item, theirs[str(place)]) for place, item in enumerate(ours)] == [True]


def test_no_weight_is_kept(recorded: tuple[Program, dict[int, torch.Tensor], Recording]) -> None:
    program, _, _ = recorded
    text, _ = kept_entry()
    key = next(iter({msgspec.json.decode(path.read_bytes())["key"] for path in regions_dir().iterdir()}))
    _, others = source_of(1)
    other = bind(program, others, "cpu")
    found = inductor_kept.find(key, other)
    assert found is not None
    # The folded weight is that of the constants at hand, not of those that the code was compiled with.
    weight = next(tensor for value, tensor in others.items() if tensor.dim() == 4)
    names = dict(zip((binding.name for binding in program.bindings), (others[item.value] for item in program.bindings), strict=True))
    factor = names["norm.weight"] / torch.sqrt(names["norm.running_var"] + 1e-5)
    folded = [found.namespace[name] for name in found.constants if found.namespace[name].shape == weight.shape]
    dense = [item if item.layout is torch.strided else item.to_dense() for item in folded]
    assert any(torch.allclose(item, weight * factor[:, None, None, None], rtol=1e-4) for item in dense)
    assert len(text) < 200_000


def test_whatever_the_code_depends_on_is_in_the_key(recorded: tuple[Program, dict[int, torch.Tensor], Recording]) -> None:
    import torch._inductor.config as inductor_config

    program, constants, _ = recorded
    bound, inputs = bind(program, constants, "cpu"), random_inputs(program, 0)
    key = key_of(bound, inputs)
    assert key == key_of(bind(program, constants, "cpu"), random_inputs(program, 7))
    # What the example inputs looked like is no part of it: who tunes again with other ones compiles nothing.
    elsewhere = dataclasses.replace(program, inputs=tuple(dataclasses.replace(item, mean=9.0) for item in program.inputs))
    assert elsewhere != program
    assert key == key_of(bind(elsewhere, constants, "cpu"), inputs)
    seen = [key, key_of(bind(program, source_of(1)[1], "cpu"), inputs), key_of(bound, inputs, freeze=False)]
    torch.set_num_threads(2)
    try:
        seen.append(key_of(bound, inputs))
    finally:
        torch.set_num_threads(1)
    with inductor_config.patch({"cpp.simdlen": 256}):
        seen.append(key_of(bound, inputs))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
    try:
        seen.append(key_of(bound, inputs))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert len(set(seen)) == len(seen)
    assert all(seen)
    with inductor_config.patch({"post_grad_custom_post_pass": lambda graph: None}):
        assert key_of(bound, inputs) == ""
    # Where the code is given its constants, their values are no part of it.
    assert key_of(bound, inputs, freeze=False) == key_of(bind(program, source_of(1)[1], "cpu"), inputs, freeze=False)


class Conjugated(nn.Module):
    """What is in its table's memory are other numbers than the table's."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([1.0 + 2.0j, 3.0 - 4.0j]).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * self.table)


def test_numbers_that_are_conjugated_or_negated_when_they_are_read_are_in_the_key_so(
    recorded: tuple[Program, dict[int, torch.Tensor], Recording],
) -> None:
    program, constants = build_program(draft_of(Conjugated().eval(), (torch.randn(2, 2),)), "aten")
    ((value, table),) = constants.items()
    assert table.is_conj()
    tables = table, table.resolve_conj(), table.conj()
    keys = [key_of(bind(program, {value: item}, "cpu"), random_inputs(program, 0)) for item in tables]
    assert keys[0] == keys[1] != keys[2]
    program, given, _ = recorded
    value, weight = next(iter(given.items()))
    weights = torch._neg_view(weight), -weight, weight
    keys = [key_of(bind(program, {**given, value: item}, "cpu"), random_inputs(program, 0)) for item in weights]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "edit",
    [
        lambda kept: {**kept, "recipe": kept["recipe"].replace("return", "raise")},
        lambda kept: {**kept, "recipe": "def forward(self, *constants):\n    return ()\n"},
        lambda kept: {**kept, "source": kept["source"].replace("def call(", "def called(")},
        lambda kept: {**kept, "source": "raise RuntimeError('no')"},
        lambda kept: {**kept, "constants": kept["constants"][::-1]},
        lambda kept: {**kept, "leaves": kept["leaves"][:-1]},
        lambda kept: {"source": kept["source"]},
    ],
    ids=["recipe", "no constants", "no entry", "error", "order", "leaves", "fields"],
)
def test_a_text_that_does_not_fit_is_a_miss(recorded: tuple[Program, dict[int, torch.Tensor], Recording], edit) -> None:  # type: ignore[no-untyped-def]
    program, constants, _ = recorded
    text, _ = kept_entry()
    bound = bind(program, constants, "cpu")
    assert RegionStore(regions_dir()).put("edited", msgspec.json.encode(edit(msgspec.json.decode(text))).decode())
    try:
        assert inductor_kept.find("edited", bound) is None
    finally:
        RegionStore(regions_dir())._path("edited").unlink()


def test_constants_from_nowhere_are_not_kept(
    recorded: tuple[Program, dict[int, torch.Tensor], Recording], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, constants, _ = recorded
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    bound, inputs = bind(program, constants, "cpu"), random_inputs(program, 0)
    original = inductor_compile._compile

    def forgetful(*args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        original(*args, **kwargs)
        args[2].folds.results.clear()

    monkeypatch.setattr(inductor_compile, "_compile", forgetful)
    before = inductor_kept.counts.kept
    assert isinstance(compile_whole(bound, inputs), Compiled)
    assert inductor_kept.counts.kept == before
    assert not (tmp_path / "regions").exists()


def test_constants_do_not_outlive_the_code(
    recorded: tuple[Program, dict[int, torch.Tensor], Recording], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program, constants, _ = recorded
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))  # compiled anew
    bound, inputs = bind(program, constants, "cpu"), random_inputs(program, 0)
    made = compile_whole(bound, inputs)
    assert isinstance(made, Compiled)
    folded = [weakref.ref(made.namespace[name]) for name in made.constants]
    assert folded
    del made, bound
    gc.collect()
    given = {id(tensor) for tensor in constants.values()}
    assert [left.shape for item in folded if (left := item()) is not None and id(left) not in given] == []
