"""The table of models that autosched takes, from ``results/coverage.json``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.tables_recorded import NOT_YET

_ROW = 160


def coverage_table(path: Path) -> str:
    """Counts by source and outcome, then every model that is refused or falls back, with the reason; a note where the file is absent."""
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text(encoding="utf-8"))
    counts: dict[str, dict[str, int]] = recorded["counts"]
    total: Counter[str] = Counter()
    for of_source in counts.values():
        total.update(of_source)
    # Wrong answers and crashes are shown even where there are none: that is what the sweep is for.
    outcomes = [name for name in next(iter(counts.values())) if total[name] or name in ("works", "wrong", "crash")]
    lines = [f"| source | models | {' | '.join(outcomes)} |", f"|---|---:|{'---:|' * len(outcomes)}"]
    for source, of_source in [*counts.items(), ("all", dict(total))]:
        figures = " | ".join(str(of_source.get(name, 0)) for name in outcomes)
        lines.append(f"| {source} | {sum(of_source.values())} | {figures} |")
    environment = recorded["environment"]
    libraries = [
        f"{name} {version}" for name, version in environment["packages"].items() if name in ("torchvision", "timm", "transformers")
    ]
    where = f"torch {environment['torch']}, {', '.join(libraries)}, Python {environment['python']}"
    where += f", commit {environment['commit'][:9]}, {environment['taken'][:10]}."
    where += "".join(f" Not run: {count} of {source}." for source, count in recorded.get("not_run", {}).items())
    earlier = sum(count for commit, count in recorded.get("commits", {}).items() if commit != environment["commit"])
    where += f" {earlier} of the models were run at earlier commits of the same sweep." if earlier else ""
    return "\n".join([*lines, "", where, "", *_others(recorded["others"])])


def _others(others: list[dict[str, Any]]) -> list[str]:
    if not others:
        return []
    lines = ["| model | outcome | PyTorch's own export | reason |", "|---|---|---|---|"]
    for item in others:
        export = {True: "refuses it too", False: "takes it", None: ""}[item["export_refuses"]]
        reason = " ".join(item["reason"].split()).replace("|", "\\|").removeprefix("the model cannot be captured").lstrip(" :")
        lines.append(f"| `{item['name']}` | {item['outcome']} | {export} | {reason[:_ROW]}{'...' if len(reason) > _ROW else ''} |")
    return lines
