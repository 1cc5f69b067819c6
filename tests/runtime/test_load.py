"""Loading: the schedule runs where it fits, and on any doubt the model runs as it came, with one warning that says why."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UsageError
from autosched.core.graph import Operator, OpGraph
from autosched.core.program import Program
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime import binding, runners
from autosched.runtime.binding import Binder
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.load import FallbackWarning, LoadedModel, load
from autosched.runtime.numerics import compare
from autosched.runtime.prepared import Prepared
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import evidence_for, two_branches_bundle
from tests.conformance.graphs import Recorder, TwoBranches, two_branches_inputs, two_branches_program


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


def assert_like_the_model(loaded: LoadedModel, model: torch.nn.Module, seed: int = 3) -> None:
    args, kwargs = two_branches_inputs(seed)
    with torch.no_grad():
        result, expected = loaded(*args, **kwargs), model(*args, **kwargs)
    assert result.keys() == expected.keys()
    assert result["name"] == "two"
    assert isinstance(result["parts"], tuple)
    assert compare(output_tensors(result), output_tensors(expected)).within_tolerance


def rebuilt(bundle: Bundle, **changes: Any) -> bytes:
    """The bundle with another program, keys made to match: what a forger, or a bug in capture, would write."""
    program: Program = dataclasses.replace(bundle.program, **changes)
    schedule = dataclasses.replace(bundle.schedule, graph_hash=program.graph.hash)
    evidence = dataclasses.replace(bundle.evidence)
    return encode_bundle(make_bundle(program, schedule, evidence, bundle.literals, bundle.key.device, bundle.key.software))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_the_schedule_computes_what_the_model_computes(model: TwoBranches, lanes: int, tmp_path: Path) -> None:
    path = tmp_path / "model.autosched"
    path.write_bytes(encode_bundle(two_branches_bundle(model, lanes=lanes)))
    loaded = load(path, model, strict=True)
    for seed in range(5):
        assert_like_the_model(loaded, model, seed)
    report = loaded.report()
    assert report.scheduled
    assert report.calls == 5
    assert report.verdict == "exact"
    assert report.lanes == lanes
    assert report.schedule == "beam"
    assert report.stepped_aside == ()
    operators = len(two_branches_program(model)[0].graph)
    assert repr(loaded) == f"<autosched: TwoBranches on schedule 'beam', {operators} operators on {lanes} lanes>"
    assert report.padding == "off"
    assert report.reason == ""


_DOUBTS: dict[str, tuple[Callable[[TwoBranches, bytes], tuple[bytes, torch.nn.Module]], type[Exception], str]] = {
    "damaged": (lambda model, data: (data[:-50], model), ArtifactCorrupt, "not a complete schedule file"),
    "another model": (lambda model, data: (data, torch.nn.Linear(3, 3).eval()), IncompatibleArtifact, "left.weight"),
    "training": (lambda model, data: (data, model.train()), IncompatibleArtifact, "model.eval"),
    "another dtype": (lambda model, data: (data, model.half()), IncompatibleArtifact, "float32 there, .* float16 here"),
    "inference tensors": (lambda model, data: (data, _made_in_inference_mode()), IncompatibleArtifact, "inference_mode"),
}


def _made_in_inference_mode() -> TwoBranches:
    with torch.inference_mode():
        return TwoBranches().eval()


def test_of_a_model_made_in_inference_mode_the_advice_is_what_helps(model: TwoBranches) -> None:
    data, made = encode_bundle(two_branches_bundle(model)), _made_in_inference_mode()
    with pytest.raises(IncompatibleArtifact) as raised:
        load(data, made, strict=True)
    assert "outside of it" in str(raised.value)
    assert "frozen=True" in str(raised.value)
    assert "Tune again" not in str(raised.value)
    assert "UnwatchableModel" not in str(raised.value)
    assert_like_the_model(load(data, made, strict=True, frozen=True), made)


@pytest.mark.parametrize("name", _DOUBTS)
def test_on_any_doubt_the_model_runs_as_it_came(model: TwoBranches, name: str) -> None:
    change, error, words = _DOUBTS[name]
    data, changed = change(model, encode_bundle(two_branches_bundle(model)))
    with pytest.raises(error, match=words):
        load(data, changed, strict=True)
    with pytest.warns(FallbackWarning, match=words) as caught:
        loaded = load(data, changed)
    assert len(caught) == 1
    report = loaded.report()
    assert not report.scheduled
    assert report.reason
    assert "without a schedule" in repr(loaded)
    # There is nothing to compare again.
    loaded.refresh()
    assert loaded.report() == report
    if isinstance(changed, TwoBranches) and name not in ("another dtype",):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert_like_the_model(loaded, changed)
        ((reason, calls),) = loaded.report().stepped_aside
        assert reason == report.reason
        assert calls > 0


def test_what_only_the_caller_can_mend_is_raised_in_any_case(model: TwoBranches, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "absent.autosched", model)
    for source in (None, 3, bytearray(b"PK")):
        with pytest.raises(UsageError, match="expected a path or bytes"):
            load(source, model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected the torch\.nn\.Module"):
        load(b"", lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "another processor"}, "another processor there"),
        ({"kind": "cuda"}, "tuned on cuda, but the model is on cpu"),
        ({"kind": "abacus"}, "abacus"),  # a kind that nobody knows
    ],
)
def test_a_device_that_differs_is_incompatible(changed: dict[str, str], words: str, model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    device = dataclasses.replace(bundle.key.device, **changed)  # type: ignore[arg-type]
    other = make_bundle(bundle.program, bundle.schedule, bundle.evidence, bundle.literals, device, bundle.key.software, numerics=())
    with pytest.raises(IncompatibleArtifact, match=words):
        load(encode_bundle(other), model, strict=True)


def test_another_version_of_torch_is_verified_and_used(model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    software = dataclasses.replace(bundle.key.software, versions=(*bundle.key.software.versions, ("zlib", "9")))
    other = make_bundle(bundle.program, bundle.schedule, bundle.evidence, bundle.literals, bundle.key.device, software)
    loaded = load(encode_bundle(other), model, strict=True)
    assert loaded.report().verdict == "degraded"
    assert loaded.report().differences == ("software zlib: 9 there, absent here",)
    assert_like_the_model(loaded, model)


def test_a_model_that_computes_something_else_with_equal_parameters_is_refused(model: TwoBranches) -> None:
    class Twin(TwoBranches):
        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
            result = super().forward(x, more=more)
            return {**result, "sum": result["sum"] * 1.5}

    data = encode_bundle(two_branches_bundle(model))
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        load(data, Twin().eval(), strict=True)
    with pytest.warns(FallbackWarning, match="outputs differ"):
        loaded = load(data, Twin().eval())
    assert_like_the_model(loaded, Twin().eval())


def test_a_model_with_other_containers_is_refused(model: TwoBranches) -> None:
    class Renamed(TwoBranches):
        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
            return {**super().forward(x, more=more), "name": "three"}

    with pytest.raises(IncompatibleArtifact, match="other containers or other plain values"):
        load(encode_bundle(two_branches_bundle(model)), Renamed().eval(), strict=True)


def test_a_graph_that_hides_an_in_place_change_is_refused(model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    graph = bundle.program.graph
    operators = [dataclasses.replace(operator, mutates=()) for operator in graph.operators]
    with pytest.raises(IncompatibleArtifact, match="in place and the graph does not say so"):
        load(rebuilt(bundle, graph=OpGraph(tuple(operators), graph.values, graph.inputs, graph.outputs)), model, strict=True)


def test_a_graph_that_hides_a_view_is_refused(model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    graph = bundle.program.graph
    values = tuple(dataclasses.replace(value, storage=value.index) for value in graph.values)
    with pytest.raises(IncompatibleArtifact, match="does not say so"):
        load(rebuilt(bundle, graph=OpGraph(graph.operators, values, graph.inputs, graph.outputs)), model, strict=True)


def test_a_schedule_that_changes_its_input_in_place_is_refused() -> None:
    recorder = Recorder()
    x = recorder.input(torch.randn(3))
    program = recorder.build([recorder.run("aten::relu_.default", x)], result=None)
    bundle = two_branches_bundle(TwoBranches().eval())
    evidence = evidence_for(1, bundle.key.device, program.graph.hash)
    data = encode_bundle(make_bundle(program, sequential(program.graph), evidence, {}, bundle.key.device, bundle.key.software))

    class InPlace(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.relu_(x),)

    with pytest.raises(IncompatibleArtifact, match="in place"):
        load(data, InPlace().eval(), strict=True)


@pytest.mark.parametrize("bound", ["", "OMP_PROC_BIND=true"])
def test_more_threads_than_cores_are_never_asked_for(model: TwoBranches, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """The thread library would end the process."""
    bundle = two_branches_bundle(model)
    width = (1, 3, *bundle.schedule.width[2:])
    data = encode_bundle(dataclasses.replace(bundle, schedule=dataclasses.replace(bundle.schedule, width=width)))
    monkeypatch.setattr(binding, "openmp_binding", lambda: bound)
    monkeypatch.setattr(binding, "usable_cores", lambda: 3)
    monkeypatch.setattr(runners, "cores_of_thread", lambda: 3)
    monkeypatch.setattr(runners, "_cores", runners._Cores())
    assert_like_the_model(load(data, model, strict=True), model)
    monkeypatch.setattr(binding, "usable_cores", lambda: 2)
    why = f", for OpenMP binds threads to cores ({bound}): unset that" if bound else ""
    with pytest.raises(
        IncompatibleArtifact, match=re.escape(f"an operator asks for 3 threads there, 2 cores are usable here{why}")
    ) as raised:
        load(data, model, strict=True)
    assert ("OpenMP" in str(raised.value)) == bool(bound)


def test_an_operator_outside_the_allow_list_never_runs(model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    text = msgspec.json.encode(bundle.program.graph.operators).replace(b"aten::mm.default", b"aten::from_file.default")
    operators = msgspec.json.decode(text, type=tuple[Operator, ...])
    graph = dataclasses.replace(bundle.program.graph, operators=operators)
    with pytest.warns(FallbackWarning, match="may not run"):
        loaded = load(rebuilt(bundle, graph=graph), model)
    assert_like_the_model(loaded, model)


_LEAN = """
import sys
before = set(sys.modules)
import torch
with_torch = set(sys.modules)
from autosched.runtime.load import load
from tests.conformance.graphs import TwoBranches, two_branches_inputs
model = TwoBranches().eval()
loaded = load(sys.argv[1], model, strict=True)
args, kwargs = two_branches_inputs()
loaded(*args, **kwargs)
heavy = {"xgboost", "optuna", "pandas", "sklearn", "numba", "pyarrow", "scipy", "networkx", "autosched.search", "autosched.costmodel",
         "autosched.datasets", "autosched.device", "autosched.capture", "torch._dynamo", "torch._inductor"}
bad = sorted(heavy & (set(sys.modules) - with_torch))
assert not bad, bad
assert not torch.cuda.is_initialized()
print("lean", loaded.report().scheduled)
"""


def test_loading_imports_no_tuning_stack_and_touches_no_cuda(model: TwoBranches, tmp_path: Path) -> None:
    path = tmp_path / "model.autosched"
    path.write_bytes(encode_bundle(two_branches_bundle(model)))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(root)!r})\n{_LEAN}", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "lean True"


def test_programs_are_only_read_never_changed_by_a_load(model: TwoBranches) -> None:
    bundle = two_branches_bundle(model)
    data = encode_bundle(bundle)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load(data, model, strict=True)
    assert encode_bundle(bundle) == data
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert two_branches_program(model)[0] == bundle.program


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("described", [{"mean": 0.0, "std": 0.0}, {"mean": 0.0, "std": 0.0, "high": 1}, {"mean": 1e6, "std": 1.0}])
def test_inputs_that_would_hide_another_computation_are_not_the_only_ones_tried(
    model: TwoBranches, described: dict[str, Any], alone: bool
) -> None:
    class Saturated(TwoBranches):
        """As the schedule wherever ``x`` is zero, or far from it; something else in between."""

        def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
            result = super().forward(x, more=more)
            ordinary = ((x != 0) & (x.abs() < 1e3)).any()
            return {**result, "sum": result["sum"] + ordinary.float()}

    bundle = two_branches_bundle(model)
    x, *others = bundle.program.inputs
    hidden = [dataclasses.replace(item, **described) for item in (x, *others)]
    inputs = (hidden[0], *(others if alone else hidden[1:]))
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        load(rebuilt(bundle, inputs=inputs), Saturated().eval(), strict=True)


def test_a_model_on_two_devices_that_cannot_be_bound_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoBranches().eval()
    data = encode_bundle(two_branches_bundle(model))

    def refused(self: Binder, bundle: Bundle) -> Prepared:
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(Binder, "prepare", refused)
    with pytest.raises(IncompatibleArtifact, match="or tune again here"):
        load(data, model, strict=True)
    model.register_buffer("elsewhere", torch.zeros(1, device="meta"))
    with pytest.raises(IncompatibleArtifact, match="weights are on cpu and meta; a schedule runs on one device\nMove the"):
        load(data, model, strict=True)
