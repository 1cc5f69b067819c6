"""What ``experiments/suite.py`` measured on a CPU: the whole table, and the short one that the README begins with; and how far apart
processes are, which says what small differences in them are worth."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.tables_recorded import NOT_YET, Recorded, processor, ratio, recorded, where

_COMPILED = ("torch_compile", "max_autotune")
_FASTEST = "Eager and torch.compile: the fastest configuration measured."


def suite_table(folder: Path) -> str:
    """One line for each model of the suite, with everything that was measured beside what was kept."""
    found, failed = recorded(folder)
    if not found and not failed:
        return NOT_YET
    lines = [
        "| model | lowering | operators | eager | torch.compile, frozen | max-autotune | sequential | best other schedule "
        "| kept | kept vs sequential | torch.compile / kept | noise | max error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    lines += [_line(item) for item in found]
    lines += [f"| {path.stem} | | | | | | | | failed: {why[:80]} | | | | |" for path, why in failed]
    footer = "Measured median milliseconds of interleaved rounds, batch 1, float32. "
    return "\n".join([*lines, "", footer + "; ".join(sorted({_where(item, commit=True) for item in found})) + "."])


def short_table(folder: Path) -> str:
    """One line for each model of the suite: as it comes, compiled, and what autosched kept."""
    found, _ = recorded(folder)
    if not found:
        return NOT_YET
    lines = [
        "| model | eager | torch.compile | autosched | schedule kept | vs eager | vs torch.compile | noise |",
        "|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    lines += [f"| `{item.model}` | {_short_cells(item)} |" for item in found]
    footer = f"Measured median milliseconds, batch 1, float32. {_FASTEST} "
    return "\n".join([*lines, "", footer + "; ".join(sorted({_where(item, commit=False) for item in found})) + "."])


def more_table(folder: Path) -> str:
    """The same of other models, batches and dtypes."""
    found, failed = recorded(folder)
    if not found and not failed:
        return NOT_YET
    lines = [
        "| model | batch | dtype | eager | torch.compile | autosched | schedule kept | vs eager | vs torch.compile | noise |",
        "|---|---:|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    lines += [f"| `{item.model}` | {item.batch} | {item.dtype} | {_short_cells(item)} |" for item in found]
    lines += [f"| {path.stem} | | | | | | failed: {why[:80]} | | | |" for path, why in failed]
    footer = f"Measured median milliseconds, `--effort quick`. {_FASTEST} "
    return "\n".join([*lines, "", footer + "; ".join(sorted({_where(item, commit=True) for item in found})) + "."])


def _short_cells(item: Recorded) -> str:
    eager, compiled_us = _fastest(_eager(item)), item.time_us(*_COMPILED)
    eager_us = eager["measured_us"] if eager is not None else None
    kept = "sequential" if item.report["chosen"].startswith("sequential") else f"lanes ({item.report['chosen']})"
    times = " | ".join(_milliseconds(time_us) for time_us in (eager_us, compiled_us, item.kept_us))
    gains = f"{ratio(eager_us, item.kept_us)} | {ratio(compiled_us, item.kept_us)} | {item.report['noise_floor_pct']:.1f} %"
    return f"{times} | {kept} | {gains}"


def processes_table(path: Path) -> str:
    """One line for each model that several processes ran in turns, of ``processes.json``."""
    if not path.exists():
        return NOT_YET
    found = json.loads(path.read_text())
    lines = [
        "| model | median | twice in one process (A/A) | in two processes | how much of that lasts |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        apart = " | ".join(f"{statistics.median(row[key]):.1f} % (at most {max(row[key]):.1f} %)" for key in ("same_pct", "two_pct"))
        lasting = f"{row['lasting']:.2f}" if row["lasting"] is not None else ""
        lines.append(f"| `{row['model']}` | {_milliseconds(row['median_us'])} ms | {apart} | {lasting} |")
    said = f"{found['processes']} processes, the same sequential schedule in each, {found['rounds']} rounds in turns."
    said += " Medians over processes, and over pairs of them."
    lasts = "*Lasts*: correlation of what sets processes apart in the first half of the measurement with the second."
    return "\n".join([*lines, "", f"{said} {lasts} {where(found)}"])


def _line(item: Recorded) -> str:
    report, rows = item.report, item.report["strategies"]
    sequential = _fastest([row for row in rows if row["name"].startswith("sequential") and row["is_baseline"]])
    lanes = _fastest([row for row in rows if row["predicted_us"] is not None and not row["name"].startswith("sequential")])
    named = {row["name"]: row for row in rows}
    errors = [row["max_abs_error"] for row in rows if row["predicted_us"] is not None and row["max_abs_error"] is not None]
    cells = [
        f"`{item.model}`",
        report["lowering"],
        str(report["operators"]),
        _cell(_fastest(_eager(item))),
        _cell(named.get("torch_compile")),
        _cell(named["max_autotune"]) if "max_autotune" in named else "",
        _cell(sequential),
        f"{_cell(lanes)} ({lanes['name']})" if lanes is not None else "none",
        "sequential kept" if item.kept is sequential else report["chosen"],
        ratio(sequential["measured_us"], item.kept_us) if sequential is not None else "",
        # Below 1, the rival is faster.
        ratio(item.time_us(*_COMPILED), item.kept_us),
        f"{report['noise_floor_pct']:.1f} %",
        f"{max(errors):.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def _eager(item: Recorded) -> list[dict[str, Any]]:
    """The model as it came: on a CPU with one thread and with all of them."""
    return [row for row in item.report["strategies"] if row["name"].startswith("eager")]


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    timed = [row for row in rows if row["measured_us"] is not None]
    return min(timed, key=lambda row: row["measured_us"]) if timed else None


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row["measured_us"] is None:
        return str(row["failure"]["kind"]) if row["failure"] else "not run"
    return _milliseconds(row["measured_us"])


def _milliseconds(time_us: float | None) -> str:
    return f"{time_us / 1000:.2f}" if time_us is not None else ""


def _where(item: Recorded, *, commit: bool) -> str:
    environment = item.document["environment"]
    device = processor(item.report["device"])
    where = f"{device}, {environment['cores']} cores, torch {environment['torch']}, Python {environment['python']}"
    return f"{where}, commit {environment['commit'][:9]}, {environment['taken'][:10]}" if commit else where
