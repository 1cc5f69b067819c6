"""The command line: one clear message and the documented exit code for every mistake; JSON and nothing else with --json."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autosched.core.errors import UsageError
from autosched.device.compiled_baseline import from_zoo
from autosched.export.bundle import encode_bundle
from autosched.pipeline.result import BUILT_BATCH
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.command import run
from tests.conformance.graphs import TwoBranches


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tune", "torchvision:googlenett", "--device", "cpu"], 2, "googlenet"),
        (["tune", "nonsense", "--device", "cpu"], 2, "nonsense"),
        (["tune", "no.such.module:function", "--device", "cpu"], 2, "no.such.module"),
        (["tune", "missing.pt2", "--device", "cpu"], 2, "missing.pt2"),
        (["tune", "autosched:toy", "--device", "cpu", "--effort", "extreme"], 2, "quick, balanced, full"),
        (["tune", "autosched:toy", "--device", "cpu", "--budget", "soon"], 2, "soon"),
        (["tune", "autosched:toy", "--device", "cpu", "--budget", "-5s"], 2, "-5s"),
        (["tune", "autosched:toyy", "--device", "cpu", "--budget", "1e9h"], 2, "at most 30 days"),
        (["compare", "autosched:toyy", "--device", "cpu", "--strategies", " , "], 2, "expected a list of names"),
        (["tune", "autosched:toy", "--device", "tpu"], 2, "tpu"),
        (["tune", "autosched:toy", "-o", "no/such/folder/x.autosched"], 2, "no/such/folder"),
        (["compare", "autosched:toy", "--device", "cpu", "--strategies", "bem"], 2, "beam"),
        (["check", "missing.autosched"], 2, "missing.autosched"),
        (["bench", "missing.autosched"], 2, "missing.autosched"),
        (["bench", "missing.autosched", "--device", "replay:runs"], 2, "no schedule runs on recorded runs"),
        (["trace", "missing.autosched", "-o", "no/such/folder/t.json"], 2, "no/such/folder"),
        (["collect", "torchvision:googlenett", "--budget", "soon"], 2, "soon"),
        (["collect", "torchvision:googlenett", "--device", "tpu"], 2, "tpu"),
        (["tune", "autosched:toy", "--device", "cpu", "--seed", "-1"], 2, "the seed is -1"),
        (["collect", "autosched:toy", "--seed", str(2**80)], 2, "from 0 to"),
        (["frobnicate"], 2, "frobnicate"),
        (["cache", "frobnicate"], 2, "frobnicate"),
        (["tune", "autosched:toy", "--batch", "0"], 2, "--batch"),
        (["tune", "no.such.file", "--device", "cpu"], 2, "module:function"),
        (["tune", "a/folder/models.py:make", "--device", "cpu"], 2, "a.folder.models:make"),
    ],
)
def test_a_mistake_ends_in_one_message_and_its_exit_code(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert "Traceback" not in printed.err


def _refuse(*arguments: object, **options: object) -> None:
    raise UsageError("not tuned")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", "autosched:toy", "--device", "cpu", "--budget", "4s"], "not in the budget of 4 s and can take minutes more; --effort"),
        (["tune", "autosched:toy", "--device", "cpu", "--effort", "full"], "not in the budget of 1200 s"),
        (["compare", "autosched:toy", "--device", "cpu"], "not in the budget of 60 s and can take minutes more; --no-compiled"),
        (["tune", "autosched:toy", "--device", "cpu", "--effort", "quick"], ""),
        (["compare", "autosched:toy", "--device", "cpu", "--no-compiled"], ""),
    ],
)
def test_what_takes_minutes_outside_of_the_budget_is_said_before_the_job_begins(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tune", "compare"):
        monkeypatch.setattr(f"autosched.pipeline.{name}", _refuse)
    run(*arguments)
    said = capsys.readouterr().err
    assert "not tuned" in said
    assert words in said
    assert ("torch.compile is measured, too" in said) == bool(words)


@pytest.mark.parametrize("arguments", [["tune"], ["tune", "--batch", "1,2"], ["compare"]])
def test_a_mistake_is_not_told_below_what_the_job_would_have_taken(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, "torchvision:googlenett", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert "torchvision:googlenet" in said
    assert "torch.compile" not in said


@pytest.mark.parametrize("command", ["tune", "compare"])
def test_a_cost_model_that_is_not_there_is_said_before_anything_is_captured(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "autosched:toy", "--device", "cpu", "--cost-model", "no/such/model") == 2
    said = capsys.readouterr().err
    assert "no/such/model" in said
    assert "capture" not in said


def test_the_compiled_baseline_of_every_batch_size_is_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def stop(*args: object, sources: list[object], **options: object) -> None:
        seen.extend(sources)
        raise UsageError("seen")

    monkeypatch.setattr("autosched.pipeline.shapes.tune_shapes", stop)
    assert run("tune", "autosched:toy", "--device", "cpu", "--batch", "2,1") == 2
    # Weights that a function draws after its inputs differ from one batch size to the next.
    assert seen == [from_zoo("autosched:toy", batch=2)] * 2


def test_an_error_is_json_when_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", "nonsense", "--json") == 2
    said = json.loads(capsys.readouterr().out)
    assert said["error"]["type"] == "UnknownModel"
    assert said["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["tune"], "Missing argument 'MODEL'"), (["bench", "x", "--rounds", "two"], "'--rounds'"), (["models", "--jsn"], "--json")],
)
def test_the_json_of_a_mistake_in_the_command_says_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--json") == 2
    said = json.loads(capsys.readouterr().out)["error"]["message"]
    assert words in said


def test_cuda_without_a_gpu_says_what_is_missing_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run("tune", "autosched:toy", "--device", "cuda") == 5
    message = capsys.readouterr().err
    assert "CUDA" in message
    assert "--device cpu" in message or "install" in message


def test_truncated_and_foreign_bundles_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = encode_bundle(two_branches_bundle(TwoBranches()))
    truncated = tmp_path / "cut.autosched"
    truncated.write_bytes(whole[: len(whole) // 2])
    assert run("check", str(truncated)) == 4
    assert "cut.autosched" in capsys.readouterr().err
    text = tmp_path / "text.autosched"
    text.write_text("not a bundle")
    assert run("check", str(text), "--json") == 4
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ArtifactCorrupt"


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "two.autosched", "-o", "two.autosched"],
        ["report", "two.autosched", "-o", "same.autosched"],
        ["trace", "two.autosched", "autosched:toy", "-o", "./two.autosched"],
        ["trace", "two.autosched", "saved.pt2", "-o", "saved.pt2"],
        ["tune", "saved.pt2", "--device", "cpu", "-o", "saved.pt2"],
    ],
    ids=" ".join,
)
def test_no_result_takes_the_place_of_what_it_is_made_from(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = encode_bundle(two_branches_bundle(TwoBranches()))
    for name in ("two.autosched", "saved.pt2"):
        Path(name).write_bytes(whole)
    Path("same.autosched").symlink_to("two.autosched")
    assert run(*arguments) == 2
    assert "would be lost" in capsys.readouterr().err
    assert all(Path(name).read_bytes() == whole for name in ("two.autosched", "saved.pt2"))


def test_check_says_exact_here_and_incompatible_for_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.autosched"
    path.write_bytes(encode_bundle(two_branches_bundle(TwoBranches())))
    assert run("check", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "exact"
    assert run("check", str(path), "autosched:toy") == 4
    assert "left.weight" in capsys.readouterr().out


_USERS_CODE = """
from pathlib import Path
Path("was_imported").touch()
from tests.conformance.graphs import TwoBranches
def need(batch):
    Path("batch").write_text(str(batch))
    return TwoBranches(), ()
def plain():
    Path("batch").write_text("none")
    return TwoBranches(), ()
"""


def _tuned_for(model: str, path: Path, **environment: str) -> str:
    bundle = two_branches_bundle(TwoBranches())
    report = dataclasses.replace(bundle.evidence.report, model=model)
    evidence = dataclasses.replace(bundle.evidence, report=report, environment=tuple(environment.items()))
    path.write_bytes(encode_bundle(dataclasses.replace(bundle, evidence=evidence)))
    return str(path)


@pytest.fixture
def users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_code.py").write_text(_USERS_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("users_code", None)


@pytest.mark.parametrize("command", ["bench", "trace"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("users_code:need", "autosched {} 'a file.autosched' users_code:need\n"),
        ("saved.pt2", "autosched {} 'a file.autosched' saved.pt2\n"),
        ("Tiny", "autosched {} 'a file.autosched' MODEL, with a module:function"),
        ("os:system('ls')", "autosched {} 'a file.autosched' MODEL, with a module:function"),
    ],
)
def test_a_file_by_itself_has_no_code_imported_and_the_command_that_does_is_said(
    command: str, model: str, words: str, users_code: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tuned_for(model, tmp_path / "a file.autosched")
    assert run(command, "a file.autosched") == 2
    said = capsys.readouterr().err
    assert words.format(command) in said
    assert model in said
    assert not Path("was_imported").exists()


@pytest.mark.parametrize("command", ["bench", "trace", "check"])
@pytest.mark.parametrize(
    ("built", "model", "batch"),
    [("4", "users_code:need", "4"), ("4", "users_code:plain", "none"), ("-4", "users_code:plain", "none")],
)
def test_a_model_is_built_with_the_batch_that_it_was_tuned_with(
    command: str, built: str, model: str, batch: str, users_code: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bench", "trace"):
        monkeypatch.setattr(f"autosched.pipeline.{name}", _refuse)
    tuned_for = "users_code:need" if built == "4" else model
    file = _tuned_for(tuned_for, tmp_path / "two.autosched", **{BUILT_BATCH: built})
    assert run(command, file, model) == (0 if command == "check" else 2)
    assert Path("batch").read_text() == batch


def test_an_exported_program_is_taken_as_it_is_whatever_dtype_was_asked_for_in_tuning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = torch.nn.Linear(4, 4).bfloat16().eval(), torch.randn(2, 4, dtype=torch.bfloat16)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "saved.pt2")
    file = _tuned_for("users_code:plain", tmp_path / "one.autosched", dtype="bfloat16")
    assert run("check", file, str(tmp_path / "saved.pt2")) == 4
    assert "absent here" in capsys.readouterr().out


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else uses the cores, and there are two of them."""
    monkeypatch.setattr("autosched.runtime.cores.usable_cores", lambda: 2)
    monkeypatch.setattr("autosched.device.host.physical_cores", lambda: 2)
    monkeypatch.setattr("autosched.doctor._taken_now", lambda cores: 0.0)


@pytest.mark.parametrize("command", ["models", "doctor"])
def test_lists_come_as_tables_and_as_json(command: str, quiet_machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 0
    assert capsys.readouterr().out.strip()
    assert run(command, "--json") == 0
    assert json.loads(capsys.readouterr().out)


def test_doctor_goes_on_where_one_look_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> float:
        raise KeyError("cpu")

    monkeypatch.setattr("autosched.device.contamination.mark_load", broken)
    assert run("doctor", "--json") == 5
    findings = {item["what"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["cpu lanes"]["state"] == "problem"
    assert "KeyError" in findings["cpu lanes"]["detail"]
    assert {"torch", "cuda", "cache", "cost model, cpu", "timm"} <= findings.keys()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    for command in ("tune", "compare", "bench", "check", "trace", "models", "doctor"):
        assert command in printed


@pytest.mark.parametrize(
    ("cores", "quota", "usable", "detail"),
    [
        (8, None, 8, "8 cores"),
        (8, None, 1, "1 core of 8: the process's affinity mask (taskset)"),
        (8, 1.5, 1, "1 core of 8: a control group's CPU quota of 1.5"),
        (8, 0.5, 1, "1 core of 8: a control group's CPU quota of 0.5"),
        (8, 6.0, 2, "2 cores of 8: the process's affinity mask (taskset)"),
        (2, 6.0, 2, "2 cores"),
    ],
)
@pytest.mark.parametrize("binding", ["", "OMP_PROC_BIND=close"])
def test_doctor_says_what_keeps_it_from_the_other_cores(
    cores: int,
    quota: float | None,
    usable: int,
    detail: str,
    binding: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr("autosched.config.openmp_binding", lambda: binding)
    monkeypatch.setattr("autosched.runtime.cpu_quota.quota_cores", lambda: quota)
    monkeypatch.setattr("autosched.runtime.cores.usable_cores", lambda: usable)
    monkeypatch.setattr("autosched.device.host.physical_cores", lambda: usable)
    monkeypatch.setattr("autosched.doctor._taken_now", lambda cores: 0.0)
    assert run("doctor", "--json") == 0  # on one core, too, there is something to be had
    findings = {item["what"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    bound = f"OpenMP binds threads to cores ({binding}); unset that" if binding else "the process's affinity mask (taskset)"
    assert findings["cpu lanes"]["detail"] == detail.replace("the process's affinity mask (taskset)", bound)


@pytest.mark.parametrize(
    ("physical", "state", "detail"),
    [
        (4, "ok", "8 cores; hardware threads of 4 physical cores, which are what schedules use"),
        (1, "missing", "8 cores; hardware threads of 1 physical core, which are what schedules use"),
    ],
)
def test_doctor_tells_hardware_threads_from_cores(
    physical: int, state: str, detail: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two threads of one core were "2 cores", "ok", and tuning found no lane for them."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("autosched.runtime.cores.usable_cores", lambda: 8)
    monkeypatch.setattr("autosched.device.host.physical_cores", lambda: physical)
    monkeypatch.setattr("autosched.doctor._taken_now", lambda cores: 0.0)
    assert run("doctor", "--json") == 0
    [found] = [item for item in json.loads(capsys.readouterr().out)["findings"] if item["what"] == "cpu lanes"]
    assert (found["state"], found["detail"]) == (state, detail)
