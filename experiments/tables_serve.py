"""The serving tables, from a device's ``load.json``, ``overhead.json``, ``lanes.json``, ``paused.json``,
``callers.json``, ``state.json``, ``generate.json`` and ``memory.json``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.tables_recorded import NOT_YET, where


def serve_table(folder: Path) -> str:
    """Load times, the guard's cost for each call, and the executor's for each operator: as much of it as is recorded, or a note."""
    parts = [part for part in (_load(folder / "load.json"), _calls(folder / "overhead.json")) if part != NOT_YET]
    return "\n\n".join(parts) or NOT_YET


def _load(path: Path) -> str:
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [
        "| load to first inference | operators | one eager call | median (95 %) | p90 | import | read | pack | verify |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in recorded["cases"]:
        low, high = case["median_ci_s"]
        stages = [f"{1e3 * case['stages_s'][stage]:.0f} ms" for stage in ("import", "read", "pack", "verify")]
        lines.append(
            f"| `{case['model']}` | {case['operators']} | {1e3 * case['model_s']:.1f} ms | {case['total_s']['p50']:.2f} s "
            f"({low:.2f} to {high:.2f}) | {case['total_s']['p90']:.2f} s | {' | '.join(stages)} |"
        )
    counts = [case["repeats"] for case in recorded["cases"]]
    repeats = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return "\n".join([*lines, "", f"{repeats} repeats, each in a fresh process that already has torch and the model. {where(recorded)}"])


def _calls(path: Path) -> str:
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [
        "| per call | operators | parameters | raw executor | added by the guard (95 %) | with `frozen=True` | A/A "
        "| outside the run (95 %) | with `frozen=True` | model check | model check after a run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in recorded["calls"]:
        low, high = case["added_ci_us"]
        lines.append(
            f"| `{case['model']}` | {case['operators']} | {case['parameters']} | {case['raw_us']:,.0f} us "
            f"| {case['added_us']:.1f} us ({low:.1f} to {high:.1f}) | {case['frozen_us']:.1f} us "
            f"| {case['aa_us']:+.1f} us | {_inside_calls(case)} |"
        )
    walks = "; ".join(
        f"{walk['per_operator_us']:.2f} us ({walk['per_operator_ci_us'][0]:.2f} to {walk['per_operator_ci_us'][1]:.2f}) on {walk['lanes']} "
        f"lane{'s' if walk['lanes'] > 1 else ''} with {walk['waits']} waits{_engine(walk)}"
        for walk in recorded["executor"]
    )
    operators = recorded["executor"][0]["operators"]
    return "\n".join(
        [
            *lines,
            "",
            "*Added by the guard*: a call's time minus that of the raw executor. *Outside the run*: the time within a call that was not "
            "spent in its run. *Model check*: the part of that time which looks for changes of the model, and most of which `frozen=True` "
            "skips; timed back to back, and after runs, which evict it from the caches. The executor's own cost for each of "
            f"{operators} operators that do nothing: {walks}. "
            f"{where(recorded)}",
        ]
    )


def _inside_calls(case: dict[str, Any]) -> str:
    """What was timed within calls; records made before 22 November 2026 have only the look, again and again."""
    look = f"{case['stages_us']['watch']:.1f} us"
    if "outside_us" not in case:
        return f"not taken | not taken | {look} | not taken"
    low, high = case["outside_ci_us"]
    after = f"{case['stages_after_run_us']['watch']:.1f} us"
    return f"{case['outside_us']:.1f} us ({low:.1f} to {high:.1f}) | {case['outside_frozen_us']:.1f} us | {look} | {after}"


def _engine(walk: dict[str, Any]) -> str:
    return ", without the interpreter" if walk.get("engine") == "native" else ""


_LANES = ("python, one lane", "python, wide", "python, lanes", "native, one lane", "native, wide", "native, lanes", "native, one team")
_CONDITIONS = {
    "after_a_pause": "one call after 20 ms of idling",
    "beside_a_process": "while another process computes on one core",
    "beside_bursts": "while it does so for 3 of every 100 ms",
}


def lanes_table(folder: Path) -> str:
    """The engines of CPU lanes side by side, from ``lanes.json``; a note where it is absent."""
    path = folder / "lanes.json"
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    cases = recorded["cases"]
    base, again = _LANES[0], f"{_LANES[0]} again"
    heads = [head for head in _LANES[1:] if head in cases[0]["rows"]]
    lines = [f"| model | operators | {base} | A/A | {' | '.join(heads)} |", f"|---|{'---:|' * (3 + len(heads))}"]
    for case in cases:
        rows = case["rows"]
        cells = [f"{rows[base]['median_us']:,.0f} us", *(_speedup(rows[head]) for head in (again, *heads))]
        lines.append(f"| `{case['model']}` | {case['operators']} | {' | '.join(cells)} |")
    bits = "All outputs of both engines are bitwise equal" if all(case["bitwise"] for case in cases) else "Outputs differ"
    said = f"Speed-up over *{base}*, with its 95 % interval, from {cases[0]['rounds']} interleaved rounds. {bits}."
    conditions = [line for key, head in _CONDITIONS.items() for line in _condition_lines(cases, key, head)]
    return "\n".join([*lines, "", *conditions, f"{said} {where(recorded)}"])


def _condition_lines(cases: list[dict[str, Any]], condition: str, head: str) -> list[str]:
    """Native lanes as something else goes on, if that was recorded."""
    if any(condition not in case for case in cases):
        return []
    base, *heads = [name for name in _LANES if name.startswith("native")]
    lines = [f"| {head} | {base} | {' | '.join(heads)} |", f"|---|{'---:|' * (1 + len(heads))}"]
    for case in cases:
        rows = case[condition]
        cells = [f"{rows[base]['median_us']:,.0f} us", *(_speedup(rows[name]) for name in heads)]
        lines.append(f"| `{case['model']}` | {' | '.join(cells)} |")
    return [*lines, ""]


def _speedup(row: dict[str, Any]) -> str:
    low, high = row["speedup_ci"]
    return f"{row['speedup']:.3f}x ({low:.3f} to {high:.3f})"


def paused_table(path: Path) -> str:
    """Single calls after a pause: the tuned schedule, and the faster of one thread and all for the model and ``torch.compile``."""
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [
        "| model | kept | tuned | p90 | eager | p90 | `torch.compile` | p90 | `torch.compile` / tuned (95 %) "
        "| `torch.compile`, all threads | A/A |",
        f"|---|---|{'---:|' * 9}",
    ]
    for case in recorded["cases"]:
        rows = case["rows"]
        eager, compiled = (_fastest(rows, kind) for kind in ("eager", "compile"))
        cells = [text for row in (rows["tuned"], eager, compiled) for text in (f"{row['median_us']:,.0f} us", f"{row['p90_us']:,.0f} us")]
        low, high = compiled["over_tuned_ci"]
        widest = rows[max((name for name in rows if name.startswith("compile")), key=lambda name: int(name.rpartition("_")[2]))]
        lines.append(
            f"| `{case['model']}` | {case['kept']} | {' | '.join(cells)} | {compiled['over_tuned']:.2f}x ({low:.2f} to {high:.2f}) "
            f"| {widest['median_us']:,.0f} us | {rows['tuned again']['over_tuned']:.2f}x |"
        )
    said = (
        f"Medians of {recorded['cases'][0]['calls']} calls of each, in turns, each after {recorded['pause_ms']:g} ms of idling. Eager "
        "and `torch.compile`: with one thread or all threads, whichever is faster here. *All threads* is the default, without "
        "`torch.set_num_threads`."
    )
    return "\n".join([*lines, "", f"{said} {where(recorded)}"])


def _fastest(rows: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = min((row for name, row in rows.items() if name.startswith(kind)), key=lambda row: row["median_us"])
    return found


# What the recorded files call them, and what a reader does.
_CALLERS = {"who loaded": "the thread that loaded", "another": "another thread", "four in turns": "four threads in turn"}
_CONTESTANTS = {"as it comes": "eager", "as it comes, again": "eager again (A/A)"}


def callers_table(path: Path) -> str:
    """Calls from one thread, another and several: as loaded, and with every thread running what it calls."""
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    ways = list(recorded["cases"][0]["rows"])
    lines = [f"| calls come from | {' | '.join(_CALLERS.get(way, way) for way in ways)} |", f"|---|{'---:|' * len(ways)}"]
    for case in recorded["cases"]:
        lines.append(f"| `{case['model']}` | {' | '.join(_called(case['rows'][way]) for way in ways)} |")
    said = (
        f"Medians of {recorded['cases'][0]['repeats']} processes, each the median of {recorded['cases'][0]['calls']} calls. The "
        "sequential schedule on all cores, nothing tuned. *Own team*: every thread runs its own calls and keeps its OpenMP team."
    )
    return "\n".join([*lines, "", f"{said} {where(recorded)}"])


def _called(row: dict[str, Any]) -> str:
    loaded = f"{statistics.median(row['loaded']):,.0f} us"
    if "kept" not in row:
        return loaded
    low, high = row["ratio_ci"]
    return f"{loaded}; own team {statistics.median(row['kept']):,.0f} us, {row['ratio']:.2f}x ({low:.2f} to {high:.2f})"


def state_table(path: Path) -> str:
    """What changing a cache costs: every contestant's speed beside the model as it comes, for each length of the cache."""
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    names = [row["name"] for row in recorded["cases"][0]["rows"]]
    lines = [
        "| speed relative to eager (95 %) | " + " | ".join(_cache(case) for case in recorded["cases"]) + " |",
        "|---|" + "---:|" * len(recorded["cases"]),
    ]
    for name in names:
        cells = []
        for case in recorded["cases"]:
            row = next(item for item in case["rows"] if item["name"] == name)
            low, high = row["speedup_ci"]
            cells.append(f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})")
        if name != "eager":
            lines.append(f"| {'eager again (A/A)' if name == 'eager again' else name} | {' | '.join(cells)} |")
    rounds = recorded["cases"][0]["rounds"]
    return "\n".join([*lines, "", f"Ratios of {rounds} interleaved rounds; sequential schedules, nothing searched. {where(recorded)}"])


def _cache(case: dict[str, Any]) -> str:
    return f"cache {case['cache_bytes'] / 2**20:.0f} MiB, weights {case['weight_bytes'] / 2**20:.0f} MiB"


def generate_table(path: Path) -> str:
    """Answers of ``generate``: every contestant's tokens a second, and its speed beside the model as it comes."""
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    cases = recorded["cases"]
    lines = [
        "| tokens per second (speed relative to eager; 95 %) | " + " | ".join(case["name"] for case in cases) + " |",
        "|---|" + "---:|" * len(cases),
    ]
    for name in dict.fromkeys(row["name"] for case in cases for row in case["rows"]):
        cells = " | ".join(_answered({row["name"]: row for row in case["rows"]}.get(name)) for case in cases)
        lines.append(f"| {_CONTESTANTS.get(name, name)} | {cells} |")
    kept = "; ".join(f"{case['name']}: {_kept(case)}" for case in cases)
    said = (
        f"Answers of {cases[0]['tokens']} tokens to a prompt of {cases[0]['prompt']}, batch 1, float32, {cases[0]['rounds']} interleaved "
        f"rounds. Kept schedules: {kept}. Tokens that differ from the model's: {_others(cases)}."
    )
    return "\n".join([*lines, "", f"{said} {where(recorded)}"])


def _kept(case: dict[str, Any]) -> str:
    # Files of 2026-11-25 and before do not say which lowering was kept.
    lowering = f"{case['lowering']}, " if "lowering" in case else ""
    quick = f", with little effort {case['quick_lowering']}" if case.get("quick_lowering") else ""
    return f"{lowering}{case['schedule']}, lanes: {case['lanes']}{quick}"


def _answered(row: dict[str, Any] | None) -> str:
    if row is None:
        return "failed"
    low, high = row["speedup_ci"]
    return f"{row['tokens_per_s']:,.0f} ({row['speedup']:.2f}x; {low:.2f} to {high:.2f})"


def _others(cases: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['name']} of {case['name']}" for case in cases for row in case["rows"] if not row["same_tokens"]) or "none"


def memory_table(path: Path) -> str:
    """Calls under glibc's defaults and with memory kept: their times, what that gains, and what the operating system takes."""
    if not path.exists():
        return NOT_YET
    recorded = json.loads(path.read_text())
    lines = [
        "| model, batch | | glibc's defaults | memory anew in each call | system's share | kept | speed-up (95 %) |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in recorded["cases"]:
        name, _, batch = case["model"].partition("@")
        for before, after in zip(case["rows"][:2], case["rows"][2:], strict=True):
            low, high = after["speedup_ci"]
            lines.append(
                f"| `{name}`, {batch} | {before['name']} | {before['median_us'] / 1e3:,.1f} ms | {before['anew_bytes'] / 2**20:,.0f} MiB "
                f"| {before['system_share']:.0%} | {after['median_us'] / 1e3:,.1f} ms | {after['speedup']:.2f}x ({low:.2f} to {high:.2f}) |"
            )
    said = (
        "*Schedule*: the model's operators in order, on all threads; nothing was searched. Medians of "
        f"{recorded['cases'][0]['rounds']} interleaved rounds of two processes."
    )
    return "\n".join([*lines, "", f"{said} {where(recorded)}"])
