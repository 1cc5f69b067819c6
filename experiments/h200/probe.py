"""Ten questions about CUDA graphs that no document answers, asked of the device itself; and six more.

    python experiments/h200/probe.py --out results/h100          # everything, within nine minutes on one GPU
    python experiments/h200/probe.py --out out --only P4 P6
    python experiments/h200/probe.py --out out --smoke           # no GPU: plumbing on a test double; its figures mean nothing

Every probe runs in a process of its own with a time limit, so one that hangs or breaks its context costs only itself. Results go to
``probes.json`` in the folder given: for each probe its question, the answer in a sentence, and the raw data. What is answered there is not
asked again unless it is named or ``--retry`` asks again what failed, so calling it again goes on. Exit status: 0 all are answered, 1 one
failed, 10 something is left for the next call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.calls import LEFT, Call, read_json, run_to_end, write_whole  # noqa: E402
from experiments.devices import commit  # noqa: E402

_LIMIT_S = 75.0
_LEAST_S = 5.0

# Name, question, environment of its process.
PROBES: dict[str, tuple[str, dict[str, str]]] = {
    "P1": ("Do allocations on a side stream that has joined the capture come from the private pool, and those on one that has not?", {}),
    "P2": ("How much memory do vector-clock frees, no frees, and record_stream hold, and do delays show frees that come too early?", {}),
    "P2r": (
        "The same for record_stream with graph_capture_record_stream_reuse.",
        {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"},
    ),
    "P3": ("What do capture, instantiation, the first launch and a launch cost, by nodes and shape?", {}),
    "P4": ("Do independent nodes start in the order in which they were created, and what do priorities change?", {}),
    "P5a": ("How many long thin kernels run at once with 8 connections?", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    "P5b": ("How many long thin kernels run at once with 32 connections?", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    "P6": ("What does an edge between branches cost, beside one within a branch?", {}),
    "P7": ("Where are the cuBLAS workspaces of GEMMs captured on several streams?", {}),
    "P8": ("Do kernel nodes of cuBLAS, ATen and Triton tell their launch through cuda-bindings?", {}),
    "P9": ("What is the A/A noise floor of interleaved blocks?", {}),
    "P10": ("Do this driver and these bindings give graph nodes a tools id?", {}),
    "P11": ("Of two operators that run at the same time, does the one launched second carry the damage?", {}),
    "P12": ("What do capture, a call over the bare graph, and measuring one candidate cost for a whole model?", {}),
    "P13": ("What does programmatic dependent launch save in a chain of kernels in a graph, and are its edges marked?", {}),
    "P14": ("How long may the device idle before its clock falls, and does what is done about it bring it back?", {}),
    "P15": ("What takes the time in the graph of torch.compile for a small model, and its products by cuBLAS and cuBLASLt?", {}),
    "P16": ("What do changes of the device's pace come with: a graph's memory, the clocks, or a pause?", {}),
}


def main() -> int:
    """Run the probes asked for, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for probes.json")
    parser.add_argument("--only", nargs="*", choices=[*PROBES], help="names of the probes to run")
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds for this call")
    parser.add_argument("--retry", action="store_true", help="ask again what failed in earlier calls")
    parser.add_argument("--smoke", action="store_true", help="no GPU: run what can be run on a test double")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        _inside(arguments.inside, arguments.out, arguments.smoke)
    call = Call(arguments.deadline, longest_s=_LIMIT_S)
    target = arguments.out / "probes.json"
    machine = _machine(arguments.smoke)
    document: dict[str, Any] = {"schema": "autosched.probes/1", "machine": machine, "probes": {}}
    if (earlier := read_json(target)) is not None:
        if _identity(earlier["machine"]) != _identity(machine):
            parser.error(f"{target} has the answers of another machine ({_identity(earlier['machine'])}); name another folder")
        document["probes"] = earlier["probes"]
    known = document["probes"]
    left = [name for name in PROBES if name not in known or (arguments.retry and known[name].get("failed"))]
    left = arguments.only or left
    while left and call.left_s > _LEAST_S:
        name, begin, limit_s = left[0], time.monotonic(), call.limit_s
        found = _run(name, limit_s, arguments.smoke)
        if found is None and limit_s < _LIMIT_S:
            break  # the next call gives it all its time
        found = found or {"answer": f"not answered: no result within {limit_s:.0f} s", "data": {}, "failed": True}
        known[name] = {
            "question": PROBES[name][0],
            "environment": PROBES[name][1],
            **found,
            "took_s": round(time.monotonic() - begin, 2),
            "commit": machine["commit"],
        }
        # After every probe, so that a time limit on the whole costs only the rest.
        document["probes"] = {name: known[name] for name in PROBES if name in known}
        write_whole(target, json.dumps(document, indent=1, allow_nan=False) + "\n")
        print(f"{name:4} {known[name]['took_s']:6.1f} s  {found['answer']}", flush=True)
        left = left[1:]
    if left:
        print(f"{len(left)} are left, the next is {left[0]}; call again", flush=True)
        return LEFT
    return int(any(item.get("failed") for item in known.values()))


def _identity(machine: dict[str, Any]) -> dict[str, Any]:
    """What answers belong to: clocks and temperatures change with each call, the driver's last number with the machine."""
    name, driver = [*machine.get("gpu", "").split(","), ""][:2]
    return {"gpu": [name, driver.strip().partition(".")[0]], "versions": machine.get("versions"), "smoke": machine["smoke"]}


def _run(name: str, limit_s: float, smoke: bool) -> dict[str, Any] | None:
    """What a probe found, or why it failed; ``None`` if its time was over."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", name, "--out", str(result), *(["--smoke"] if smoke else [])]
        ended = run_to_end(command, limit_s, environment={**os.environ, **PROBES[name][1]}, folder=Path(folder))
        if result.is_file():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        if ended.status is None:
            return None
        words = (ended.err or ended.out).strip()[-10_000:]
        return {
            "answer": f"not answered: the process ended with status {ended.status}",
            "data": {"last_words": words},
            "failed": True,
        }


def _inside(name: str, result: Path, smoke: bool) -> NoReturn:
    # Under a safe path this folder is missing.
    sys.path.append(str(Path(__file__).resolve().parent))
    import probe_bench
    import probe_questions

    bench = probe_bench.smoke_bench() if smoke else probe_bench.cuda_bench()
    if smoke and name not in probe_questions.ON_THE_DOUBLE:
        found: dict[str, Any] = {"answer": "not asked: needs a CUDA device", "data": {}}
    else:
        answer, data = probe_questions.ANSWERS[name](bench)
        found = {"answer": answer, "data": data}
    found["source"] = "smoke: a test double answered; no figure is a measurement" if smoke else "measured"
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(found, allow_nan=False), encoding="utf-8")
    unfinished.replace(result)
    # What a compiler or a library has left to tidy up may take minutes, and is nobody's answer.
    os._exit(0)


def _machine(smoke: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform(), "smoke": smoke}
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.sm,clocks.mem,power.limit,ecc.mode.current,temperature.gpu"
    found["commit"], found["gpu"] = commit(), ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        found["gpu"] = done.stdout.strip() if done.returncode == 0 else ""
    code = (
        "import json, torch, importlib.metadata as m\n"
        "def v(name):\n try: return m.version(name)\n except m.PackageNotFoundError: return ''\n"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda or '', 'triton': v('triton'), "
        "'cuda_bindings': v('cuda-bindings'), 'cudnn': str(torch.backends.cudnn.version() or '')}))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=tempfile.gettempdir()
        )
        found["versions"] = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        found["versions"] = {}
    return found


if __name__ == "__main__":
    raise SystemExit(main())
