"""Tables of what was recorded on a GPU: the suite, the probes, the cost model. Rendered from its results; nothing is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.tables_recorded import NOT_YET, Recorded, cell, one_each, ratio, recorded

COMPILED = ("compiled", "max_autotune", "max_autotune_combo")
_SAID = dict(zip(COMPILED, ("its defaults", "max-autotune", "max-autotune with combo kernels and frozen weights"), strict=True))


def milliseconds(time_us: float | None) -> str:
    """Three digits after the point: a GPU's models take a millisecond."""
    return f"{time_us / 1000:.3f}" if time_us is not None else ""


def suite_table(folder: Path) -> str:
    """One line for each model, batch and data type."""
    found, failed = recorded(folder)
    if not found and not failed:
        return NOT_YET
    head = (
        "model", "batch", "type", "lowering", "operators", "eager", "compiled", "max-autotune", "+ combo, frozen",
        "sequential, one CUDA graph", "best published", "kept", "over sequential", "over best published", "over best compiled",
        "lower bound",
        "predicted / measured", "peak MiB", "noise", "measurements", "search s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---|---:|---|---|" + "---:|" * 6 + "---|---|" + "---:|" * (len(head) - 12)]
    for item in sorted(found, key=lambda item: (item.dtype != "float32", item.batch, item.model)):
        lines.append("| " + " | ".join(cell(text) for text in _suite_cells(item)) + " |")
    lines += [f"| `{path.stem}` | failed: {cell(why)} |" + " |" * (len(head) - 2) for path, why in failed]
    machines = {_machine(item.document["environment"], item.report.get("device")) for item in found}
    footer = (
        "Measured median milliseconds of interleaved rounds; *over sequential*: of the rounds in pairs. Lower bound: the longest path, "
        "or the work divided by the capacity."
    )
    return "\n".join([*lines, "", footer, *sorted(machines)])


def _suite_cells(item: Recorded) -> list[str]:
    report, kept, best = item.report, item.kept, item.best_published
    sequential_us = item.time_us("sequential", "sequential_wide")
    predicted = f"{kept['predicted_us'] / item.kept_us:.2f}" if kept["predicted_us"] else ""
    return [
        f"`{item.model}`",
        str(item.batch),
        item.dtype,
        # Absent from files written before a job chose its lowering.
        report.get("lowering", ""),
        str(report["operators"]),
        milliseconds(item.time_us("eager")),
        *(milliseconds(item.time_us(name)) or _why(item, name) for name in COMPILED),
        milliseconds(sequential_us),
        f"{milliseconds(best['measured_us'])} ({best['name']})" if best is not None else "",
        f"{milliseconds(item.kept_us)} ({report['chosen']})",
        ratio(item.over_sequential, 1.0),
        ratio(best["measured_us"] if best is not None else None, item.kept_us),
        ratio(item.time_us(*COMPILED), item.kept_us),
        milliseconds(item.bound_us),
        predicted,
        f"{kept['peak_memory_bytes'] / 2**20:.1f}" if kept["peak_memory_bytes"] is not None else "",
        f"{report['noise_floor_pct']:.1f} %",
        str(report["measurements"]),
        f"{report['search_s']:.0f}",
    ]


def short_table(folder: Path) -> str:
    """One line for each model of the suite at batch 1 in float32: in order, as published, compiled, and what autosched kept."""
    found = list(one_each(recorded(folder)[0]).values())
    if not found:
        return NOT_YET
    lines = [
        "| model | lowering | torch.compile | sequential | Opara's order | autosched | over sequential | over torch.compile | noise |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for item in sorted(found, key=lambda item: item.model):
        times = (item.time_us(*COMPILED), item.time_us("sequential", "sequential_wide"), item.time_us("opara", "opara_2"), item.kept_us)
        gains = ratio(item.over_sequential, 1.0), ratio(item.time_us(*COMPILED), item.kept_us)
        cells = [f"`{item.model}`", item.report["lowering"], *map(milliseconds, times), *gains, f"{item.report['noise_floor_pct']:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    modes = [said for name, said in _SAID.items() if any(item.time_us(name) is not None for item in found)]
    machines = sorted(
        {f"{item.document['environment']['gpu'].partition(',')[0]}, torch {item.document['environment']['torch']}" for item in found}
    )
    said = f"torch.compile: {', '.join(modes)}" if modes else "torch.compile was not measured"
    return "\n".join([*lines, "", f"Measured median milliseconds, batch 1, float32, each one CUDA graph. {said}. {'; '.join(machines)}."])


def lowerings_table(folder: Path) -> str:
    """What jobs that chose among lowerings found of each: one line for each model and lowering."""
    jobs = [item for item in recorded(folder)[0] if item.report.get("lowerings")]
    if not jobs:
        return NOT_YET
    lines = ["| model | lowering | operators | in order | at best | tuned | outcome |", "|---|---|---:|---:|---:|---:|---|"]
    for item in sorted(jobs, key=lambda item: (item.dtype != "float32", item.batch, item.model)):
        for row in item.report["lowerings"]:
            times = (milliseconds(row[name]) for name in ("sequential_us", "bound_us", "tuned_us"))
            said = f"{row['outcome']}: {row['why']}" if row["why"] else row["outcome"]
            lines.append("| " + " | ".join([f"`{item.model}`", row["lowering"], str(row["operators"] or ""), *times, cell(said)]) + " |")
    footer = "Measured median milliseconds of the jobs above; *at best*: the lower bound of any schedule, by times alone."
    return "\n".join([*lines, "", footer])


def _why(item: Recorded, name: str) -> str:
    return next((row["failure"]["kind"] for row in item.rows(name) if row["failure"]), "")


def _machine(environment: dict[str, Any], measured: dict[str, Any] | None = None) -> str:
    """Where figures come from. A device that calls itself an emulator, or a CPU, is in ``measured`` and nowhere else."""
    device = environment.get("gpu") or (measured or {}).get("name") or environment.get("machine", "")
    commit = str(environment.get("commit", ""))[:9] or "unknown"
    return (
        f"{device}; torch {environment['torch']}, Python {environment['python']}, {environment['cores']} CPU cores, commit {commit}, "
        f"{str(environment['taken'])[:10]}."
    )


def probes_table(path: Path) -> str:
    """Each probe's question and answer."""
    if not path.is_file():
        return NOT_YET
    document = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| probe | question | answer |", "|---|---|---|"]
    lines += [f"| {name} | {cell(probe['question'])} | {cell(probe['answer'])} |" for name, probe in document["probes"].items()]
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items() if version)
    label = "**Smoke run on a test double: no figure is a measurement.** " if machine.get("smoke") else ""
    # The machine's is that of the last call, in which few of them may have been asked.
    commits = sorted({probe.get("commit", machine.get("commit", ""))[:9] or "unknown" for probe in document["probes"].values()})
    return "\n".join([*lines, "", f"{label}{machine.get('gpu', '')}; {versions}; commit {', '.join(commits)}."])


def opara_table(folder: Path) -> str:
    """Opara's published code beside ours, one line for each contestant."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not documents:
        return NOT_YET
    lines = ["| model | contestant | median ms | over sequential | 95 % interval | max error |", "|---|---|---:|---:|---:|---:|"]
    for document in documents:
        for name, row in document["rows"].items():
            low, high = row["over_sequential_ci"]
            cells = [f"`{document['model']}`", name, milliseconds(row["median_us"]), f"{row['over_sequential']:.2f}x"]
            lines.append("| " + " | ".join([*cells, f"{low:.2f} to {high:.2f}", f"{row['max_abs_error']:.0e}"]) + " |")
        if document["published_failed"]:
            lines.append(f"| `{document['model']}` | opara, published | did not run: {cell(document['published_failed'])} | | | |")
    footer = "Measured, interleaved in one process. *Sequential again* is the A/A control."
    return "\n".join([*lines, "", footer, *sorted({_machine(document["environment"], document.get("device")) for document in documents})])


def costmodel_table(path: Path) -> str:
    """Errors on held-out model families, as ``experiments/costmodel/held_out.py`` wrote them."""
    if not path.is_file():
        return NOT_YET
    found = json.loads(path.read_text(encoding="utf-8"))
    columns: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
        ("MAPE %", lambda item: item["mape_pct"]),
        ("contended median APE %", lambda item: item["contended_median_ape_pct"]),
        ("contended Spearman", lambda item: item["contended_spearman"]),
        ("makespan MAPE %", lambda item: item["makespan_mape_pct"]),
        ("90 % interval holds %", lambda item: item["coverage_pct"]),
    )
    lines = ["| model | " + " | ".join(title for title, _ in columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, metrics in {**found["held_out"], **found.get("probes", {})}.items():
        lines.append(f"| {name} | " + " | ".join(_digits(read(metrics)) for _, read in columns) + " |")
    store = found["store"]
    floor = "unknown" if found.get("noise_floor_pct") is None else f"{_digits(found['noise_floor_pct'])} %"
    devices = ", ".join(store["devices"])
    said = f"{found['label']}: {store['pairs']} pairs on {devices}, held out by {found['held_out_by']}, noise floor {floor}"
    return "\n".join([*lines, "", f"{said}; chosen: {found['decision']['chosen']}."])


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
