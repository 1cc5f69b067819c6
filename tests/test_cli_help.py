"""What a newcomer reads first: help, version, lists, and messages for names that are almost right."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest

import autosched
import autosched.cli.tuning
from autosched.device.contamination import LoadMark
from tests.conformance.command import run


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.split() == ["autosched", autosched.__version__]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_says_how_to_begin_and_what_exit_codes_mean(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(flag) == 0
    printed = capsys.readouterr().out
    assert "autosched doctor" in printed
    for code in ("2 a mistake", "3 the machine", "4 an incompatible", "5 a missing", "130 interrupted"):
        assert code in " ".join(printed.split())


def test_every_option_of_every_command_is_explained() -> None:
    from typer.main import get_command

    from autosched.cli import app

    group = get_command(app)
    commands = dict(group.commands)  # type: ignore[attr-defined]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        commands |= {f"{name} {inner}": item for inner, item in getattr(command, "commands", {}).items()}
    assert {"tune", "train", "doctor", "cache", "cache clear"} <= commands.keys()
    silent = [(name, item.name) for name, command in commands.items() for item in command.params if not getattr(item, "help", None)]
    assert silent == []
    assert all(command.help for command in commands.values())


@pytest.mark.parametrize("name", ["tune", "compare"])
def test_what_is_left_out_means_the_same_in_python(name: str) -> None:
    """But for the device: a job in Python that was meant for a GPU is to fail where there is none."""
    command, function = (inspect.signature(getattr(room, name)).parameters for room in (autosched.cli.tuning, autosched))
    for option in command.keys() & function.keys() - {"model", "device"}:
        assert (command[option].default or None) == (function[option].default or None), option
    assert (
        inspect.signature(autosched.tune_shapes).parameters["device"].default
        == inspect.signature(autosched.tune).parameters["device"].default
    )


def test_the_seconds_of_each_effort_are_those_of_the_presets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from autosched.pipeline.budget import budget_for

    monkeypatch.setenv("COLUMNS", "300")
    for command in ("tune", "compare"):
        assert run(command, "--help") == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if re.match(r"\W*--effort ", line))
        said = {name: float(seconds) for name, seconds in re.findall(r"(quick|balanced|full) \((\d+) s", line)}
        assert said == {effort: budget_for(effort).total_s for effort in ("quick", "balanced", "full")}


@pytest.mark.parametrize("command", ["tune", "compare", "collect", "train", "evaluate", "bench", "check", "trace", "report", "cache clear"])
def test_help_cuts_no_word_off_in_a_terminal_of_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*command.split(), "--help") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "\u2026" in line] == []


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--effort", "extreme"), "quick, balanced, full"),
        (("--budget", "soon"), "budget"),
        (("--lowering", "fine"), "rewritten"),
        (("--device", "tpu"), "cpu, cuda"),
    ],
)
@pytest.mark.parametrize("command", ["tune", "compare"])
def test_an_option_is_looked_at_before_the_model_is_built(
    command: str, option: tuple[str, str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("the model was built first")

    monkeypatch.setattr("autosched.zoo.load", build)
    assert run(command, "torchvision:googlenet", *(("--device", "cpu") if option[0] != "--device" else ()), *option) == 2
    assert words in capsys.readouterr().err


def test_models_says_how_to_name_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    printed = capsys.readouterr().out
    assert "module:function" in printed
    assert ".pt2" in printed


def test_a_narrow_terminal_cuts_no_name_of_a_model_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    monkeypatch.setattr("autosched.cli.machine.results_console", lambda: Console(width=40))
    assert run("models") == 0
    assert "\u2026" not in capsys.readouterr().out


def test_compare_says_how_strategies_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run("compare", "--help") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "--strategies " in line and "default" in line)
    assert "sequential,estf,beam" in line


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("net.py:make", "did you mean net:make"),
        ("net.py", "net:make"),
        ("net", "as a module it lacks a function"),
        ("weights.pth", "torch.export.save"),
        ("nett:make", "no module 'nett'"),
        ("googlenet", "did you mean torchvision:googlenet"),
        ("", "unknown model ''"),
        (":make", "unknown model ':make'"),
    ],
)
def test_a_model_named_almost_right_is_answered_with_the_right_form(model: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("net.py").write_text("def make(): ...")
    Path("weights.pth").touch()
    assert run("tune", model) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("device", "words"), [("gpu", "auto, or replay:DIR"), ("cuda:one", "cuda:N")])
def test_an_unknown_device_is_answered_with_the_known_ones(device: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", "autosched:toy", "--device", device) == 2
    assert words in capsys.readouterr().err


def test_doctor_looks_at_what_decides_whether_tuning_will_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("autosched.doctor._taken_now", lambda cores: 0.0)
    assert run("doctor", "--json") == 0
    findings = {item["what"]: item for item in json.loads(capsys.readouterr().out)["findings"]}
    assert {"torch", "cpu lanes", "cuda", "C++ compiler", "cache", "cost model, cpu"} <= findings.keys()
    assert all(item["advice"] for item in findings.values() if item["state"] != "ok")
    assert re.match(r"\d+ cores?", findings["cpu lanes"]["detail"])


@pytest.mark.parametrize("place", ["measurements", "schedules", "loops", "runs", "costmodel", "regions", "studies", "native"])
def test_doctor_looks_into_the_cache_folder(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job under sudo has made one of its folders, say: the one around it is this user's all the same."""
    from autosched import doctor

    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path))
    (tmp_path / place).mkdir()
    assert doctor._cache().state is doctor.State.OK
    if place in ("regions", "native"):
        (tmp_path / place).chmod(0o777)
        words = f"{tmp_path / place} belongs to another user, or others may write there"
    else:
        (tmp_path / place).rmdir()
        (tmp_path / place).write_text("no folder")
        words = f"{tmp_path / place} is no folder that can be written"
    found = doctor._cache()
    assert found.state is doctor.State.PROBLEM
    assert words in found.detail
    assert "AUTOSCHED_CACHE" in found.advice


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize(
    ("states", "code"),
    [(("ok",), 0), (("ok", "missing"), 0), (("busy", "ok"), 3), (("problem", "missing"), 5), (("busy", "problem", "ok"), 5)],
)
def test_doctor_tells_a_script_what_it_found(
    states: tuple[str, ...], code: int, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autosched import doctor

    found = [doctor.Finding(f"part {place}", doctor.State(state), "", "") for place, state in enumerate(states)]
    monkeypatch.setattr("autosched.doctor.examine", lambda: found)
    assert run("doctor", *options) == code
    printed = capsys.readouterr()
    assert all(f"part {place}" in printed.out for place in range(len(states)))
    assert not printed.err


def test_doctor_takes_the_releases_of_pytorch_that_pip_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from autosched import doctor

    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (wanted,) = (item for item in settings["project"]["dependencies"] if item.startswith("torch>"))
    bounds = [tuple(map(int, bound.split("."))) for bound in re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", wanted).groups()]
    assert bounds == list(doctor._TORCH)
    (major, first), (_, end) = bounds
    for minor, taken in ((first - 1, False), (first, True), (end - 1, True), (end, False)):
        monkeypatch.setattr(torch, "__version__", f"{major}.{minor}.1+cpu")
        found = doctor._torch()
        assert (found.state is doctor.State.OK) is taken
        assert ("install a version from" in found.advice) is not taken


@pytest.mark.parametrize("told", [True, False], ids=["present", "last minute"])
@pytest.mark.parametrize(("taken", "problem"), [(0.0, False), (0.05, False), (0.6, True)])
def test_doctor_says_that_a_busy_machine_measures_nothing(told: bool, taken: float, problem: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched import doctor
    from autosched.device import contamination

    marks = iter([LoadMark(0.0, 0.0, 0.0, 4), LoadMark(1.0, 4.0 * taken, 0.0, 4)])
    # What the last minute held counts only where the present cannot be read: a job of ours may just have ended.
    load = 64.0 if told and not problem else 4.0 * taken
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(contamination, "mark_load", lambda: next(marks) if told else LoadMark(0.0, -1.0, 0.0, 0))
    monkeypatch.setattr("autosched.doctor._WATCHED_S", 0.0)
    (lanes,) = (finding for finding in doctor.examine() if finding.what == "cpu lanes")
    assert lanes.state is (doctor.State.BUSY if problem else doctor.State.OK)
    assert ("60 %" in lanes.detail) == problem


@pytest.mark.parametrize(
    ("installed", "named", "detail"),
    [("g++", None, ""), ("clang++", None, "there is no g++"), ("clang++", "clang++", ""), ("g++", "clang++", "there is no clang++")],
)
def test_doctor_looks_for_the_compiler_that_pytorch_would_take(
    installed: str, named: str | None, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autosched import doctor

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if named:
        monkeypatch.setenv("CXX", named)
    program = tmp_path / installed
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = doctor._compiler()
    assert (found.state, found.detail) == ((doctor.State.MISSING, detail) if detail else (doctor.State.OK, str(program)))
    assert ("CXX" in found.advice) == bool(detail)


def test_a_missing_file_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "missing.autosched") == 2
    assert capsys.readouterr().err.count("missing.autosched") == 1
