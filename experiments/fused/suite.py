"""How coarse operators should be: sequential and tuned of each lowering, beside ``torch.compile``, and what compiling regions costs.

    python experiments/fused/suite.py --device cpu                     # every model of the list that has no result yet
    python experiments/fused/suite.py --device cuda timm:nasnetalarge
    python experiments/fused/suite.py --smoke --out somewhere          # one tiny model, seconds; its figures mean nothing

Each lowering is one ``autosched compare`` in a process of its own, in which everything is interleaved; ``torch.compile`` (on a GPU its
default, max-autotune, and max-autotune with combo kernels and frozen weights; on a CPU with frozen weights) is measured in every
one of them, so that lowerings can be set against it as well as against each other. ``fused`` is run twice, the second time with all
regions at hand: the difference of the notes on compiling is what the cache saves. One file for each model, written after every run:
``experiments/results/<device>/fused/<model>.json``; a model whose file lacks a run is measured again, all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.suite import Run, environment, measure, outcome, results_of  # noqa: E402

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


@dataclass(frozen=True)
class LoweredRun(Run):
    """One comparison in one lowering."""

    lowering: str = "rewritten"

    def command(self) -> list[str]:
        """As ``Run.command``."""
        return [*super().command(), "--lowering", self.lowering]


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


def complete(target: Path, lowerings: Sequence[str]) -> bool:
    """Whether a result has every run that is asked for."""
    if not target.exists():
        return False
    return set(runs_of(lowerings)) <= set(json.loads(target.read_text(encoding="utf-8"))["runs"])


def run_model(model: str, arguments: argparse.Namespace, lowerings: Sequence[str], target: Path) -> None:
    """Every lowering of one model, in a cache folder of its own, so that the first run of ``fused`` compiles everything."""
    found: dict[str, Any] = {"environment": environment(), "model": model, "runs": {}}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autosched-fused-") as folder:
        for name in runs_of(lowerings):
            lowering, again = name.removesuffix("_again"), name.endswith("_again")
            run = LoweredRun(
                model, arguments.device, arguments.effort, arguments.budget, None, arguments.compiled and not again, lowering=lowering
            )
            kept = {"AUTOSCHED_CACHE": f"{folder}/autosched", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            report = measure(run, arguments.timeout, kept)
            found["runs"][name] = {"command": run.command()[4:], "summary": summary(report), "report": report}
            found["took_s"] = round(time.monotonic() - begin, 1)
            # After every run: a call that is ended keeps those before.
            target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{model} {name}: {outcome(report)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lowerings", default=",".join(LOWERINGS))
    parser.add_argument("--effort", default="balanced")
    parser.add_argument("--budget", default=None)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout", type=float, default=1500.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--again", action="store_true", help="measure again what has a file")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    models = arguments.models or (CUDA_MODELS if arguments.device == "cuda" else CPU_MODELS)
    lowerings = [name.strip() for name in arguments.lowerings.split(",") if name.strip()]
    if arguments.smoke:
        models, arguments.effort, arguments.budget, arguments.compiled = ("autosched:toy",), "quick", "6s", False
    out: Path = arguments.out or results_of(arguments.device) / "fused"
    out.mkdir(parents=True, exist_ok=True)
    for model in models:
        target = out / f"{model.replace(':', '_')}.json"
        if not complete(target, lowerings) or arguments.again:
            run_model(model, arguments, lowerings, target)


if __name__ == "__main__":
    main()
