"""What the design promises, what was measured, and where it falls short: one line for each target of DESIGN section 10.

The targets are written here once, as numbers; every figure comes from a result file, which is named beside it. A figure that rests on part
of what the target asks for says so and counts as not settled. What a CPU measured of the same quantity stands in a column of its own, with
its own file, and settles nothing.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.tables_gpu import COMPILED
from experiments.tables_recorded import Recorded, cpus, device_name, first, geometric_mean, gpus, one_each, recorded

# The eight models of the design, at batch 1 in float32.
CLAIMED = (
    "torchvision:googlenet", "torchvision:inception_v3", "timm:nasnetalarge", "torchvision:squeezenet1_1", "autosched:randwire",
    "autosched:deepfm", "transformers:bert", "transformers:t5",
)  # fmt: skip
_MAKESPAN = "predicted against measured makespan, optimised schedules"
CONTROLS = ("torchvision:resnet50", "torchvision:mobilenet_v2", "torchvision:densenet201")


@dataclass(frozen=True)
class Claim:
    """One target and what was found.

    Args:
        figure: the measured figure as text, empty if there is none.
        met: whether it reaches the least target; ``None`` if that cannot be said.
        aim_met: the same for the aim.
        source: the file it comes from.
        gpu: the GPU that it was measured on; empty for what needs none, or has no figure.
        remark: what it rests on, or what is missing.
        on_cpu: the same quantity measured on a CPU, with its file; empty if there is none. Never the figure of the target.
    """

    what: str
    at_least: str
    aim: str
    figure: str = ""
    met: bool | None = None
    aim_met: bool | None = None
    source: str = ""
    remark: str = ""
    on_cpu: str = ""
    gpu: str = ""

    def line(self) -> str:
        """A line of the table."""
        end = f"{self.remark} | {self.on_cpu} |"
        if not self.figure:
            return f"| {self.what} | {self.at_least} | {self.aim} | not measured | | {end}"
        verdict = {None: "not settled", True: "reached", False: "**falls short**"}[self.met]
        if self.met and self.aim_met:
            verdict = "reached, and the aim"
        source = f"{self.gpu}, `{self.source}`" if self.gpu else f"`{self.source}`"
        return f"| {self.what} | {self.at_least} | {self.aim} | {self.figure} ({verdict}) | {source} | {self.remark} | {self.on_cpu} |"


def claims(results: Path, search_results: Path) -> list[Claim]:
    """Every target, in the design's order; one that is a GPU's has a line for each GPU that there is a figure of.

    Args:
        results: ``experiments/results``.
        search_results: where the scripts of ``experiments/search`` write.
    """
    beside = next((found for folder in cpus(results) if (found := _on_cpu(folder))), {})
    without = _of_gpu(results / "none", "")
    by_gpu = [_of_gpu(folder, device_name(folder)) for folder in gpus(results)]
    made: list[Claim] = []
    for place, nothing in enumerate(without):
        made += [found[place] for found in by_gpu if found[place].figure] or [nothing]
        # Where they stand in the design.
        if nothing.what == _MAKESPAN:
            made += [_simulator(search_results / "speed.json"), _gap(search_results / "quality.json")]
    return [dataclasses.replace(item, on_cpu=beside.get(item.what, "")) for item in made]


def _of_gpu(folder: Path, gpu: str) -> list[Claim]:
    """The targets that a GPU has to reach, from what was recorded on one."""
    found, failed = recorded(folder / "suite")
    base = one_each(found)
    source = f"results/{folder.name}/suite"
    made = [
        *_speedups(base, len(failed), source),
        _controls(base, source),
        *_cost_model(folder / "costmodel.json"),
        _makespan(list(base.values()), source),
        _job(base.get("torchvision:googlenet"), source),
        _load(folder / "load.json"),
        _replay(folder / "probes.json"),
    ]
    return [dataclasses.replace(item, gpu=gpu if item.figure else "") for item in made]


def _on_cpu(folder: Path) -> dict[str, str]:
    """What a CPU's results say of the same quantities, by the target's name: the figure, its file, and what it rests on."""
    found = [item for item in recorded(folder)[0] if item.batch == 1 and item.dtype == "float32"]
    counterparts = [*_cost_model(folder / "costmodel.json"), _makespan(found, f"results/{folder.name}"), _load(folder / "load.json")]
    return {item.what: f"{item.figure}, `{item.source}`: {item.remark}" for item in counterparts if item.figure}


def claims_table(results: Path, search_results: Path) -> str:
    """The section's table."""
    lines = [
        "| target | at least | aim | measured | source | remark | the same on a CPU (does not count) |",
        "|---|---|---|---|---|---|---|",
    ]
    made = claims(results, search_results)
    targets = {item.what for item in made}
    short = {item.what for item in made if item.figure and item.met is False}
    unknown = {item.what for item in made if not item.figure}
    said = f"{len(targets)} targets: {len(targets - unknown)} with a figure, {len(short)} of them fall short, {len(unknown)} not measured."
    return "\n".join([*lines, *(item.line() for item in made), "", said])


def _speedups(base: dict[str, Recorded], failed: int, source: str) -> list[Claim]:
    models = [base[name] for name in CLAIMED if name in base]
    part = "" if len(models) == len(CLAIMED) else f"{len(models)} of {len(CLAIMED)} models"
    if failed and part:
        part += f", {failed} runs failed"
    over_sequential = [(item, over) for item in models if (over := item.over_sequential) is not None]
    over_published = [(item, best["measured_us"] / item.kept_us) for item in models if (best := item.best_published) is not None]
    over_compiled = [(item, time_us / item.kept_us) for item in models if (time_us := item.time_us(*COMPILED[1:])) is not None]
    return [
        _mean(
            "tuned over the sequential CUDA graph, geometric mean of eight models",
            over_sequential,
            1.4,
            1.7,
            part,
            source,
            never_slower=False,
        ),
        _mean("over the best other strategy in the same run", over_published, 1.05, 1.15, part, source, never_slower=True),
        _mean("over `torch.compile` max-autotune + CUDA graphs", over_compiled, 1.0, 1.25, part, source, never_slower=True),
    ]


def _mean(
    what: str, ratios: Sequence[tuple[Recorded, float]], least: float, aim: float, part: str, source: str, *, never_slower: bool
) -> Claim:
    at_least = ("never slower, " if never_slower else "") + (f"{least:.2f}x" if least > 1.0 else "")
    at_least = at_least.removesuffix(", ")
    if not ratios:
        return Claim(what, at_least, f"{aim:.2f}x", remark="`h200/suite.py` has not run")
    mean = geometric_mean([value for _, value in ratios])
    worst, value = min(ratios, key=lambda item: item[1])
    # What the noise of its own run cannot tell from equal is not slower.
    slower = [item for item, value in ratios if value < 1.0 - item.report["noise_floor_pct"] / 100.0]
    met: bool | None = mean >= least and not (never_slower and slower)
    if part and met:
        met = None
    remark = f"lowest {value:.2f}x on {worst.model}" + (f"; {part}" if part else "")
    if never_slower and slower:
        remark += f"; slower beyond noise on {', '.join(item.model for item in slower)}"
    aimed = None if part else mean >= aim
    return Claim(what, at_least, f"{aim:.2f}x", f"{mean:.2f}x", met, aimed, source, remark)


def _controls(base: dict[str, Recorded], source: str) -> Claim:
    what, target = "negative controls (ResNet-50, MobileNetV2, DenseNet)", "at most 0.5 % slower, sequential chosen"
    controls = [base[name] for name in CONTROLS if name in base]
    if not controls:
        return Claim(what, target, "same", remark="`h200/suite.py` has not run")
    slower = [(item, 100.0 * (item.kept_us / (item.time_us("sequential", "sequential_wide") or item.kept_us) - 1.0)) for item in controls]
    worst, percent = max(slower, key=lambda item: item[1])
    changed = [item.model for item in controls if not item.report["chosen"].startswith("sequential")]
    met: bool | None = percent <= 0.5 and not changed
    if met and len(controls) < len(CONTROLS):
        met = None
    remark = f"worst: {worst.model}; {len(controls)} of {len(CONTROLS)}" + (f"; not sequential: {', '.join(changed)}" if changed else "")
    return Claim(what, target, "same", f"{percent:+.1f} %", met, met, source, remark)


_LEAST_FAMILIES = 8  # as many models as the other targets are means of


def _cost_model(path: Path) -> list[Claim]:
    error = Claim("cost model, unseen model families, contended rows, median APE", "20 %", "10 %", remark="`h200/costmodel.py` has not run")
    cover = Claim("90 % interval coverage", "85 to 95 %", "88 to 92 %", remark="`h200/costmodel.py` has not run")
    if not path.is_file():
        return [error, cover]
    document = json.loads(path.read_text(encoding="utf-8"))
    chosen = document["decision"]["chosen"]
    metrics = document["held_out"].get(chosen, {})
    source = f"results/{path.parent.name}/{path.name}"
    store = document["store"]
    families = len(store["families"])
    remark = f"{chosen}, {document['label']}, {store['pairs']} pairs of {families} model families"
    settled = not store["simulated"] and families >= _LEAST_FAMILIES
    value, share = metrics.get("contended_median_ape_pct"), metrics.get("coverage_pct")
    # Most contended rows just wait for the other, and that is easily told.
    harder = document.get("not_waiting", {}).get(chosen, {}).get("contended_median_ape_pct")
    told = remark if harder is None else f"{remark}; {harder:.1f} % where neither waits until the other is done"
    # Where all pairs slow down alike, a small error is no merit.
    constant = document["held_out"].get("constant", {}).get("contended_median_ape_pct")
    if constant is not None:
        told += f"; the same slowdown for all is off by {constant:.1f} %"
    return [
        _below(error, value, 20.0, 10.0, source, told, settled=settled),
        Claim(
            cover.what,
            cover.at_least,
            cover.aim,
            f"{share:.1f} %" if share is not None else "",
            (85 <= share <= 95) if share is not None and settled else None,
            (88 <= share <= 92) if share is not None and settled else None,
            source,
            remark,
        ),
    ]


def _below(
    claim: Claim,
    value: float | None,
    least: float,
    aim: float,
    source: str,
    remark: str,
    *,
    settled: bool = True,
    unit: str = "%",
    digits: int = 1,
) -> Claim:
    if value is None:
        return claim
    met, aimed = (value <= least, value <= aim) if settled else (None, None)
    return Claim(claim.what, claim.at_least, claim.aim, f"{value:.{digits}f} {unit}", met, aimed, source, remark)


def _makespan(found: Sequence[Recorded], source: str) -> Claim:
    claim = Claim(_MAKESPAN, "15 %", "8 %", remark="`h200/suite.py` has not run")
    errors = [
        100.0 * abs(row["predicted_us"] / row["measured_us"] - 1.0)
        for item in found
        for row in item.report["strategies"]
        if row["predicted_us"] and row["measured_us"] and not row["is_baseline"]
    ]
    if not errors:
        return claim
    return _below(claim, statistics.median(errors), 15.0, 8.0, source, f"median of {len(errors)} schedules of {len(found)} models")


def _document(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return None if found.get("smoke") or found.get("machine", {}).get("smoke") else found


def _simulator(path: Path) -> Claim:
    claim = Claim(
        "fluid simulator, 100 operators, 4 lanes, one core", "50,000 schedules/s", "150,000/s", remark="`search/speed.py` has not run"
    )
    document = _document(path)
    row = first(row for row in document["evaluations"]["rows"] if row[:2] == [100, 4]) if document is not None else None
    if row is None:
        return claim
    alone, inside = row[2], row[3]
    remark = f"random lanes; {inside:,} inside annealing"
    return Claim(
        claim.what, claim.at_least, claim.aim, f"{alone:,}/s", alone >= 50_000, alone >= 150_000, f"results/sim/{path.name}", remark
    )


def _gap(path: Path) -> Claim:
    claim = Claim("search gap to the best known at 100,000 evaluations", "1 %", "0.5 %", remark="`search/quality.py` has not run")
    document = _document(path)
    if document is None:
        return claim
    # Seeds differ by as much as the median graph's gap, so each graph has its median of several.
    table = document["against_heft"]
    gaps = [100.0 * row[table["header"].index("found over best known")] for row in table["rows"]]
    remark = f"median of {len(gaps)} graphs, each with its median of three seeds; worst {max(gaps):.2f} %; under the model"
    return _below(claim, statistics.median(gaps), 1.0, 0.5, f"results/sim/{path.name}", remark)


def _job(googlenet: Recorded | None, source: str) -> Claim:
    claim = Claim("a balanced tuning job for GoogLeNet on one GPU", "3 min", "1 min", remark="`h200/suite.py` has not run")
    if googlenet is None:
        return claim
    seconds = googlenet.report["search_s"]
    remark = "measuring, searching, verifying and timing all baselines; compiling them, which no tuning job needs, is not counted"
    if googlenet.lowering_asked:
        remark = f"lowering {googlenet.report['lowering']} alone; {remark}"
    return _below(claim, seconds, 180.0, 60.0, f"{source}/{googlenet.path.name}", remark, unit="s", settled=not googlenet.lowering_asked)


def _load(path: Path) -> Claim:
    claim = Claim(
        "load to first inference, 300 operators, torch and the model there",
        "2 s",
        "0.5 s",
        remark="`serve/load.py --device cuda` has not run",
    )
    document = _document(path)
    case = first(case for case in document["cases"] if case["model"] == "tower:300") if document is not None else None
    if case is None:
        return claim
    low, high = case["median_ci_s"]
    remark = f"{case['operators']} operators, median of {case['repeats']} processes, 95 % {low:.2f} to {high:.2f} s"
    source = f"results/{path.parent.name}/{path.name}"
    return _below(claim, case["total_s"]["p50"], 2.0, 0.5, source, remark, unit="s", digits=2)


def _replay(path: Path) -> Claim:
    claim = Claim("replay overhead over the raw graph", "20 us", "5 us", remark="`h200/probe.py` has not run")
    document = _document(path)
    data = document["probes"].get("P12", {}).get("data", {}) if document is not None else {}
    if not data.get("call_us"):
        return claim
    over = statistics.median(data["call_us"]) - statistics.median(data["bare_replay_us"])
    return _below(claim, over, 20.0, 5.0, f"results/{path.parent.name}/probes.json", "probe P12: copies in and out included", unit="us")
