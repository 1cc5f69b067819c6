"""Tuning a model with custom operators end to end on the CPU: measured in processes that import what registers them."""

from __future__ import annotations

import contextvars
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch
from torch import library, nn

import autosched
from autosched import pipeline
from autosched.capture.export import Captured, capture
from autosched.core.custom_operators import trusting
from autosched.core.errors import IncompatibleArtifact, UnsupportedGraph, UsageError
from autosched.core.records import Failure, FailureKind, SoloRecord
from autosched.core.schedule import sequential
from autosched.device.base import Pair
from autosched.device.cpu import CpuDevice
from autosched.device.registrations import Registrations, describe_registrations, register_there
from autosched.export.bundle import make_bundle
from autosched.pipeline import Tuned
from autosched.pipeline.call_times import PausedCalls
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.kernels import bind
from autosched.runtime.verdict import check_bundle
from tests.conformance.bundles import evidence_for
from tests.conformance.caches import own_cache
from tests.conformance.command import run
from tests.conformance.custom_operators import NAMESPACE, Branches

MODULE = "tests.conformance.custom_operators"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Branches().eval()


@pytest.fixture(scope="module")
def tuned(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path_factory.mktemp("cache")))
        x = torch.randn(8, 32)
        return pipeline.tune(
            model, (x,), device="cpu", effort="quick", budget_s=2.0, lowering="rewritten", custom_operators=[NAMESPACE]
        )  # fmt: skip


def test_its_calls_after_a_pause_are_timed_where_it_is_trusted(tuned: Tuned, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.autosched"
    tuned.save(path)
    with trusting([NAMESPACE]):
        found = pipeline.bench_paused(path, model, 0.0, calls=5)
    assert isinstance(found, PausedCalls)
    assert found.calls == 5
    with pytest.raises(IncompatibleArtifact, match="'testlib' is not trusted"):
        pipeline.bench_paused(path, model, 0.0, calls=5)


def test_it_is_tuned_saved_checked_and_loaded(tuned: Tuned, model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.autosched"
    tuned.save(path)
    assert "testlib::scaled_mm" in {operator.kind for operator in tuned.bundle.program.graph.operators}
    said = pipeline.check(path, model)
    assert not said.usable
    assert "'testlib' is not trusted" in said.summary()
    with trusting([NAMESPACE]):
        assert pipeline.check(path, model).usable
    loaded = autosched.load(path, model, strict=True, custom_operators=(NAMESPACE,))
    x = torch.randn(8, 32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


def test_the_command_line_trusts_what_it_is_told_to(tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "model.autosched")
    tuned.save(path)
    assert run("check", path) == 4
    assert "--custom-operators testlib" in capsys.readouterr().out
    assert run("check", path, "--custom-operators", "other, testlib") == 0
    capsys.readouterr()
    assert run("check", path, "--custom-operators", "testlib::mode") == 2
    assert "'testlib::mode'" in capsys.readouterr().err
    assert run("tune", "autosched:toy", "--device", "cpu", "--custom-operators", "a b") == 2


def test_without_trust_it_is_refused_before_anything_is_measured(model: nn.Module) -> None:
    with pytest.raises(UnsupportedGraph, match=r"testlib::scaled_mm.*custom_operators=\('testlib',\)"):
        pipeline.tune(model, (torch.randn(8, 32),), device="cpu", effort="quick", budget_s=1.0, lowering="aten")


def test_they_are_timed_alone_and_beside_each_other(model: nn.Module) -> None:
    with trusting([NAMESPACE]):
        captured = capture(model, (torch.randn(8, 32),))
        session = CpuDevice().open(captured.program, captured.constants, timeout_s=120.0)
        try:
            first, second = (item.index for item in captured.program.graph.operators if item.kind == "testlib::scaled_mm")
            solo = session.solo([1], repeats=3)
            pairs = session.pairs([Pair(first, second), Pair(second, first)], repeats=3)
        finally:
            session.close()
    assert all(isinstance(solo[index][0], SoloRecord) for index in (first, second))
    # A machine that others use leaves a pair out by its word, never by its operators'.
    assert all(not isinstance(pair, Failure) or pair.kind is FailureKind.UNSTABLE for pair in pairs)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_inductors_launches_hold_them_as_calls_of_their_own(model: nn.Module) -> None:
    from autosched.pipeline.inductor_capture import capture_inductor

    x = torch.randn(8, 32)
    with trusting([NAMESPACE]):
        captured = capture_inductor(model, (x,))
        assert isinstance(captured, Captured), captured
        made = bind(captured.program, captured.constants).run([x])
    names = [operator.name.partition(".")[0] for operator in captured.program.graph.operators]
    assert [names.count(name) for name in ("scaled_mm", "halves", "mode")] == [2, 1, 1]
    with torch.no_grad():
        torch.testing.assert_close(made[0], model(x))
    # Its launches are named after no namespace; what they are compiled from is.
    device, graph = cpu_device_key(), captured.program.graph
    bundle = make_bundle(captured.program, sequential(graph), evidence_for(len(graph), device, graph.hash), {}, device, software_key())
    lines = check_bundle(bundle, device, software_key()).lines
    assert any("testlib::scaled_mm.default" in line and "'testlib' is not trusted" in line for line in lines)
    with pytest.raises(UnsupportedGraph, match="may not run"):
        bind(captured.program, captured.constants)


@pytest.mark.parametrize("name", ["compile", "torch.compile"])
def test_compile_takes_them_by_its_options(name: str, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path))
    # Whether the default schedule is faster is the machine's affair.
    monkeypatch.setattr("autosched.compiled._faster", lambda *call: True)
    x = torch.randn(8, 32)
    with torch.no_grad():
        if name == "compile":
            compiled = autosched.compile(model, (x,), strict=True, custom_operators=(NAMESPACE,))
        else:
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="autosched", options={"strict": True, "custom_operators": [NAMESPACE]})
        assert torch.equal(compiled(x), model(x))
        with pytest.raises(UnsupportedGraph, match="custom operator"):
            autosched.compile(model, (x,), strict=True)


def test_what_another_process_imports_is_found_and_nothing_where_nobody_is_trusted() -> None:
    assert describe_registrations() == ""
    with trusting([NAMESPACE, "nobody"]):
        found = msgspec.json.decode(describe_registrations(), type=Registrations)
    assert found.namespaces == ("nobody", NAMESPACE)
    assert found.modules == (MODULE,)


def test_a_folder_whose_name_is_no_utf_8_is_searched_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with trusting([NAMESPACE]):
        monkeypatch.setattr(sys, "path", [*sys.path, "/models/\udcff"])
        told = describe_registrations()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "path", list(sys.path))
    contextvars.copy_context().run(register_there, told)
    assert sys.path[-1] == "/models/\udcff"


def test_an_operator_that_launches_triton_is_that_of_the_module_with_its_function() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.__module__ = MODULE
    library.triton_op("tritonlib::doubled", doubled, mutates_args={})
    with trusting(["tritonlib"]):
        found = msgspec.json.decode(describe_registrations(), type=Registrations)
    assert found.modules == (MODULE,)


def test_operators_that_leave_no_trace_are_looked_for_in_the_outermost_module_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # As optimum.quanto registers its own.
    lib = library.Library("autosched_untraced", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    for name in ("first.autosched_untraced.autosched_untraced", "second.autosched_untraced", "autosched_untraced.first"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with trusting(("autosched_untraced",)):
        found = msgspec.json.decode(describe_registrations(), type=Registrations)
    assert found.modules == ("second.autosched_untraced",)


def test_operators_that_nobody_is_seen_to_register_are_refused_with_what_to_do() -> None:
    hidden = library.Library("hiddenlib", "FRAGMENT")
    hidden.define("one(Tensor x) -> Tensor")
    hidden.impl("one", torch.empty_like, "Meta")
    with trusting(["hiddenlib"]), pytest.raises(UsageError, match=r"'hiddenlib'.*register_fake"):
        describe_registrations()


_MAIN = """
import torch
from torch import library
import autosched

@library.custom_op("mainlib::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)

class Twice(torch.nn.Module):
    def forward(self, x):
        return twice(x)

try:
    autosched.tune(Twice().eval(), (torch.randn(3),), device="cpu", budget_s=1.0, lowering="aten", custom_operators=("mainlib",))
except autosched.AutoschedError as error:
    print(type(error).__name__, error)
"""


def test_operators_of_the_main_program_are_refused_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_MAIN)
    root = Path(__file__).resolve().parents[2]
    code = f"import runpy, sys; sys.path.append({str(root)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(UsageError.__name__)
    assert "'mainlib' are registered by the main program" in done.stdout
