"""Compare every strategy and baseline on a list of models, each in a fresh process, and keep what was measured.

    python experiments/suite.py --device cpu torchvision:googlenet autosched:randwire

writes ``experiments/results/<device>/<model>.json``: the report of ``autosched compare --json`` beside the machine, the versions
and the commit. The lowering is the job's choice, and the report says what it tried. ``--more`` runs other models, batches and dtypes with
little effort, into the folder ``more``. ``experiments/tables.py`` makes the tables of the README from these files. ``--smoke`` runs one
tiny model.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(HERE.parent))

from autosched.core.errors import DeviceMissing  # noqa: E402
from experiments.calls import LATE, read_json, run_to_end, write_json  # noqa: E402
from experiments.devices import commit, key_of, results_of, title  # noqa: E402

CPU_SUITE = (
    "torchvision:googlenet",
    "torchvision:inception_v3",
    "timm:hrnet_w18",
    "autosched:randwire",
    "autosched:deepfm",
    "autosched:lstm",
    "autosched:tagger",
    "autosched:speech",
    "autosched:moe",
    "autosched:decoder",
    "autosched:decoder_int8",
    "autosched:encoder_int8",
    "transformers:bert",
    "transformers:t5",
    "torchvision:squeezenet1_1",
    "torchvision:resnet50",
    "torchvision:mobilenet_v2",
)
# With their batch and dtype.
CPU_MORE = (
    ("timm:convnext_tiny", 1, "float32"),
    ("timm:efficientnet_b0", 1, "float32"),
    ("timm:mobilenetv3_large_100", 1, "float32"),
    ("timm:resnet18", 8, "float32"),
    ("timm:swin_tiny_patch4_window7_224", 1, "float32"),
    ("timm:vit_small_patch16_224", 1, "float32"),
    ("autosched:decoder", 1, "bfloat16"),
    ("timm:vit_small_patch16_224", 1, "bfloat16"),
    ("torchvision:resnet50", 1, "bfloat16"),
    ("transformers:bert", 1, "bfloat16"),
    ("transformers:bert", 1, "float16"),
    ("transformers:t5", 1, "bfloat16"),
)
# Characters of what a failed run said that are kept: tracebacks of compilers are long.
_LAST_WORDS = 10_000
_PACKAGES = ("numpy", "triton", "cuda-bindings", "torchvision", "timm", "transformers", "numba", "optuna", "xgboost-cpu", "xgboost")


@dataclass(frozen=True)
class Run:
    """One ``autosched compare``; options left ``None`` are the command's own defaults."""

    model: str
    device: str
    effort: str = "balanced"
    budget: str | None = None
    strategies: str | None = None
    compiled: bool = True
    batch: int | None = None
    dtype: str | None = None
    seed: int = 0
    lowering: str | None = None

    def command(self) -> list[str]:
        """What is run. ``-P``: the checkout's folders must not hide other packages."""
        command = [sys.executable, "-P", "-m", "autosched", "compare", self.model, "--json"]
        options = {
            "device": self.device,
            "effort": self.effort,
            "budget": self.budget,
            "strategies": self.strategies,
            "batch": self.batch,
            "dtype": self.dtype,
            "seed": self.seed,
            "lowering": self.lowering,
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)] if value is not None else []
        return command if self.compiled else [*command, "--no-compiled"]


def stem_of(model: str) -> str:
    """What a model's result files are called: its name, without the colon that not every file system takes."""
    return model.replace(":", "_")


def case_stem(model: str, batch: int, dtype: str) -> str:
    """The same where a model has several files, by batch and dtype."""
    return f"{stem_of(model)}_b{batch}_{dtype}"


def environment() -> dict[str, object]:
    """Where and with what the figures were taken."""
    import torch

    return {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": title(key_of("cpu")),
        "gpu": _gpu(),
    }


def _gpu() -> str:
    """What the GPU is called, and more where its own tool tells; empty where there is none."""
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    if said := _said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]):
        return said
    try:
        return key_of("cuda").name
    except DeviceMissing:
        return ""


def _said(command: list[str]) -> str:
    """The first line a command prints; empty if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""


def version_of(package: str) -> str:
    """Empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure(run: Run, timeout_s: float, extra_environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run it in a process of its own: the report, or ``{"error": {"message", "exit_code", ...}}`` (``-1``: it ran out of time)."""
    ended = run_to_end(run.command(), timeout_s, environment={**os.environ, **(extra_environment or {})})
    if ended.status is None:
        message = f"no result within {timeout_s:.0f} s"
        return {"error": {"message": message, "exit_code": LATE, "last_words": ended.err[-_LAST_WORDS:]}}
    try:
        found: dict[str, Any] = json.loads(ended.out)
    except ValueError:
        return {"error": {"message": ended.err[-_LAST_WORDS:] or "it printed nothing", "exit_code": ended.status}}
    return found


def record(
    run: Run, target: Path, timeout_s: float, extra_environment: dict[str, str] | None = None, *, keep: bool = False
) -> dict[str, Any]:
    """Measure ``run`` and write what came out, with where and how, to ``target``.

    Args:
        keep: a result of an earlier run stays where this one has none; that it had so much time, and how it ended, is added there.
    """
    begin = time.monotonic()
    report = measure(run, timeout_s, extra_environment)
    document = {
        "environment": environment(),
        "run": {"command": run.command()[4:], "batch": run.batch or 1, "dtype": run.dtype or "float32", "limit_s": round(timeout_s)},
        "took_s": round(time.monotonic() - begin, 1),
        "report": report,
    }
    earlier = read_json(target) if keep else None
    if "error" in report and earlier is not None and "error" not in earlier["report"]:
        limit_s = max(round(timeout_s), earlier["run"]["limit_s"])
        write_json(target, {**earlier, "run": {**earlier["run"], "limit_s": limit_s}, "again": report["error"]})
    else:
        write_json(target, document)
    return document


def outcome(report: dict[str, Any]) -> str:
    """One line of what came out."""
    if "error" in report:
        return f"failed: {(str(report['error'].get('message', '')).strip().splitlines() or ['no reason given'])[-1][:200]}"
    return str(report.get("verdict", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--effort", default="balanced")
    parser.add_argument("--budget", default=None)
    parser.add_argument("--strategies", default=None)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--save-problems", type=Path, default=None, help="also write each graph with its recorded costs into this folder")
    parser.add_argument("--more", action="store_true", help="the other models, batches and dtypes, with --effort quick")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out or results_of(arguments.device)
    if arguments.more:
        for model, batch, dtype in CPU_MORE:
            if not arguments.models or model in arguments.models:
                run = Run(model, arguments.device, "quick", compiled=arguments.compiled, batch=batch, dtype=dtype)
                document = record(run, out / "more" / f"{case_stem(model, batch, dtype)}.json", arguments.timeout)
                print(f"{model}, batch {batch}, {dtype}: {outcome(document['report'])}", flush=True)
        return
    models = arguments.models or list(CPU_SUITE)
    if arguments.smoke:
        models, arguments.effort, arguments.budget, arguments.compiled = ["autosched:toy"], "quick", "6s", False
    for model in models:
        run = Run(model, arguments.device, arguments.effort, arguments.budget, arguments.strategies, arguments.compiled)
        document = record(run, out / f"{stem_of(model)}.json", arguments.timeout)
        print(f"{model}: {outcome(document['report'])}", flush=True)
        if arguments.save_problems is not None:
            # From the journal that the comparison has just filled: hardly anything is measured again.
            script = [str(HERE / "search" / "record.py"), "--device", arguments.device, "--out", str(arguments.save_problems), model]
            subprocess.run([sys.executable, "-P", *script], timeout=arguments.timeout, check=False)


if __name__ == "__main__":
    main()
