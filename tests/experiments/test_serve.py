"""The serving benchmarks run, at their smallest, and their table says what they recorded or that nothing was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autosched.core.errors import UsageError
from autosched.runtime import binding, comparison
from autosched.runtime import load as loading
from autosched.runtime.cores import usable_cores
from experiments.calls import Ended
from experiments.serve import callers, load, memory, paused, state
from experiments.tables_serve import callers_table, generate_table, lanes_table, memory_table, paused_table, serve_table, state_table
from tests.conformance.forked import run_forked

_SERVE = Path(__file__).resolve().parents[2] / "experiments" / "serve"
_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def _forked(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What a script says in a process of its own, told as ``sys.executable, script, arguments``."""
    done = run_forked(_RUN, *command[1:], timeout_s=600)
    assert done.returncode == 0, done.stderr
    return done


def _smoke(script: str, out: Path) -> None:
    _forked([sys.executable, str(_SERVE / script), "--smoke", "--out", str(out)])


def _smoke_here(benchmark: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without a process: of a script that leaves this one as it was."""
    monkeypatch.setattr(sys, "argv", [str(benchmark.__file__), "--smoke", "--out", str(out)])
    assert not benchmark.main()


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    assert serve_table(tmp_path) == "(not recorded yet)"


@pytest.mark.slow
def test_both_benchmarks_record_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _smoke_here(load, tmp_path / "load.json", monkeypatch)
    assert "`tower:30`" in serve_table(tmp_path)
    assert "(not recorded yet)" not in serve_table(tmp_path)  # one of the two is there
    _smoke("overhead.py", tmp_path / "overhead.json")
    text = serve_table(tmp_path)
    assert "(not recorded yet)" not in text
    assert "added by the guard" in text
    assert "not taken" not in text
    (call,) = json.loads((tmp_path / "overhead.json").read_text())["calls"]
    # A call is longer than its run, and the run inside of it is most of this one.
    assert 0.0 < call["outside_us"] < call["loaded_us"]
    recorded = json.loads((tmp_path / "load.json").read_text())
    case = recorded["cases"][0]
    assert recorded["environment"]["cores"] >= 1
    # The stages are parts of the whole, and the whole is all of them.
    assert abs(sum(case["stages_s"].values()) - case["total_s"]["p50"]) < 0.5 * case["total_s"]["p50"]
    assert min(case["stages_s"].values()) >= 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("native")
def test_the_engines_of_lanes_are_recorded_and_equal(tmp_path: Path) -> None:
    assert lanes_table(tmp_path) == "(not recorded yet)"
    _smoke("lanes.py", tmp_path / "lanes.json")
    (case,) = json.loads((tmp_path / "lanes.json").read_text())["cases"]
    assert case["bitwise"]
    assert {row["engine"] for name, row in case["rows"].items() if name.startswith("native")} == {"native"}
    assert {row["engine"] for name, row in case["rows"].items() if name.startswith("python")} == {"python"}
    native = {name for name in case["rows"] if name.startswith("native")}
    assert set(case["after_a_pause"]) == set(case["beside_a_process"]) == set(case["beside_bursts"]) == native
    assert case["one_team"] is (usable_cores() > 1)
    text = lanes_table(tmp_path)
    assert text.count("`tower:30`") == 4
    assert "All outputs of both engines are bitwise equal" in text
    recorded = json.loads((tmp_path / "lanes.json").read_text())
    del recorded["cases"][0]["after_a_pause"]  # as recorded earlier
    (tmp_path / "lanes.json").write_text(json.dumps(recorded))
    assert lanes_table(tmp_path).count("`tower:30`") == 3


@pytest.mark.slow
def test_calls_after_a_pause_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paused_table(tmp_path / "paused.json") == "(not recorded yet)"
    monkeypatch.setenv("AUTOSCHED_COMPILE_MODES", "compiled")  # what else the job would compile is not the question
    _smoke_here(paused, tmp_path / "paused.json", monkeypatch)
    (case,) = json.loads((tmp_path / "paused.json").read_text())["cases"]
    counts = {1, usable_cores()}
    assert set(case["rows"]) == {"tuned", "tuned again"} | {f"{kind}_{count}" for kind in ("eager", "compile") for count in counts}
    assert case["rows"]["tuned"]["over_tuned"] == 1.0
    assert all(0.0 < row["median_us"] <= row["p90_us"] <= row["p99_us"] for row in case["rows"].values())
    assert f"| `{case['model']}` | {case['kept']} |" in paused_table(tmp_path / "paused.json")


@pytest.mark.slow
def test_calls_of_several_threads_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callers_table(tmp_path / "callers.json") == "(not recorded yet)"
    monkeypatch.setattr(callers, "subprocess", SimpleNamespace(run=lambda command, **_: _forked(command)))
    _smoke_here(callers, tmp_path / "callers.json", monkeypatch)
    (case,) = json.loads((tmp_path / "callers.json").read_text())["cases"]
    assert set(case["rows"]) == {"who loaded", "another", "four in turns"}
    assert all(time_us > 0.0 for row in case["rows"].values() for kind in ("loaded", "kept") for time_us in row.get(kind, ()))
    assert f"| `{case['model']}` |" in callers_table(tmp_path / "callers.json")


def test_a_model_whose_time_is_over_has_fewer_repeats_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"total_s": 1.0, "model_s": 0.1, "stages_s": {"import": 0.5, "other": 0.5}, "ready": []})
    ran: list[list[str]] = []

    def run(command: list[str], limit_s: float) -> Ended:
        assert limit_s >= 60.0
        ran.append(command)
        return Ended(0, f"{answer}\n", "", 0.0)

    monkeypatch.setattr(load, "run_to_end", run)
    assert load.measure("tower:3", 4, 1, "cpu", until=0.0)["repeats"] == 1
    assert load.measure("tower:3", 4, 1, "cpu")["repeats"] == 4
    assert len(ran) == 5


def test_what_a_gpu_has_bound_is_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table said that folding and packing weights took no time at all."""
    for owner, names in (
        (loading, ("read_bundles", "check_bundle")),
        (binding, ("ModelWatch", "gather_constants", "bind_for", "make_plan")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(comparison.Comparison, "_verify", comparison.Comparison._verify)
    monkeypatch.setattr(binding, "bind", lambda *given: time.sleep(0.01))
    spent: dict[str, float] = {}
    load._watch_stages(loading, spent)
    binding.bind(None, {}, torch.device("cuda"))
    assert spent["pack"] >= 0.01


def test_a_model_that_fails_says_why_and_keeps_what_others_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {"bad": load.ChildFailed("no such model: bad"), "missing": UsageError("timm is not installed")}

    def measure(name: str, *given: object) -> dict[str, object]:
        if name in failures:
            raise failures[name]
        return {"operators": 3, "total_s": {"p50": 1.0}, "repeats": 2, "model": name}

    monkeypatch.setattr(load, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["load.py", "missing", "good", "bad", "--out", str(tmp_path / "load.json")])
    assert load.main() == 1
    assert [case["model"] for case in json.loads((tmp_path / "load.json").read_text())["cases"]] == ["good"]


@pytest.mark.slow
def test_a_step_with_a_cache_is_recorded_for_every_contestant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "state.json"
    assert state_table(out) == "(not recorded yet)"
    monkeypatch.setattr(state, "_BLOCK_US", 1.0)
    _smoke_here(state, out, monkeypatch)
    cases = json.loads(out.read_text())["cases"]
    names = {row["name"] for case in cases for row in case["rows"]}
    assert {"eager", "eager again", "torch.compile", "rewritten, in place", "rewritten, copied"} <= names
    assert all(row["speedup"] > 0.0 for case in cases for row in case["rows"])
    text = state_table(out)
    assert "eager again (A/A)" in text
    assert all(name in text for name in names - {"eager", "eager again"})


@pytest.mark.slow
def test_a_decoder_has_its_first_rounds_where_its_compilers_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.serve import generate

    said = torch.arange(4)
    waits = [True]
    totals_s: list[str] = []

    def compiled() -> torch.Tensor:
        if waits[0]:
            raise KeyboardInterrupt
        return said

    def contestants(*_: object) -> tuple[dict[str, object], object, dict[str, str]]:
        totals_s.append(os.environ["AUTOSCHED_COMPILE_TOTAL_S"])
        at_once = dict.fromkeys((generate.EAGER, generate.AGAIN, "StaticCache"), lambda: said)
        fast = SimpleNamespace(
            report=lambda: SimpleNamespace(schedule="s", lanes=1, calls=0, shapes=[SimpleNamespace(copied_back_bytes=0)])
        )
        runs = {**at_once, "StaticCache, torch.compile": compiled, generate.OURS: lambda: said}
        return runs, fast, {generate.OURS: "rewritten"}

    monkeypatch.setenv("AUTOSCHED_COMPILE_TOTAL_S", "900")
    monkeypatch.setattr(generate, "contestants", contestants)
    monkeypatch.setattr(generate, "SIZES", generate.SIZES[:1])
    out = tmp_path / "generate.json"
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", "cuda", "--deadline", "308", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        generate.main()
    (case,) = json.loads(out.read_text())["cases"]
    assert [row["name"] for row in case["rows"]] == [generate.EAGER, "StaticCache", generate.OURS]
    assert "| StaticCache |" in generate_table(out)
    # A call that waits for them takes its place.
    waits[0] = False
    assert generate.main() == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert len(case["rows"]) == 5
    assert case["rounds"] == 11
    assert generate.main() == 0
    # Of 300 seconds, 60 are the budget's, 110 are for what is around it, 70 for the answers.
    assert len(totals_s) == 2
    assert all(float(total_s) == pytest.approx(60.0, abs=2.0) for total_s in totals_s)


@pytest.mark.slow
def test_a_decoder_that_fails_keeps_no_other_from_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.serve import generate

    def measure(size: generate.Size, *_: object) -> dict[str, object]:
        if size is generate.SIZES[0]:
            raise RuntimeError("an illegal memory access")
        return {"name": size.name}

    monkeypatch.setattr(generate, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--out", str(tmp_path / "generate.json")])
    assert generate.main() == 1
    assert json.loads((tmp_path / "generate.json").read_text())["cases"] == [{"name": size.name} for size in generate.ON_CPU[1:]]


def test_answers_are_recorded_for_every_contestant(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "generate.json"
    assert generate_table(out) == "(not recorded yet)"
    # All contestants answer. Templates of kernels are asked for elsewhere: to make and time each of them takes minutes.
    environment = {**os.environ, "AUTOSCHED_COMPILE_MODES": "compiled", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN"}
    command = [sys.executable, str(_SERVE / "generate.py"), "--smoke", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    assert all(row["same_tokens"] and row["tokens_per_s"] > 0.0 for row in case["rows"])
    # Three of the four tokens, in each answer: to settle, to compare, and in each round.
    assert case["steps_on_schedule"] == 3 * (2 + case["rounds"])
    assert case["copied_back_bytes"] == 0
    text = generate_table(out)
    shown = {"as it comes": "eager", "as it comes, again": "eager again (A/A)"}
    assert all(f"| {shown.get(row['name'], row['name'])} | {row['tokens_per_s']:,.0f} " in text for row in case["rows"])
    assert "Tokens that differ from the model's: none." in text
    case["rows"][3]["same_tokens"] = False
    out.write_text(json.dumps({**json.loads(out.read_text()), "cases": [case]}))
    assert f"{case['rows'][3]['name']} of 1 layer of 32." in generate_table(out)


@pytest.mark.slow
def test_memory_is_measured_under_both_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "memory.json"
    assert memory_table(out) == "(not recorded yet)"
    _smoke_here(memory, out, monkeypatch)
    (case,) = json.loads(out.read_text())["cases"]
    assert [(row["memory"], row["name"]) for row in case["rows"]] == [
        ("as glibc does by itself", "eager"), ("as glibc does by itself", "schedule"), ("kept", "eager"), ("kept", "schedule"),
    ]  # fmt: skip
    assert all(row["median_us"] > 0.0 for row in case["rows"])
    assert "| `autosched:toy`, 2 | schedule |" in memory_table(out)
