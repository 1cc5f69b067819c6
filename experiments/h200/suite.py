"""The suite on a GPU: every strategy and every baseline on every model, in calls that each end within nine minutes.

    python experiments/h200/suite.py                                  # whatever is not measured yet, as far as nine minutes go
    python experiments/h200/suite.py torchvision:googlenet timm:nasnetalarge --deadline 520
    python experiments/h200/suite.py --smoke --out somewhere          # the CPU, one tiny model; its figures mean nothing

Each model, batch and data type is one ``autosched compare`` in a process of its own: eager, the sequential CUDA graph, ``torch.compile``
(default, max-autotune, max-autotune with combo kernels and frozen weights), every strategy, and the tuned schedule, interleaved in one
run; one JSON file each. A call begins no run that would not fit and skips what has a file, so calling it again goes on. Where a baseline
ended because the call had too little time for it, or was left out (``--modes``), a later call that has more time, or wants it, measures
that model again, after those that have no result.
Exit status: 0 everything asked for has a result, 1 the result of one is that it failed, 10 something is left for the next call.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.config import compile_modes, parse_seconds  # noqa: E402
from autosched.core.errors import DeviceMissing  # noqa: E402
from autosched.device.cuda.baselines import MODES  # noqa: E402
from experiments.calls import LEFT, Call, another_s, compile_total_s, late_baselines, read_json  # noqa: E402
from experiments.devices import results_of  # noqa: E402
from experiments.suite import Run, case_stem, outcome, record  # noqa: E402

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
FURTHER = ("timm:hrnet_w18", "autosched:lstm", "autosched:moe", "autosched:decoder")
BATCHED = ("torchvision:googlenet", "torchvision:inception_v3", "transformers:bert")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One run of the suite."""

    model: str
    batch: int
    dtype: str
    lowering: str = ""

    @property
    def file(self) -> str:
        """Name of its result; of a lowering that was asked for, a file beside that of the job's own choice."""
        return f"{case_stem(self.model, self.batch, self.dtype)}{f'_{self.lowering}' if self.lowering else ''}.json"


def cases(models: Sequence[str] = (), batches: Sequence[int] = (), dtypes: Sequence[str] = (), lowering: str = "") -> Iterator[Case]:
    """What is asked for, the most telling first; nothing given means the whole suite of issue and design."""
    chosen = list(models) or [*CLAIMED, *CONTROLS, *FURTHER]
    for batch in batches or (1, 4, 16):
        for dtype in dtypes or DTYPES:
            for model in chosen:
                # Named batches are honoured for every model; by default larger ones are for three.
                if batches or batch == 1 or model in BATCHED:
                    yield Case(model, batch, dtype, lowering)


def finished(case: Case, folders: Sequence[Path], call: Call, *, failures: bool = True, modes: Sequence[str] = ()) -> bool:
    """Whether a result is there. One that ran out of time, or a baseline of which did, counts if it had all the time that a call can give.

    Args:
        failures: whether a run that failed counts as well; it would most likely fail again.
        modes: of ``torch.compile``, wanted beside whichever of them was measured.
    """
    for found in _found(case, folders):
        report, limit_s = found["report"], found["run"]["limit_s"]
        if "error" in report:
            if failures and call.settled(report, limit_s):
                return True
        elif not _unasked(report, modes) and (not late_baselines(report) or call.had_all(limit_s)):
            return True
    return False


def _unasked(report: dict[str, Any], modes: Sequence[str]) -> set[str]:
    """Modes that a comparison was told to leave out; none where all of them were."""
    rows = {row["name"] for row in report.get("strategies", ())}
    return set(modes) - rows if rows & {kind.value for kind in MODES} else set()


def measured(case: Case, folders: Sequence[Path]) -> bool:
    """Whether there are times, if not of every baseline."""
    return any("error" not in found["report"] for found in _found(case, folders))


def _taken(case: Case, folders: Sequence[Path]) -> str:
    """When, and of which commit, the result that there is of ``case``."""
    found = next(found["environment"] for found in _found(case, folders) if "error" not in found["report"])
    return f"{found['taken'][:10]}, commit {found['commit'][:9] or 'unknown'}"


def _found(case: Case, folders: Sequence[Path]) -> list[dict[str, Any]]:
    return [found for folder in folders if (found := read_json(folder / case.file)) is not None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=[])
    parser.add_argument("--out", type=Path, default=None, help="default: $OUT, else experiments/results/<device>/suite")
    parser.add_argument(
        "--done", type=Path, default=None, help="results of earlier calls, skipped like those in --out; default: this GPU's in results/"
    )
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds for this call")
    parser.add_argument("--expect", type=float, default=150.0, help="seconds of a run, until one has shown how long it takes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--effort", default="balanced")
    parser.add_argument("--budget", default="60s", help="of measuring and searching, for each run")
    parser.add_argument(
        "--compile-limit", type=float, default=150.0, help="most seconds for one torch.compile baseline; all have what is left"
    )
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--modes", default="", help="of torch.compile, with commas between them; by default all of them")
    parser.add_argument("--lowering", default="", help="of the operators; by default the job's choice")
    parser.add_argument("--retry", action="store_true", help="run again what failed in earlier calls")
    parser.add_argument("--list", action="store_true", help="say what is done and what is left, and run nothing")
    parser.add_argument("--smoke", action="store_true")
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    wanted = list(cases(arguments.models, arguments.batches, arguments.dtypes, arguments.lowering))
    if arguments.smoke:
        wanted = [Case("autosched:toy", 1, "float32", arguments.lowering)]
        arguments.device, arguments.effort, arguments.budget, arguments.compiled, arguments.expect = "cpu", "quick", "6s", False, 60.0
    call = Call(arguments.deadline, expect_s=arguments.expect)
    out = _folder(parser, arguments)
    folders = (out, *([arguments.done] if arguments.done is not None else _recorded(arguments.device)))
    if arguments.modes:
        os.environ["AUTOSCHED_COMPILE_MODES"] = arguments.modes
    modes = compile_modes([kind.value for kind in MODES]) if arguments.compiled else ()
    done = functools.partial(finished, modes=modes)
    left = [case for case in wanted if not done(case, folders, call, failures=not arguments.retry)]
    # What has no times comes before what lacks those of a baseline; with --retry, what has failed comes last.
    left.sort(key=lambda case: (done(case, folders, call), measured(case, folders)))
    if arguments.list:
        for case in wanted:
            state = "done" if done(case, folders, call, failures=False) else "failed"
            print(f"{'left' if case in left else state:6}  {case.file}")
        return LEFT if left else 0
    if known := [case for case in wanted if case not in left and done(case, folders, call, failures=False)]:
        told = ", ".join(f"{case.file} ({_taken(case, folders)})" for case in known)
        print(f"not measured again: {told}; to measure it again, name other folders with --out and --done", flush=True)
    late: list[Case] = []
    while left and call.fits():
        case = left.pop(0)
        run = Run(
            case.model,
            arguments.device,
            arguments.effort,
            arguments.budget,
            compiled=arguments.compiled,
            batch=case.batch,
            dtype=case.dtype,
            lowering=case.lowering or None,
        )
        limit_s, budget_s = call.limit_s, parse_seconds(arguments.budget)
        total_s = compile_total_s(limit_s, budget_s)
        limits = {"AUTOSCHED_COMPILE_LIMIT_S": f"{arguments.compile_limit:.0f}", "AUTOSCHED_COMPILE_TOTAL_S": f"{total_s:.0f}"}
        document = record(run, out / case.file, limit_s, limits, keep=True)
        # One model whose compilers were slow keeps no other from its turn.
        call.took(another_s(document["took_s"], budget_s, compiled=arguments.compiled))
        report = document["report"]
        slow = f"; no time for {', '.join(names)}" if (names := late_baselines(report)) else ""
        print(f"{case.file} in {document['took_s']:.0f} s: {outcome(report)}{slow}", flush=True)
        if not call.settled(report, limit_s):
            left.insert(0, case)
            break
        if not done(case, (out,), call):
            late.append(case)
    left += late
    failed = [case for case in wanted if case not in left and not done(case, folders, call, failures=False)]
    if failed:
        print(f"failed: {', '.join(case.file for case in failed)}; --retry runs them again", flush=True)
    if left:
        print(f"{len(left)} of {len(wanted)} runs are left, the next is {left[0].file}; call again", flush=True)
    return LEFT if left else int(bool(failed))


def _folder(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Path:
    """Where results go: by default the folder of the device that is measured on, so that a rehearsal never stands in a device's place."""
    if arguments.out is not None or os.environ.get("OUT"):
        return Path(arguments.out or os.environ["OUT"])
    if arguments.smoke:
        parser.error("--smoke needs --out: its figures must not lie among results")
    if found := _recorded(arguments.device):
        return found[0]
    return parser.error("there is no GPU here to be named after; give --out")


def _recorded(device: str) -> list[Path]:
    """The folder of what is recorded of this machine's device; none of another's, and none where there is no GPU: what is left may be asked
    there too."""
    try:
        return [results_of(device) / "suite"]
    except DeviceMissing:
        return []


if __name__ == "__main__":
    raise SystemExit(main())
