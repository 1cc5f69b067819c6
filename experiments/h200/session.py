"""Everything that a GPU is wanted for, in order, as far as the given seconds go; call it again until it exits with 0.

    python experiments/h200/session.py --out gpu-session --seconds 540      # three of these are half an hour
    python experiments/h200/session.py --out gpu-session --list             # the plan, and what is done and left; runs nothing
    python experiments/h200/session.py --out somewhere --smoke               # no GPU: every command's own rehearsal; figures mean nothing

Each step is one command of this folder or its neighbours, a process with a time limit of its own. All of them write under ``--out``, in a
folder that is named after the GPU (``h100``, ``h200``, ...): a later call may find another one, which then begins anew. They go on
where they were stopped, and may be run by hand as well: the commands stand at the top of their logs, ``logs/<step>.log``. A step first gets
the seconds of the plan, over all calls together; when every step has had its own, what is left goes to those that are not done. What does
not fit into the rest of a call waits for the next one, and something shorter goes before it. A step that fails keeps no other from its turn
and is not run again without ``--retry``, and then, of tests, only those that have not passed. ``--archive FILE`` keeps all of it in a file
as well, but for compiled code, new after every result, and goes on from that where ``--out`` is not there. What jobs have measured and
tuned is in it, in ``cache`` by commit, unless ``AUTOSCHED_CACHE`` names another folder. Exit status: 0 all is done, 1 all has been run and
something failed, 10 something is left for the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.errors import DeviceMissing  # noqa: E402
from autosched.doctor import State  # noqa: E402
from autosched.runtime.cuda.key import cuda_device_key  # noqa: E402
from experiments.calls import LEFT, Call, read_json, run_logged, write_json  # noqa: E402
from experiments.devices import commit, folder_name  # noqa: E402
from experiments.h200.archive import CACHE, Archive, unpack  # noqa: E402

# Between the time that a command is told and the time at which it is ended; pytest counts from its first test.
_MARGIN_S, _TESTS_MARGIN_S = 12.0, 40.0
# Of tests, where there is no device.
_NAMES = ("--collect-only", "-q")
# Of tests: after one has broken its process, or the device for it.
_RESTARTS = 4
_SHOWN_LINES, _SHOWN_OF_FAILED, _SHOWN_COLUMNS = 8, 30, 200
_WORKERS = "AUTOSCHED_COMPILE_WORKERS"
_REHEARSAL = "rehearsal"
_DIARY = "session.json"
_FIRST = "torchvision:googlenet"
# Those that compile quickly come first: a call's end often has room for one of them.
_SUITE = (
    "autosched:deepfm", "torchvision:squeezenet1_1", "transformers:bert", "autosched:randwire", "torchvision:resnet50", "transformers:t5",
    "torchvision:inception_v3", "torchvision:mobilenet_v2", "torchvision:densenet201", "timm:nasnetalarge",
)  # fmt: skip
# A busy machine, and what is missing on it, are no fault of its own.
_FOUND_BY_DOCTOR = (State.BUSY.exit_code, State.PROBLEM.exit_code)
# torch.compile in its quickest mode alone.
_DEFAULTS = ("--modes", "compiled", "--budget", "40s", "--expect", "200")
# Nothing is compiled.
_REWRITTEN = ("--lowering", "rewritten", "--no-compiled", "--budget", "10s", "--expect", "40")


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        command: after the interpreter; ``{out}`` is the folder of results, ``{seconds}`` what the command may take.
        plan_s: seconds in all calls together, until every step has had its own.
        least_s: with less it is not begun.
        margin_s: of its seconds, how many it is not told of.
        required: run in every call, and nothing else is where it fails.
        smoke: options that rehearse it without a GPU; ``None``: it has no rehearsal.
        retry: options with which it does again what failed, where it would not by itself.
        restarts: how often it is begun again at once where it ended early and something was left: its process, not its time, was over.
        done: exit codes of one that is done; others than 0 say something of the machine, which its log keeps.
    """

    name: str
    command: tuple[str, ...]
    plan_s: float
    least_s: float = 30.0
    margin_s: float = _MARGIN_S
    required: bool = False
    smoke: tuple[str, ...] | None = ("--smoke",)
    retry: tuple[str, ...] = ()
    restarts: int = 0
    done: tuple[int, ...] = (0,)


def _script(name: str, *options: str) -> tuple[str, ...]:
    return (str(ROOT / "experiments" / name), *options)


def _suite(*models_and_options: str) -> tuple[str, ...]:
    case = ("--batches", "1", "--dtypes", "float32")
    return _script("h200/suite.py", *models_and_options, *case, "--out", "{out}/suite", "--deadline", "{seconds}")


def _tests() -> tuple[str, ...]:
    # Verbose, so that the log of a run that was stopped says what passed; what runs know of each other is in a file that is kept.
    known = ("--gpu-budget", "{seconds}", "--gpu-done", "{out}/gpu_tests.jsonl")
    return ("-P", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", "--log-level=INFO", *known, str(ROOT / "tests" / "gpu"))


def steps(opara: Path | None = None) -> list[Step]:
    """The plan, the most telling first: what is at its end is what is dropped where time is short.

    Args:
        opara: a clone of its published code; without one, that comparison is left out.
    """
    limits, again, on_cpu = ("--deadline", "{seconds}"), ("--retry",), ("--smoke", "--device", "cpu")
    published = [
        Step(
            "opara", _script("h200/opara.py", "--repository", str(opara), "--out", "{out}/opara", "--budget", "30", *limits), 130.0, 100.0
        ),
    ]
    return [
        # A cold disk: what is imported first may take minutes. One that is cut off here has kept the call from everything else.
        Step("device", _script("h200/machine.py", "--out", "{out}"), 180.0, 5.0, required=True),
        Step("doctor", ("-P", "-m", "autosched", "doctor"), 60.0, 5.0, smoke=(), done=(0, *_FOUND_BY_DOCTOR)),
        # On an H200 with 16 cores they took 160 seconds.
        Step("tests", _tests(), 230.0, 80.0, _TESTS_MARGIN_S, smoke=_NAMES, restarts=_RESTARTS),
        # With nearly all of a call, which compilers that time kernels need; and before that, with whatever the first call has left, beside
        # the one compiler that is quick: what breaks or is missing is then known while there is time.
        Step("googlenet", _suite(_FIRST), 500.0, 400.0, retry=again),
        Step("defaults", _suite(_FIRST, *_DEFAULTS), 280.0, 240.0, retry=again),
        # Sixteen processes that each import PyTorch and begin with CUDA; it stops between any two of them.
        Step("probes", _script("h200/probe.py", "--out", "{out}", *limits), 300.0, retry=again),
        # Half a minute a model. What streams are worth, and pairs of as many families as possible.
        Step("rewritten", _suite(_FIRST, *_SUITE, *_REWRITTEN), 170.0, 60.0, retry=again),
        Step("suite", _suite(*_SUITE), 400.0, 260.0, retry=again),
        Step("collect", _script("h200/collect.py", "--work", "{out}/runs", "--out", "{out}/data", *limits), 200.0, 60.0),
        *(published if opara is not None else []),
        Step("load", _script("serve/load.py", "--device", "cuda", "--missing", "--out", "{out}/load.json", *limits), 75.0, smoke=on_cpu),
        Step(
            "compile_cost",
            _script("fused/compile_cost.py", "--device", "cuda", "--out", "{out}/compile_cost", *limits, "timm:nasnetalarge"),
            160.0,
            100.0,
            smoke=on_cpu,
            retry=again,
        ),
        Step(
            "fused",
            _script("fused/suite.py", "--device", "cuda", "--out", "{out}/fused", "--budget", "60s", *limits, "torchvision:googlenet"),
            230.0,
            200.0,
            smoke=(*on_cpu, "--work", "{out}/caches"),
            retry=again,
        ),
        Step(
            "generate",
            _script("serve/generate.py", "--device", "cuda", "--out", "{out}/generate.json", *limits),
            320.0,
            240.0,
            smoke=on_cpu,
        ),
        Step("rest", _script("h200/suite.py", "--out", "{out}/suite", *limits), 0.0, 300.0, retry=again),
    ]


class Diary:
    """What became of each step in all calls so far, kept in ``session.json``."""

    def __init__(self, target: Path) -> None:
        self._target = target
        # Without it every step has its turn again, and finds what it has done.
        self.steps: dict[str, dict[str, Any]] = (read_json(target) or {"steps": {}})["steps"]

    def state(self, step: Step) -> str:
        """``left``, ``done`` or ``failed``."""
        return str(self.steps.get(step.name, {}).get("state", "left"))

    def took_s(self, step: Step) -> float:
        """Seconds in all calls."""
        return float(self.steps.get(step.name, {}).get("took_s", 0.0))

    def note(self, step: Step, state: str, took_s: float) -> None:
        """Write down how ``step`` stands."""
        self.steps[step.name] = {"state": state, "took_s": round(took_s, 1)}
        write_json(self._target, {"steps": self.steps})


def turns(plan: Sequence[Step], diary: Diary, call: Call) -> Iterator[tuple[Step, float]]:
    """Steps of one call, each with its seconds; asked again after each has been run."""
    for surplus in (False, True):
        for step in plan:
            for _ in range(1 + step.restarts):
                if step.required:
                    due, planned_s = not surplus, step.plan_s
                else:
                    due, planned_s = diary.state(step) == "left", step.plan_s - diary.took_s(step)
                limit_s = call.left_s if surplus else min(call.left_s, planned_s)
                if due and limit_s >= step.least_s:
                    yield step, limit_s


def run(
    step: Step, options: Sequence[str], limit_s: float, out: Path, diary: Diary, environment: dict[str, str], archive: Archive | None
) -> str:
    """Run one step for at most ``limit_s`` seconds; its state afterwards."""
    seconds = max(1.0, limit_s - step.margin_s)
    words = [*step.command, *options]
    command = [sys.executable, *(word.replace("{out}", str(out)).replace("{seconds}", f"{seconds:.0f}") for word in words)]
    log = out / "logs" / f"{step.name}.log"
    before_s = diary.took_s(step)
    # Charged beforehand: one that ends this process, too, as soon as it begins, has had its time.
    diary.note(step, "left", before_s + limit_s)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n{datetime.now(UTC).isoformat(timespec='seconds')} at most {limit_s:.0f} s\n{shlex.join(command)}\n\n")
        said_before = file.tell()
    begin = time.monotonic()

    def look() -> None:
        # Whoever stops this from outside takes nothing from what is left of its plan.
        diary.note(step, "left", before_s + time.monotonic() - begin)
        if archive is not None:
            archive.look()

    status = run_logged(command, limit_s, log, environment=environment, meanwhile=look)
    # One that a signal ended has not said that it is done: memory ran out, or a library broke its process.
    state = "left" if status is None or status < 0 else {LEFT: "left", **dict.fromkeys(step.done, "done")}.get(status, "failed")
    diary.note(step, state, before_s + time.monotonic() - begin)
    said = "its time was over" if status is None else f"status {status}"
    print(f"{step.name}: {state} ({said}, {time.monotonic() - begin:.0f} s); {log}", flush=True)
    shown = _SHOWN_OF_FAILED if status not in (*step.done, LEFT, None) else _SHOWN_LINES
    for line in log.read_bytes()[said_before:].decode(errors="replace").rstrip().splitlines()[-shown:]:
        print(f"    {line[:_SHOWN_COLUMNS]}", flush=True)
    return state


@contextlib.contextmanager
def _environment(out: Path) -> Iterator[dict[str, str]]:
    """Of every command; ``out`` is the folder of results.

    This checkout's autosched is found in it before any that is installed, which may be of another commit than figures say; alone, since
    the checkout's datasets/ would hide whoever else has that name. Virtual machines may get memory only as they use it, and regions would
    be compiled one after the other. What a command that is ended has said is in its log only if it was not held back, and pytest says in a
    line why a test failed only where that is long enough. What jobs leave to each other is kept: a comparison that was stopped goes on from
    it, on another machine too, and every pair that one has measured is there for a cost model. Another commit may measure otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="autosched-session-") as folder:
        (Path(folder) / "autosched").symlink_to(ROOT / "autosched", target_is_directory=True)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        workers = str(max(2, len(os.sched_getaffinity(0)) // 2))
        cache = str(out / CACHE / (commit()[:9] or "unknown"))
        own = {_WORKERS: workers, "PYTHONUNBUFFERED": "1", "AUTOSCHED_CACHE": cache}
        yield {**own, **os.environ, "PYTHONPATH": path, "COLUMNS": str(_SHOWN_COLUMNS)}


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Within, SIGTERM ends this process as an error would, so that the step ends first and the archive has what it said."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tell(whole: Path, plan: Sequence[Step]) -> int:
    """Print how each GPU's steps stand; ``LEFT`` if one is left."""
    ends = []
    for folder in sorted(path.parent for path in whole.glob(f"*/{_DIARY}")) or [whole / "nothing yet"]:
        diary = Diary(folder / _DIARY)
        for step in plan:
            print(f"{diary.state(step):6}  {step.name:12}  {diary.took_s(step):4.0f} of {step.plan_s:4.0f} s  {folder.name}")
        ends.append(_status(plan, diary))
    return max(ends)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="everything is written to a folder of the GPU in it; the same one in every call"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument(
        "--archive", type=Path, default=None, help="one file with everything, new after every result; begun from on another machine"
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of steps; nothing else is run")
    parser.add_argument("--opara", type=Path, default=None, help="a clone of its published code, to be compared with")
    parser.add_argument("--retry", action="store_true", help="run again what failed in earlier calls")
    parser.add_argument("--list", action="store_true", help="say what is done and what is left, and run nothing")
    parser.add_argument("--smoke", action="store_true", help="no GPU: every command's own rehearsal")
    arguments = parser.parse_args()
    plan = steps(arguments.opara.resolve() if arguments.opara is not None else None)
    if unknown := set(arguments.only) - {step.name for step in plan}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}; expected some of {', '.join(step.name for step in plan)}")
    plan = [step for step in plan if step.name in (arguments.only or [step.name]) and (step.smoke is not None or not arguments.smoke)]
    # Commands are started elsewhere and must find it all the same.
    whole = arguments.out.resolve()
    archive = Archive(whole, arguments.archive, {_DIARY}) if arguments.archive is not None else None
    if archive is not None and arguments.archive.exists() and not any(whole.glob(f"*/{_DIARY}")):
        unpack(arguments.archive, whole, _DIARY)
    if arguments.list:
        return tell(whole, plan)
    try:
        out = whole / (_REHEARSAL if arguments.smoke else folder_name(cuda_device_key()))
    except DeviceMissing as error:
        print(f"nothing is run: {error}", flush=True)
        return 1
    diary = Diary(out / _DIARY)
    if arguments.retry:
        for step in plan:
            if diary.state(step) == "failed":
                diary.note(step, "left", 0.0)
    call = Call(arguments.seconds, spare_s=5.0)
    with _environment(out) as environment, _stoppable():
        for step, limit_s in turns(plan, diary, call):
            options = (*((step.smoke or ()) if arguments.smoke else ()), *(step.retry if arguments.retry else ()))
            try:
                state = run(step, options, limit_s, out, diary, environment, archive)
            finally:
                if archive is not None:
                    archive.keep()
            if state != "done" and step.required:
                print(f"{step.name} is needed by everything else; nothing more is run", flush=True)
                return 1
    print(", ".join(f"{step.name} {diary.state(step)}" for step in plan), flush=True)
    return _status(plan, diary)


def _status(plan: Sequence[Step], diary: Diary) -> int:
    states = {diary.state(step) for step in plan}
    return LEFT if "left" in states else int("failed" in states)


if __name__ == "__main__":
    raise SystemExit(main())
