"""Tables are rendered from result files: every figure of theirs, nothing where there is no file, and a part is not taken for the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import tables, tables_claims, tables_fused, tables_gpu, tables_suite
from experiments.tables_claims import CLAIMED, CONTROLS, Claim, claims
from experiments.tables_recorded import NOT_YET, cpus, for_each, gpus


def row(
    name: str, measured_us: float | None, *, predicted_us: float | None = None, baseline: bool = True, kind: str = ""
) -> dict[str, Any]:
    failure = {"kind": kind, "detail": "why"} if kind else None
    return {
        "name": name, "is_baseline": baseline, "predicted_us": predicted_us, "measured_us": measured_us, "failure": failure,
        "peak_memory_bytes": 2**21, "ci_us": None, "max_abs_error": 0.0,
    }  # fmt: skip


def write(folder: Path, model: str, kept_us: float, *, chosen: str = "tuned", noise: float = 0.5, published_us: float = 120.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        row("sequential", 140.0 if chosen == "tuned" else kept_us, predicted_us=150.0),
        row("eager", 900.0),
        row("compiled", 130.0),
        row("max_autotune", 112.0),
        row("max_autotune_combo", None, kind="timeout"),
        row("opara", published_us, predicted_us=100.0),
        row("tuned", 100.0 if chosen != "tuned" else kept_us, predicted_us=90.0, baseline=False),
    ]
    report = {
        "model": model, "operators": 12, "chosen": chosen, "strategies": rows, "noise_floor_pct": noise, "measurements": 77,
        "search_s": 42.0, "critical_path_us": 30.0, "work_us": 60.0, "verdict": "kept",
    }  # fmt: skip
    document = {
        "environment": {
            "taken": "2026-01-01T00:00:00", "commit": "abcdef0123", "torch": "2.11.0", "python": "3.12.1", "cores": 16,
            "gpu": "NVIDIA H200",
        },
        "run": {"batch": 1, "dtype": "float32", "limit_s": 500},
        "report": report,
    }  # fmt: skip
    (folder / f"{model.replace(':', '_')}_b1_float32.json").write_text(json.dumps(document))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "h200" / "suite"
    for model in CLAIMED:
        write(folder, model, 80.0)
    for model in CONTROLS:
        write(folder, model, 140.0, chosen="sequential")
    return tmp_path


def named(found: list[Claim], word: str) -> Claim:
    return next(item for item in found if word in item.what)


def test_without_results_every_target_says_so(tmp_path: Path) -> None:
    found = claims(tmp_path, tmp_path)
    assert len(found) == 12
    assert all(not item.figure and item.met is None and item.remark for item in found)
    assert "12 targets: 0 with a figure, 0 of them fall short, 12 not measured." in tables_claims.claims_table(tmp_path, tmp_path)
    assert tables_gpu.suite_table(tmp_path) == NOT_YET
    assert tables_gpu.probes_table(tmp_path / "probes.json") == NOT_YET
    assert tables_gpu.costmodel_table(tmp_path / "costmodel.json") == NOT_YET
    assert tables_gpu.opara_table(tmp_path) == NOT_YET


def test_figures_are_those_of_the_files(results: Path) -> None:
    found = claims(results, results)
    sequential = named(found, "over the sequential CUDA graph")
    assert (sequential.figure, sequential.met, sequential.aim_met) == ("1.75x", True, True)
    assert (named(found, "best other strategy").figure, named(found, "best other strategy").met) == ("1.50x", True)
    compiled = named(found, "torch.compile")
    assert (compiled.figure, compiled.met, compiled.aim_met) == ("1.40x", True, True)
    assert (named(found, "controls").figure, named(found, "controls").met) == ("+0.0 %", True)
    # Eight models predict 90 for 80, three 90 for 100: the median is 12.5 %.
    assert named(found, "makespan").figure == "12.5 %"
    assert named(found, "balanced tuning job").figure == "42.0 s"


def test_a_part_of_the_suite_settles_no_success_but_shows_a_failure(results: Path) -> None:
    (results / "h200" / "suite" / "transformers_t5_b1_float32.json").unlink()
    part = named(claims(results, results), "over the sequential CUDA graph")
    assert (part.figure, part.met) == ("1.75x", None)
    assert "7 of 8 models" in part.remark
    for model in CLAIMED[:-1]:
        write(results / "h200" / "suite", model, 130.0)
    short = named(claims(results, results), "over the sequential CUDA graph")
    assert (short.figure, short.met) == ("1.08x", False)
    assert "falls short" in short.line()


def test_slower_beyond_noise_breaks_never_slower(results: Path) -> None:
    write(results / "h200" / "suite", CLAIMED[0], 115.0)
    compiled = named(claims(results, results), "torch.compile")
    assert compiled.met is False
    assert CLAIMED[0] in compiled.remark
    write(results / "h200" / "suite", CLAIMED[0], 115.0, noise=8.0)
    assert named(claims(results, results), "torch.compile").met is True


def test_a_control_that_changed_falls_short(results: Path) -> None:
    write(results / "h200" / "suite", CONTROLS[0], 139.9, chosen="tuned")
    control = named(claims(results, results), "controls")
    assert control.met is False
    assert CONTROLS[0] in control.remark


def test_the_suite_table_has_a_line_for_each_run_and_names_failures(results: Path) -> None:
    folder = results / "h200" / "suite"
    bad = json.loads((folder / "transformers_t5_b1_float32.json").read_text())
    bad["report"] = {"error": {"message": "Traceback\nRuntimeError: CUDA | gone", "exit_code": 1}}
    (folder / "transformers_t5_b1_float32.json").write_text(json.dumps(bad))
    lines = tables_gpu.suite_table(folder).splitlines()
    assert len([line for line in lines if line.startswith("| `")]) == len(CLAIMED) + len(CONTROLS)
    assert len({line.replace("\\|", "").count("|") for line in lines if line.startswith("|")}) == 1
    whole = "\n".join(lines)
    assert "failed: RuntimeError: CUDA \\| gone" in whole
    assert "| timeout |" in whole
    assert "0.120 (opara)" in whole
    assert "0.080 (tuned) | 1.75x | 1.50x | 1.40x | 0.060 | 1.12 | 2.0 | 0.5 % | 77 | 42 |" in whole
    assert "NVIDIA H200; torch 2.11.0, Python 3.12.1, 16 CPU cores, commit abcdef012, 2026-01-01." in whole


def test_the_gain_over_sequential_is_that_of_the_duel_and_not_the_middle_of_its_interval(results: Path) -> None:
    path = results / "h200" / "suite" / "transformers_t5_b1_float32.json"
    document = json.loads(path.read_text())
    said = "tuned kept: 50.0 % less time than sequential, the best sequential schedule (95 % interval 30.0 to 52.0 %)."
    document["report"] |= {"verdict": said, "ratio_low": 0.48, "ratio_high": 0.7}
    path.write_text(json.dumps(document))
    assert "0.080 (tuned) | 2.00x |" in tables_gpu.suite_table(path.parent)


def test_an_emulated_device_is_named_beside_its_figures(results: Path) -> None:
    path = results / "h200" / "suite" / "transformers_t5_b1_float32.json"
    document = json.loads(path.read_text())
    document["environment"] |= {"gpu": "", "machine": "x86_64"}
    document["report"]["device"] = {"kind": "cuda", "name": "Emulated sm_90, no kernels run"}
    path.write_text(json.dumps(document))
    assert "Emulated sm_90, no kernels run; torch" in tables_gpu.suite_table(path.parent)


def test_two_gpus_stand_beside_each_other_under_their_own_names(results: Path) -> None:
    for path in (results / "h200" / "suite").glob("*.json"):
        document = json.loads(path.read_text())
        document["environment"]["gpu"] = "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB"
        (results / "h100" / "suite").mkdir(parents=True, exist_ok=True)
        (results / "h100" / "suite" / path.name).write_text(json.dumps(document))
    (results / "h100" / "suite" / "transformers_t5_b1_float32.json").unlink()
    (results / "cpu_made_up_2").mkdir()
    table = for_each(gpus(results), lambda folder: tables_gpu.suite_table(folder / "suite"))
    assert [line for line in table.splitlines() if line.startswith("**")] == ["**NVIDIA H100 80GB HBM3**", "**NVIDIA H200**"]
    first, last = table.split("**NVIDIA H200**")
    assert ("transformers:t5" in first, "transformers:t5" in last) == (False, True)
    sequential = [item for item in claims(results, results) if "over the sequential CUDA graph" in item.what]
    assert [(item.gpu, item.source, item.met) for item in sequential] == [
        ("NVIDIA H100 80GB HBM3", "results/h100/suite", None),
        ("NVIDIA H200", "results/h200/suite", True),
    ]
    assert "1.75x (reached, and the aim) | NVIDIA H200, `results/h200/suite` |" in sequential[1].line()
    assert "12 targets: 6 with a figure, 0 of them fall short, 6 not measured." in tables_claims.claims_table(results, results)


def test_without_a_gpu_there_is_no_table(tmp_path: Path) -> None:
    for name in ("cpu_made_up_2", "sim", "cuda_emulated_h100_no_kernels_run"):
        (tmp_path / name).mkdir()
    assert for_each(gpus(tmp_path), lambda folder: "made") == NOT_YET


def test_of_several_cpus_the_one_with_most_models_comes_first_then_the_one_measured_last_and_none_is_a_gpu(tmp_path: Path) -> None:
    for name, taken in (("cpu_b_2", "2026-01-02"), ("cpu_a_2", "2026-01-01"), ("cpu_c_2", "2026-01-03")):
        write(tmp_path / name, "torchvision:googlenet", 80.0)
        path = next((tmp_path / name).glob("*.json"))
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "environment": {**document["environment"], "taken": taken}}))
    (tmp_path / "h200").mkdir()
    (tmp_path / "cpu_empty_2").mkdir()
    assert [folder.name for folder in cpus(tmp_path)] == ["cpu_c_2", "cpu_b_2", "cpu_a_2", "cpu_empty_2"]
    write(tmp_path / "cpu_a_2", "torchvision:resnet50", 90.0)
    assert [folder.name for folder in cpus(tmp_path)] == ["cpu_a_2", "cpu_c_2", "cpu_b_2", "cpu_empty_2"]
    assert [folder.name for folder in gpus(tmp_path)] == ["h200"]


def test_the_figures_of_several_cpus_are_told_apart(tmp_path: Path) -> None:
    for name, models in (("cpu_b_2", ("torchvision:googlenet", "transformers:bert")), ("cpu_a_2", ("torchvision:googlenet",))):
        (tmp_path / name).mkdir()
        for model in models:
            write(tmp_path / name, model, 80.0)
    table = for_each(cpus(tmp_path), lambda folder: f"of {folder.name}")
    assert ("of cpu_a_2" in table, "of cpu_b_2" in table) == (True, True)


def test_other_results_fill_their_targets(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    metrics = {
        "mape_pct": 3.0, "contended_median_ape_pct": 14.0, "contended_spearman": 0.9, "makespan_mape_pct": 2.0, "coverage_pct": 96.0,
    }  # fmt: skip
    model: dict[str, Any] = {
        "label": "measured rows", "held_out_by": "family",
        "store": {"pairs": 10, "simulated": 0, "devices": ["NVIDIA H200"], "families": list("abcdefgh")},
        "noise_floor_pct": None,
        "decision": {"chosen": "xgboost"}, "held_out": {"xgboost": metrics, "constant": metrics}, "probes": {},
    }  # fmt: skip
    (folder / "costmodel.json").write_text(json.dumps(model))
    told = {"question": "q", "answer": "a | b", "commit": "45b363c8321"}
    probes = {
        "machine": {"smoke": False, "commit": "929936907ab"},
        "probes": {"P1": {**told, "data": {}}, "P12": {**told, "data": {"call_us": [30.0, 32.0], "bare_replay_us": [20.0]}}},
    }
    (folder / "probes.json").write_text(json.dumps(probes))
    (tmp_path / "speed.json").write_text(json.dumps({"smoke": False, "evaluations": {"rows": [[100, 4, 60000, 40000, 1, 1, 1.0]]}}))
    gaps = {"header": ["graph", "found over best known"], "rows": [["a", 0.002], ["b", 0.006], ["c", 0.03]]}
    (tmp_path / "quality.json").write_text(json.dumps({"smoke": True, "against_heft": gaps}))
    load = {"operators": 301, "repeats": 20, "median_ci_s": [0.3, 0.5], "total_s": {"p50": 0.41}}
    (folder / "load.json").write_text(json.dumps({"cases": [{"model": "tower:30"}, {"model": "tower:300", **load}]}))
    found = claims(tmp_path, tmp_path)
    assert (named(found, "first inference").figure, named(found, "first inference").aim_met) == ("0.41 s", True)
    assert (named(found, "median APE").figure, named(found, "median APE").met, named(found, "median APE").aim_met) == (
        "14.0 %",
        True,
        False,
    )
    assert named(found, "median APE").remark.endswith("10 pairs of 8 model families; the same slowdown for all is off by 14.0 %")
    assert named(found, "coverage").met is False
    model["store"]["families"] = list("abc")
    (folder / "costmodel.json").write_text(json.dumps(model))
    of_few = named(claims(tmp_path, tmp_path), "median APE")
    assert (of_few.figure, of_few.met, of_few.aim_met) == ("14.0 %", None, None)
    assert (named(found, "replay overhead").figure, named(found, "replay overhead").met) == ("11.0 us", True)
    assert (named(found, "simulator").figure, named(found, "simulator").aim_met) == ("60,000/s", False)
    assert named(found, "search gap").figure == ""  # a smoke run is no result
    (tmp_path / "quality.json").write_text(json.dumps({"smoke": False, "against_heft": gaps}))
    gap = named(claims(tmp_path, tmp_path), "search gap")
    assert (gap.figure, gap.met, gap.aim_met) == ("0.6 %", True, False)
    assert "a \\| b" in tables_gpu.probes_table(folder / "probes.json")
    assert tables_gpu.probes_table(folder / "probes.json").endswith("commit 45b363c83.")
    assert "| xgboost | 3.00 | 14.00 | 0.90 | 2.00 | 96.00 |" in tables_gpu.costmodel_table(folder / "costmodel.json")
    # Where no pair waits for another or is slowed down by it, there is no such error, and no table was made of anything.
    model["held_out"] = {name: {**metrics, "contended_median_ape_pct": None} for name in ("xgboost", "constant")}
    (folder / "costmodel.json").write_text(json.dumps(model))
    assert named(claims(tmp_path, tmp_path), "median APE").figure == ""


def test_what_a_cpu_measured_stands_beside_a_target_and_never_settles_it(tmp_path: Path) -> None:
    folder = tmp_path / "cpu_made_up_2"
    folder.mkdir()
    metrics = {"contended_median_ape_pct": 4.5, "coverage_pct": 90.5}
    model = {
        "label": "measured rows", "store": {"pairs": 7, "simulated": 0, "families": ["a", "b"]}, "decision": {"chosen": "xgboost"},
        "held_out": {"xgboost": metrics},
    }  # fmt: skip
    (folder / "costmodel.json").write_text(json.dumps(model))
    case = {"model": "tower:300", "operators": 300, "repeats": 5, "median_ci_s": [0.1, 0.2], "total_s": {"p50": 0.15}}
    (folder / "load.json").write_text(json.dumps({"cases": [case]}))
    write(folder, "torchvision:googlenet", 80.0)
    found = claims(tmp_path, tmp_path)
    assert [item.what for item in found if item.figure or item.met is not None or item.source] == []
    beside = {item.what: item.on_cpu for item in found if item.on_cpu}
    assert len(beside) == 4
    assert (
        named(found, "median APE").on_cpu
        == "4.5 %, `results/cpu_made_up_2/costmodel.json`: xgboost, measured rows, 7 pairs of 2 model families"
    )
    assert named(found, "coverage").on_cpu.startswith("90.5 %, `results/cpu_made_up_2/costmodel.json`")
    assert named(found, "makespan").on_cpu == "12.5 %, `results/cpu_made_up_2`: median of 1 schedules of 1 models"
    assert named(found, "first inference").on_cpu.startswith("0.15 s, `results/cpu_made_up_2/load.json`: 300 operators")
    lines = tables_claims.claims_table(tmp_path, tmp_path).splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {8}
    assert "12 targets: 0 with a figure" in lines[-1]


def test_the_pages_hold_every_table_once() -> None:
    for path in tables.PAGES:
        text = path.read_text(encoding="utf-8")
        for name in tables.TABLES:
            assert text.count(f"<!-- table:{name} -->") == text.count(f"<!-- end:{name} -->")
    whole = "".join(path.read_text(encoding="utf-8") for path in tables.PAGES)
    assert {name: whole.count(f"<!-- table:{name} -->") for name in tables.TABLES} == dict.fromkeys(tables.TABLES, 1)


def test_opara_published_stands_beside_ours_or_says_why_not(tmp_path: Path) -> None:
    row = {"median_us": 1234.0, "over_sequential": 1.5, "over_sequential_ci": [1.4, 1.6], "max_abs_error": 2e-6}
    environment = {"taken": "2026-01-01T00:00:00", "torch": "2.11.0", "python": "3.12.1", "cores": 16, "gpu": "NVIDIA H200"}
    document = {"environment": environment, "model": "toy", "rows": {"tuned": row}, "published_failed": "TypeError: a | b"}
    (tmp_path / "toy.json").write_text(json.dumps(document))
    table = tables_gpu.opara_table(tmp_path)
    assert "| `toy` | tuned | 1.234 | 1.50x | 1.40 to 1.60 | 2e-06 |" in table
    assert "did not run: TypeError: a \\| b" in table
    assert "NVIDIA H200" in table


def test_the_tables_show_the_lowering_kept_and_old_files_still_render(results: Path, tmp_path: Path) -> None:
    folder = results / "h200" / "suite"
    old = next(line for line in tables_gpu.suite_table(folder).splitlines() if "googlenet" in line)
    assert old.split("|")[4].strip() == ""
    path = folder / "torchvision_googlenet_b1_float32.json"
    document = json.loads(path.read_text())
    document["report"]["lowering"] = "inductor"
    path.write_text(json.dumps(document))
    new = next(line for line in tables_gpu.suite_table(folder).splitlines() if "googlenet" in line)
    assert new.split("|")[4].strip() == "inductor"
    assert new.count("|") == old.count("|")
    # The CPU's table says how the rival stands to what was kept: below 1, it is faster.
    document["report"] |= {"device": {"kind": "cpu", "name": "made-up", "details": []}}
    strategies = document["report"]["strategies"]
    strategies[:] = [item for item in strategies if item["name"] != "max_autotune"] + [row("torch_compile", 60.0)]
    cpu = tmp_path / "cpu"
    cpu.mkdir()
    (cpu / "one.json").write_text(json.dumps(document))
    head, _, line = tables_suite.suite_table(cpu).splitlines()[:3]
    cells = dict(zip([name.strip() for name in head.split("|")], [text.strip() for text in line.split("|")], strict=True))
    assert cells["lowering"] == "inductor"
    assert cells["torch.compile / kept"] == "0.75x"
    assert cells["max-autotune"] == ""
    # Where both ways of compiling were measured, the faster one counts.
    strategies.append(row("max_autotune", 40.0))
    (cpu / "one.json").write_text(json.dumps(document))
    line = tables_suite.suite_table(cpu).splitlines()[2]
    cells = dict(zip([name.strip() for name in head.split("|")], [text.strip() for text in line.split("|")], strict=True))
    assert cells["max-autotune"] == "0.04"
    assert cells["torch.compile / kept"] == "0.50x"
    # Other batches and dtypes have a table of their own.
    more = cpu / "more"
    assert tables_suite.more_table(more) == NOT_YET
    more.mkdir()
    document["run"] |= {"batch": 8, "dtype": "bfloat16"}
    (more / "one.json").write_text(json.dumps(document))
    (more / "other.json").write_text(json.dumps(document | {"report": {"error": {"message": "no memory"}}}))
    head, _, line, failed = tables_suite.more_table(more).splitlines()[:4]
    cells = dict(zip([name.strip() for name in head.split("|")], [text.strip() for text in line.split("|")], strict=True))
    assert (cells["batch"], cells["dtype"], cells["torch.compile"], cells["vs torch.compile"]) == ("8", "bfloat16", "0.04", "0.50x")
    assert "failed: no memory" in failed
    assert failed.count("|") == line.count("|")


def test_compile_costs_show_what_was_timed_and_what_failed(tmp_path: Path) -> None:
    assert tables_fused.compile_cost_table(tmp_path / "none") == NOT_YET
    environment = {"taken": "2026-01-01T00:00:00", "commit": "abcdef0123", "torch": "2.11.0", "cores": 16, "gpu": ""}
    first = {"operators": 9, "distinct": 4, "processes": 2, "ready_s": 12.34}
    document = {"environment": environment, "model": "toy", "lowering": "fused", "first": first, "second": {"error": "hung\n..."}}
    document["serial"] = {"refused": ["it updates a buffer"]}
    (tmp_path / "fused_toy.json").write_text(json.dumps(document))
    table = tables_fused.compile_cost_table(tmp_path)
    assert "| `toy` | fused | 9 | 4 | 2 | 12.3 | failed: hung | refused: it updates a buffer |" in table
    assert "16 cores, torch 2.11.0, commit abcdef012" in table


def test_lowerings_that_a_job_chose_among_have_a_line_each(tmp_path: Path) -> None:
    write(tmp_path, "toy", 80.0)
    assert tables_gpu.lowerings_table(tmp_path) == NOT_YET
    path = tmp_path / "toy_b1_float32.json"
    document = json.loads(path.read_text())
    kept = {"lowering": "inductor", "operators": 7, "sequential_us": 90.0, "bound_us": 40.0, "tuned_us": 80.0, "outcome": "kept", "why": ""}
    left = {**kept, "lowering": "fused", "operators": None, "tuned_us": None, "outcome": "dropped", "why": "slow | late"}
    document["report"]["lowerings"] = [left, kept]
    path.write_text(json.dumps(document))
    assert tables_gpu.lowerings_table(tmp_path).splitlines()[2:4] == [
        r"| `toy` | fused |  | 0.090 | 0.040 |  | dropped: slow \| late |",
        "| `toy` | inductor | 7 | 0.090 | 0.040 | 0.080 | kept |",
    ]


def test_the_short_table_of_a_gpu_says_whose_kernels_are_scheduled(tmp_path: Path) -> None:
    assert tables_gpu.short_table(tmp_path) == NOT_YET
    write(tmp_path, "toy", 80.0)
    path = tmp_path / "toy_b1_float32.json"
    document = json.loads(path.read_text())
    document["report"]["lowering"] = "inductor"
    path.write_text(json.dumps(document))
    head, _, line = tables_gpu.short_table(tmp_path).splitlines()[:3]
    cells = dict(zip(*([cell.strip() for cell in row.split("|")[1:-1]] for row in (head, line)), strict=True))
    assert cells["lowering"] == "inductor"
    assert cells["autosched"] == "0.080"
    assert cells["over torch.compile"] == f"{float(cells['torch.compile']) / 0.080:.2f}x"


def test_the_short_table_has_what_a_reader_asks_first(tmp_path: Path) -> None:
    assert tables_suite.short_table(tmp_path) == NOT_YET
    write(tmp_path, "toy", 80.0)
    path = tmp_path / "toy_b1_float32.json"
    document = json.loads(path.read_text())
    document["report"] |= {"device": {"kind": "cpu", "name": "made-up", "details": []}}
    path.write_text(json.dumps(document))
    line = tables_suite.short_table(tmp_path).splitlines()[2]
    assert line == "| `toy` | 0.90 | 0.11 | 0.08 | lanes (tuned) | 11.25x | 1.40x | 0.5 % |"
