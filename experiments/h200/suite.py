"""The suite on an H200: every strategy and every baseline on every model, in calls that each end within nine minutes.

    python experiments/h200/suite.py                                  # whatever is not measured yet, as far as nine minutes go
    python experiments/h200/suite.py torchvision:googlenet timm:nasnetalarge --deadline 520
    python experiments/h200/suite.py --smoke --out somewhere          # the CPU, one tiny model; its figures mean nothing

Each model, batch and data type is one ``autosched compare`` in a process of its own: eager, the sequential CUDA graph, ``torch.compile``
(default, max-autotune, max-autotune with combo kernels and frozen weights), every strategy, and the tuned schedule, interleaved in one
run; one JSON file each. A call begins no run that would not fit and skips what has a file, so calling it again goes on. Exit status: 0
everything asked for has a result, 10 something is left for the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.config import parse_seconds  # noqa: E402
from experiments.suite import Run, outcome, record  # noqa: E402

RESULTS = ROOT / "experiments" / "results" / "h200" / "suite"
CLAIMED = (
    "torchvision:googlenet",
    "torchvision:inception_v3",
    "timm:nasnetalarge",
    "torchvision:squeezenet1_1",
    "autosched:randwire",
    "autosched:deepfm",
    "transformers:bert",
    "transformers:t5",
)
CONTROLS = ("torchvision:resnet50", "torchvision:mobilenet_v2", "torchvision:densenet201")
FURTHER = ("timm:hrnet_w18", "autosched:lstm", "autosched:moe")
BATCHED = ("torchvision:googlenet", "torchvision:inception_v3", "transformers:bert")
DTYPES = ("float32", "bfloat16")
LEFT = 10
# The end of a process, and the writing of its file.
_SPARE_S = 8.0
# Of a run, besides its budget and compiling baselines: importing, capturing three lowerings, starting nine processes, the last rounds.
_AROUND_S = 110.0
# Three baselines, and Inductor's code for the lowering in the mode of the fastest of them.
_COMPILED = 4


@dataclass(frozen=True)
class Case:
    """One run of the suite."""

    model: str
    batch: int
    dtype: str

    @property
    def file(self) -> str:
        """Name of its result."""
        return f"{self.model.replace(':', '_')}_b{self.batch}_{self.dtype}.json"


def cases(models: Sequence[str] = (), batches: Sequence[int] = (), dtypes: Sequence[str] = ()) -> Iterator[Case]:
    """What is asked for, the most telling first; nothing given means the whole suite of issue and design."""
    chosen = list(models) or [*CLAIMED, *CONTROLS, *FURTHER]
    for batch in batches or (1, 4, 16):
        for dtype in dtypes or DTYPES:
            for model in chosen:
                # Named batches are honoured for every model; by default larger ones are for three.
                if batches or batch == 1 or model in BATCHED:
                    yield Case(model, batch, dtype)


def finished(case: Case, folders: Sequence[Path], window_s: float, *, failures: bool = True) -> bool:
    """Whether a result is there. One that only ran out of time counts if it had all the time that a call can give.

    Args:
        failures: whether a run that failed counts as well; it would most likely fail again.
    """
    for folder in folders:
        path = folder / case.file
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            error = found["report"].get("error")
            late = error is not None and error.get("exit_code") == -1 and found["run"]["limit_s"] < 0.9 * window_s
            if error is None or (failures and not late):
                return True
    return False


def compile_limit_s(asked_s: float, window_s: float, budget_s: float) -> float:
    """Seconds for each compilation of a whole model, so that a run in which every one needs all of them still ends within the window.

    A baseline that is late costs its row; a run that is late costs every row.
    """
    return max(10.0, min(asked_s, (window_s - budget_s - _AROUND_S) / _COMPILED))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=[])
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS, help="default: $OUT")
    parser.add_argument("--done", type=Path, default=RESULTS, help="results of earlier calls, skipped like those in --out")
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds for this call")
    parser.add_argument("--expect", type=float, default=150.0, help="seconds of a run, until one has shown how long it takes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--effort", default="balanced")
    parser.add_argument("--budget", default="60s", help="of measuring and searching, for each run")
    parser.add_argument("--compile-limit", type=float, default=150.0, help="most seconds for one torch.compile baseline")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--retry", action="store_true", help="run again what failed in earlier calls")
    parser.add_argument("--list", action="store_true", help="say what is done and what is left, and run nothing")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    begin = time.monotonic()
    wanted = list(cases(arguments.models, arguments.batches, arguments.dtypes))
    if arguments.smoke:
        wanted = [Case("autosched:toy", 1, "float32")]
        arguments.device, arguments.effort, arguments.budget, arguments.compiled, arguments.expect = "cpu", "quick", "6s", False, 60.0
        if arguments.out == RESULTS:
            parser.error("--smoke needs --out: its figures must not lie among results")
    window_s = arguments.deadline - _SPARE_S
    folders = (arguments.out, arguments.done)
    left = [case for case in wanted if not finished(case, folders, window_s, failures=not arguments.retry)]
    if arguments.list:
        for case in wanted:
            done = "done" if finished(case, folders, window_s, failures=False) else "failed"
            print(f"{'left' if case in left else done:6}  {case.file}")
        return LEFT if left else 0
    took_s: list[float] = []
    while left:
        remaining_s = window_s - (time.monotonic() - begin)
        # A call's first run has all the time there is: what does not fit into that fits nowhere.
        if remaining_s < min(1.1 * max(took_s, default=arguments.expect), 0.95 * window_s):
            break
        case = left.pop(0)
        run = Run(
            case.model,
            arguments.device,
            arguments.effort,
            arguments.budget,
            compiled=arguments.compiled,
            batch=case.batch,
            dtype=case.dtype,
        )
        limit_s = compile_limit_s(arguments.compile_limit, window_s, parse_seconds(arguments.budget))
        limits = {"AUTOSCHED_COMPILE_LIMIT_S": f"{limit_s:.0f}"}
        document = record(run, arguments.out / case.file, remaining_s, limits)
        took_s.append(document["took_s"])
        print(f"{case.file} in {document['took_s']:.0f} s: {outcome(document['report'])}", flush=True)
        if not finished(case, (arguments.out,), window_s):
            left.insert(0, case)
            break
    failed = [case for case in wanted if case not in left and not finished(case, folders, window_s, failures=False)]
    if failed:
        print(f"failed: {', '.join(case.file for case in failed)}; --retry runs them again", flush=True)
    if left:
        print(f"{len(left)} of {len(wanted)} runs are left, the next is {left[0].file}; call again", flush=True)
    return LEFT if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
