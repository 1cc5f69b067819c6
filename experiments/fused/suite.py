"""How coarse operators should be: sequential and tuned of each lowering, beside ``torch.compile``, and what compiling regions costs.

    python experiments/fused/suite.py --device cpu                     # every model of the list that has no result yet
    python experiments/fused/suite.py --device cuda timm:nasnetalarge
    python experiments/fused/suite.py --smoke --out somewhere          # one tiny model, seconds; its figures mean nothing

Each lowering is one ``autosched compare`` in a process of its own, in which everything is interleaved; ``torch.compile`` (on a GPU its
default, max-autotune, and max-autotune with combo kernels and frozen weights; on a CPU with frozen weights) is measured in every
one of them, so that lowerings can be set against it as well as against each other. ``fused`` is run twice, the second time with all
regions at hand: the difference of the notes on compiling is what the cache saves. One file for each model, written after every run:
``experiments/results/<device>/fused/<model>.json``; calling it again goes on with the runs that are missing there, with ``--retry`` also
with those that failed. Exit status: 0 everything asked for has a result, 1 the result of one is that it failed, 10 something is left for
the next call.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.config import parse_seconds  # noqa: E402
from autosched.pipeline.budget import budget_for  # noqa: E402
from experiments.calls import LEFT, Call, compile_total_s, read_json, write_json  # noqa: E402
from experiments.devices import results_of  # noqa: E402
from experiments.suite import Run, environment, measure, outcome, stem_of  # noqa: E402

LOWERINGS = ("rewritten", "fused", "inductor")
CPU_MODELS = (
    "autosched:deepfm",
    "autosched:moe",
    "autosched:lstm",
    "autosched:randwire",
    "torchvision:squeezenet1_1",
    "torchvision:googlenet",
    "torchvision:densenet121",
    "transformers:bert",
    "transformers:t5",
)
CUDA_MODELS = (
    "torchvision:googlenet",
    "torchvision:inception_v3",
    "timm:nasnetalarge",
    "torchvision:squeezenet1_1",
    "autosched:randwire",
    "autosched:deepfm",
    "transformers:bert",
    "transformers:t5",
    "torchvision:resnet50",
    "torchvision:mobilenet_v2",
    "torchvision:densenet121",
)
SEQUENTIAL = ("sequential", "sequential_wide")
COMPILED = ("torch_compile", "compiled", "max_autotune", "max_autotune_combo")


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Sequential, kept, best found and ``torch.compile`` of one comparison, in microseconds, and what was said of compiling."""
    if "error" in report:
        return {"error": report["error"]["message"]}
    rows = {row["name"]: row for row in report["strategies"] if row["measured_us"] is not None}
    sequential = [rows[name]["measured_us"] for name in SEQUENTIAL if name in rows]
    return {
        "lowering": report["lowering"],
        "operators": report["operators"],
        "sequential_us": min(sequential) if sequential else None,
        "tuned_us": rows["tuned"]["measured_us"] if "tuned" in rows else None,
        "kept": report["chosen"],
        "kept_us": rows[report["chosen"]]["measured_us"] if report["chosen"] in rows else None,
        "torch_compile_us": {name: rows[name]["measured_us"] for name in COMPILED if name in rows},
        "noise_floor_pct": report["noise_floor_pct"],
        "unstable": report["unstable"],
        "notes": [note for note in report["notes"] if "compil" in note or "lowering" in note],
    }


def runs_of(lowerings: Sequence[str]) -> list[str]:
    """Names of a model's runs, in order."""
    return [*lowerings, "fused_again"] if "fused" in lowerings else list(lowerings)


def read(target: Path) -> dict[str, Any]:
    """What earlier calls found; empty if nothing."""
    found: dict[str, Any] = read_json(target) or {}
    return found


def open_runs(found: dict[str, Any], lowerings: Sequence[str], call: Call, caches: Path, *, retry: bool = False) -> list[str]:
    """Runs that are still to be made. Two belong together: ``fused_again`` finds what ``fused`` has compiled, or says nothing."""
    runs = found.get("runs", {})
    done = [name for name, run in runs.items() if call.settled(run["report"], run.get("limit_s", math.inf))]
    done = [name for name in done if not (retry and "error" in runs[name]["report"])]
    left = [name for name in runs_of(lowerings) if name not in done]
    if "fused_again" in left and "fused" not in left and not caches.is_dir():
        return ["fused", *left]
    return left


def run_model(model: str, arguments: argparse.Namespace, lowerings: Sequence[str], target: Path, call: Call, caches: Path) -> bool:
    """Every lowering of one model that has no result yet, as far as the call's time goes; whether all have one now.

    They share ``caches``, a folder that is empty at first, so that the first run of ``fused`` compiles everything; it outlives the call
    where something is left.
    """
    found = {} if arguments.again else read(target)
    left = open_runs(found, lowerings, call, caches, retry=arguments.retry)
    found = {"environment": environment(), "model": model, "runs": {}, "took_s": 0.0, **found}
    while left and call.fits():
        name = left.pop(0)
        lowering, again = name.removesuffix("_again"), name.endswith("_again")
        if name == "fused":
            shutil.rmtree(caches, ignore_errors=True)
        run = Run(model, arguments.device, arguments.effort, arguments.budget, None, arguments.compiled and not again, lowering=lowering)
        limit_s = call.limit_s
        budget_s = budget_for(run.effort, None if run.budget is None else parse_seconds(run.budget)).total_s
        kept = {"AUTOSCHED_CACHE": f"{caches}/autosched", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
        if math.isfinite(limit_s):
            kept["AUTOSCHED_COMPILE_TOTAL_S"] = f"{compile_total_s(limit_s, budget_s):.0f}"
        begin = time.monotonic()
        report = measure(run, limit_s, kept)
        took_s = time.monotonic() - begin
        call.took(took_s)
        found["runs"][name] = {"command": run.command()[4:], "limit_s": round(limit_s), "summary": summary(report), "report": report}
        found["took_s"] = round(found["took_s"] + took_s, 1)
        # After every run: a call that is ended keeps those before.
        write_json(target, found)
        print(f"{model} {name}: {outcome(report)}", flush=True)
        if not call.settled(report, limit_s):
            left.insert(0, name)
            break
    if not left:
        shutil.rmtree(caches, ignore_errors=True)
    return not left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lowerings", default=",".join(LOWERINGS))
    parser.add_argument("--effort", default="balanced")
    parser.add_argument("--budget", default=None)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout", type=float, default=1500.0, help="most seconds of one run")
    parser.add_argument("--deadline", type=float, default=None, help="seconds this call may take; by default 520 on a GPU, else no limit")
    parser.add_argument("--expect", type=float, default=200.0, help="seconds of a run, until one has shown how long it takes")
    parser.add_argument("--work", type=Path, default=ROOT / ".autosched" / "fused", help="caches of models that are not done yet")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--again", action="store_true", help="measure again what has a file")
    parser.add_argument("--retry", action="store_true", help="run again what failed in earlier calls")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    models = arguments.models or (CUDA_MODELS if arguments.device == "cuda" else CPU_MODELS)
    lowerings = [name.strip() for name in arguments.lowerings.split(",") if name.strip()]
    if arguments.smoke:
        models, arguments.effort, arguments.budget, arguments.compiled = ("autosched:toy",), "quick", "6s", False
    out: Path = arguments.out or results_of(arguments.device) / "fused"
    deadline_s = arguments.deadline or (520.0 if arguments.device == "cuda" else math.inf)
    call = Call(deadline_s, expect_s=arguments.expect, longest_s=arguments.timeout)
    left, failed = [], []
    for model in models:
        work, target = arguments.work / arguments.device / stem_of(model), out / f"{stem_of(model)}.json"
        if not run_model(model, arguments, lowerings, target, call, work):
            left.append(model)
        if any("error" in run["report"] for run in read(target).get("runs", {}).values()):
            failed.append(model)
    if left:
        print(f"{len(left)} of {len(models)} models are not done, the next is {left[0]}; call again", flush=True)
    return LEFT if left else int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
