"""Loading bundles with custom operators: only where the caller trusts their namespace, and only fit ones."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.custom_operators import trusted, trusting
from autosched.core.errors import IncompatibleArtifact, UnsupportedGraph
from autosched.core.graph import Operator
from autosched.core.program import Program
from autosched.core.schedule import Schedule, make_schedule, sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.bundle.format import Bundle, read_bundle
from autosched.runtime.calls import resolve
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import FallbackWarning, load
from autosched.runtime.verdict import Compatibility, check_bundle
from tests.conformance.bundles import evidence_for
from tests.conformance.custom_operators import NAMESPACE, Branches
from tests.conformance.forked import run_forked


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Branches().eval()


def written(program: Program, schedule: Schedule | None = None) -> bytes:
    graph, device = program.graph, cpu_device_key()
    evidence = evidence_for(len(graph), device, graph.hash)
    return encode_bundle(make_bundle(program, schedule or sequential(graph), evidence, {}, device, software_key()))


@pytest.fixture(scope="module")
def data(model: nn.Module) -> bytes:
    """A bundle on two lanes, each with a custom operator that runs beside the other."""
    with trusting([NAMESPACE]):
        captured = capture(model, (torch.randn(8, 32),))
    graph = captured.program.graph
    first, second = (operator.index for operator in graph.operators if operator.kind == "testlib::scaled_mm")
    lanes = [int(index == second or (index != first and bool(graph.reachable[second] >> index & 1))) for index in range(len(graph))]
    return written(captured.program, make_schedule(graph, range(len(graph)), lanes))


def forged(data: bytes, target: str) -> bytes:
    """The bundle with another operator in place of ``testlib::mode``, its keys made to fit."""
    bundle = read_bundle(data)
    text = msgspec.json.encode(bundle.program.graph.operators).replace(b"testlib::mode.default", target.encode())
    graph = dataclasses.replace(bundle.program.graph, operators=msgspec.json.decode(text, type=tuple[Operator, ...]))
    program = dataclasses.replace(bundle.program, graph=graph)
    return written(program)


def verdict(bundle: Bundle) -> tuple[Compatibility, str]:
    found = check_bundle(bundle, cpu_device_key(), software_key())
    return found.compatibility, "\n".join(found.lines)


def test_a_trusted_bundle_runs_on_two_lanes_in_any_mode_of_the_caller(data: bytes, model: nn.Module) -> None:
    loaded = load(data, model, strict=True, custom_operators=(NAMESPACE,))
    assert loaded.report().lanes == 2
    for seed in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(x)
            assert torch.equal(loaded(x), expected)
        # testlib::mode answers otherwise where gradients are recorded; no lane may record any.
        assert torch.equal(loaded(x), expected)
        with torch.inference_mode():
            assert torch.equal(loaded(x), expected)
    assert loaded.report().calls == 9


def test_it_is_bound_anew_after_a_change_of_the_model_and_on_first_use(data: bytes) -> None:
    model = Branches().eval()
    loaded = load(data, model, strict=True, prepare="first-use", custom_operators=[NAMESPACE])
    x = torch.randn(8, 32)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
        model.left = nn.Parameter(torch.randn(32, 32))
        assert torch.equal(loaded(x), model(x))
    assert trusted() == frozenset()


def test_a_bundle_that_needs_what_the_loader_was_not_given_is_not_used(data: bytes, model: nn.Module) -> None:
    x = torch.randn(8, 32)
    # What was allowed before, for another load, is not allowed for this one.
    load(data, model, strict=True, custom_operators=(NAMESPACE,))
    for given in ((), ("other",)):
        with pytest.raises(IncompatibleArtifact, match=r"custom_operators=\('testlib',\)"):
            load(data, model, strict=True, custom_operators=given)
        with pytest.warns(FallbackWarning, match=r"testlib::halves.*'testlib' is not trusted"):
            loaded = load(data, model, custom_operators=given)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FallbackWarning)
            assert torch.equal(loaded(x), model(x))
        assert not loaded.report().scheduled


def test_the_verdict_has_a_line_for_it(data: bytes) -> None:
    bundle = read_bundle(data)
    kind, lines = verdict(bundle)
    assert kind is Compatibility.INCOMPATIBLE
    assert "testlib::scaled_mm.default" in lines
    assert "--custom-operators testlib" in lines
    with trusting([NAMESPACE]):
        assert verdict(bundle) == (Compatibility.EXACT, "")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("os::system.default", "'os' is not trusted"),
        ("testlib::writes.default", "changes its arguments"),
        ("testlib::maybe.default", "returns Optional"),
        ("testlib::window.default", "returns memory of its arguments"),
        ("testlib::no_such.default", "is not registered in this process"),
        ("testlib::__class__.default", "may not run"),
        ("testlib::mode", "may not run"),
        ("aten::from_file.default", "may not run"),
    ],
)
def test_a_forged_bundle_reaches_no_other_operator(data: bytes, model: nn.Module, target: str, said: str) -> None:
    bad = forged(data, target)
    with pytest.raises(IncompatibleArtifact, match=said):
        load(bad, model, strict=True, custom_operators=(NAMESPACE,))
    with pytest.raises(UnsupportedGraph, match=r"may not run"):
        resolve(target)


def test_an_operator_that_computes_something_else_is_found_by_the_comparison(data: bytes, model: nn.Module) -> None:
    with pytest.raises(IncompatibleArtifact, match="outputs differ"):
        load(forged(data, "testlib::offset.default"), model, strict=True, custom_operators=(NAMESPACE,))


@pytest.mark.parametrize("namespace", ["import_module", "load_library", "loaded_libraries", "__class__", "nobody"])
def test_attributes_of_torch_ops_are_no_namespaces(namespace: str) -> None:
    with trusting([namespace]), pytest.raises(UnsupportedGraph, match="is not registered"):
        resolve(f"{namespace}::anything.default")


_SERVER = """
import sys, warnings
import torch
from torch import nn
import autosched
warnings.simplefilter("error", UserWarning)

class Stand(nn.Module):
    # The model's code is there; what registers its operators is imported later, if at all.
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(32, 32) / 32) for _ in range(2))
    def forward(self, x):
        lib = torch.ops.testlib
        left, right = torch.tanh(lib.scaled_mm(x, self.left, 0.5)), torch.sigmoid(lib.scaled_mm(x, self.right, 2.0))
        first, second = lib.halves(left @ right.t())
        return lib.mode(first) - second

model = Stand().eval()
try:
    autosched.load(sys.argv[1], model, strict=True, custom_operators=("testlib",))
except autosched.AutoschedError as error:
    assert "is not registered in this process" in str(error) and "'testlib'" in str(error), error
    print("missing")
import tests.conformance.custom_operators
loaded = autosched.load(sys.argv[1], model, strict=True, custom_operators=("testlib",))
x = torch.randn(8, 32)
with torch.no_grad():
    print(torch.equal(loaded(x), model(x)), loaded.report().verdict, "autosched.capture" in sys.modules)
"""


def test_a_fresh_process_says_which_namespace_is_missing_and_runs_once_it_is_imported(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.autosched"
    path.write_bytes(data)
    done = run_forked(_SERVER, str(path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["missing", "True", "exact", "False"]
