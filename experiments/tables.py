"""Write the tables of both READMEs from recorded results, between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``.

python experiments/tables.py            rewrite README.md and experiments/README.md
python experiments/tables.py --check    fail if one would change
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
READMES = (HERE.parent / "README.md", HERE / "README.md")
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(HERE.parent))

from experiments import tables_claims, tables_coverage, tables_fused, tables_h200, tables_search, tables_serve  # noqa: E402


def rows_by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["strategies"]}


def milliseconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if row["measured_us"] is None:
        return row["failure"]["kind"] if row["failure"] else "not run"
    return f"{row['measured_us'] / 1000:.2f}"


def fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    timed = [row for row in rows if row["measured_us"] is not None]
    return min(timed, key=lambda row: row["measured_us"]) if timed else None


def over(rival: dict[str, Any] | None, kept: dict[str, Any]) -> str:
    """A rival's time over that of what was kept, empty where it has none: below 1, the rival is faster."""
    return f"{rival['measured_us'] / kept['measured_us']:.2f}x" if rival is not None and rival["measured_us"] is not None else ""


def suite_table(folder: Path) -> str:
    """One line for each model of a device's suite."""
    lines = [
        "| model | lowering | operators | eager | torch.compile, frozen | max-autotune | sequential | best other schedule "
        "| kept | kept vs sequential | torch.compile / kept | noise | max error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    machines: set[str] = set()
    if not any(folder.glob("*.json")):
        return "(no results recorded yet)"
    for path in sorted(folder.glob("*.json")):
        recorded = json.loads(path.read_text())
        if "report" not in recorded:
            continue  # another benchmark's
        report = recorded["report"]
        if "error" in report:
            lines.append(f"| {path.stem} | | | | | | | | failed: {report['error']['message'].splitlines()[0][:80]} | | | | |")
            continue
        rows = report["strategies"]
        named = rows_by_name(report)
        eager = fastest([row for row in rows if row["name"].startswith("eager")])
        sequential = fastest([row for row in rows if row["name"].startswith("sequential") and row["is_baseline"]])
        searched = [row for row in rows if row["predicted_us"] is not None and not row["name"].startswith("sequential")]
        lanes, kept = fastest(searched), named[report["chosen"]]
        rivals = [named[name] for name in ("torch_compile", "max_autotune") if name in named]
        said = "sequential kept" if kept is sequential else f"{report['chosen']}"
        gain = f"{sequential['measured_us'] / kept['measured_us']:.2f}x" if sequential is not None else ""
        errors = [row["max_abs_error"] for row in rows if row["predicted_us"] is not None and row["max_abs_error"] is not None]
        best_lanes = f"{milliseconds(lanes)} ({lanes['name']})" if lanes is not None else "none"
        lines.append(
            f"| `{report['model']}` | {report['lowering']} | {report['operators']} | {milliseconds(eager)} "
            f"| {milliseconds(named.get('torch_compile'))} | {milliseconds(named['max_autotune']) if 'max_autotune' in named else ''} "
            f"| {milliseconds(sequential)} | {best_lanes} | {said} | {gain} "
            f"| {over(fastest(rivals), kept)} | {report['noise_floor_pct']:.1f} % | {max(errors):.0e} |"
        )
        environment = recorded["environment"]
        machines.add(
            f"{report['device']['name']}, {environment['cores']} cores, torch {environment['torch']}, "
            f"Python {environment['python']}, commit {environment['commit'][:9]}, {environment['taken'][:10]}"
        )
    footer = "Measured, median milliseconds of interleaved rounds, batch 1, float32. " + "; ".join(sorted(machines)) + "."
    return "\n".join([*lines, "", footer])


def pasted(path: Path) -> str:
    """What a command printed, as a code block."""
    if not path.exists():
        return "(not recorded yet)"
    return "```\n" + "\n".join(line.rstrip() for line in path.read_text().strip("\n").splitlines()) + "\n```"


def included(path: Path) -> str:
    """Markdown that a script wrote."""
    return path.read_text().strip("\n") if path.exists() else "(not recorded yet)"


TABLES = {
    "cpu-suite": lambda: suite_table(HERE / "results" / "cpu"),
    "tune-googlenet": lambda: pasted(HERE / "results" / "cpu" / "tune_googlenet.txt"),
    "bench-googlenet": lambda: pasted(HERE / "results" / "cpu" / "bench_googlenet.txt"),
    "compile-cost-cpu": lambda: tables_fused.compile_cost_table(HERE / "results" / "cpu" / "compile_cost"),
    "h200-compile-cost": lambda: tables_fused.compile_cost_table(HERE / "results" / "h200" / "compile_cost"),
    "h200-suite": lambda: tables_h200.suite_table(HERE / "results" / "h200" / "suite"),
    "h200-probes": lambda: tables_h200.probes_table(HERE / "results" / "h200" / "probes.json"),
    "h200-opara": lambda: tables_h200.opara_table(HERE / "results" / "h200" / "opara"),
    "h200-costmodel": lambda: tables_h200.costmodel_table(HERE / "results" / "h200" / "costmodel.json"),
    "claims": lambda: tables_claims.claims_table(HERE / "results", HERE / "results" / "sim"),
    "coverage": lambda: tables_coverage.coverage_table(HERE / "results" / "cpu" / "coverage.json"),
    "serve-cpu": lambda: tables_serve.serve_table(HERE / "results" / "cpu"),
    "fused-cpu": lambda: tables_fused.fused_table(HERE / "results" / "cpu" / "fused"),
    "search-quality": lambda: tables_search.quality_table(HERE / "results" / "sim" / "quality.json"),
    "search-speed": lambda: tables_search.speed_table(HERE / "results" / "sim" / "speed.json"),
    "composition-cpu": lambda: included(HERE / "results" / "cpu" / "composition.txt"),
    "composition-h200": lambda: included(HERE / "results" / "h200" / "composition.txt"),
    "train-cpu": lambda: included(HERE / "results" / "cpu" / "train.txt"),
}


def rewritten(text: str) -> str:
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        body = make()
        text = pattern.sub(lambda match, body=body: match.group(1) + body + "\n" + match.group(2), text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    texts = {path: path.read_text(encoding="utf-8") for path in READMES}
    after = {path: rewritten(text) for path, text in texts.items()}
    if arguments.check:
        stale = [str(path.relative_to(HERE.parent)) for path in READMES if after[path] != texts[path]]
        sys.exit(f"{', '.join(stale)} is not what the recorded results say; run experiments/tables.py" if stale else 0)
    for path in READMES:
        path.write_text(after[path], encoding="utf-8")


if __name__ == "__main__":
    main()
