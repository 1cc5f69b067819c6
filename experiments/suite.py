"""Compare every strategy and baseline on a list of models, each in a fresh process, and keep what was measured.

    python experiments/suite.py --device cpu torchvision:googlenet autosched:randwire

writes ``experiments/results/<device>/<model>.json``: the report of ``autosched compare --json`` beside the machine, the versions
and the commit. ``experiments/tables.py`` makes the tables of the README from these files. ``--smoke`` runs one tiny model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

CPU_SUITE = (
    "torchvision:googlenet",
    "torchvision:inception_v3",
    "timm:hrnet_w18",
    "autosched:randwire",
    "autosched:deepfm",
    "autosched:lstm",
    "autosched:moe",
    "transformers:bert",
    "transformers:t5",
    "torchvision:squeezenet1_1",
    "torchvision:resnet50",
    "torchvision:mobilenet_v2",
)


def environment() -> dict[str, object]:
    """Where and with what the figures were taken."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def run_one(model: str, arguments: argparse.Namespace) -> dict[str, object]:
    """One ``autosched compare`` in a process of its own."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "autosched",
        "compare",
        model,
        "--device",
        arguments.device,
        "--effort",
        arguments.effort,
        "--json",
    ]
    if arguments.budget:
        command += ["--budget", arguments.budget]
    if arguments.strategies:
        command += ["--strategies", arguments.strategies]
    if not arguments.compiled:
        command.append("--no-compiled")
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, check=False)
    if not done.stdout.strip():
        return {"error": {"message": done.stderr[-2000:], "exit_code": done.returncode}}
    result: dict[str, object] = json.loads(done.stdout)
    return result


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
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    models = arguments.models or list(CPU_SUITE)
    if arguments.smoke:
        models, arguments.effort, arguments.budget, arguments.compiled = ["autosched:toy"], "quick", "6s", False
    out: Path = arguments.out or HERE / "results" / arguments.device
    out.mkdir(parents=True, exist_ok=True)
    for model in models:
        report = run_one(model, arguments)
        target = out / f"{model.replace(':', '_')}.json"
        target.write_text(json.dumps({"environment": environment(), "report": report}, indent=1) + "\n")
        print(f"{model}: {report.get('verdict') or report.get('error')}", flush=True)


if __name__ == "__main__":
    main()
