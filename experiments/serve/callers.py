"""Calls from the thread that loaded, from another one, and from four that take turns, as a server's handlers do.

    python experiments/serve/callers.py [MODEL...]

writes ``results/<device>/callers.json``. The schedule is nobody's tuned one: the operators in order, each as wide as there are cores, which
is what depends most on OpenMP's threads. Each way of calling is timed as a loaded model does it, and with every thread running what it
calls and keeping its team, as PyTorch's own operators do (*kept*). OpenMP's threads are the process's, so each repeat is a process of its
own, in random order. ``--smoke`` calls a small model a few times and writes nothing unless told where.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.serve.common import bundle_of, interval, keep, parser_of  # noqa: E402
from experiments.serve.load import build  # noqa: E402

MODELS = ("autosched:moe", "autosched:randwire", "torchvision:googlenet")
# Threads that call, beside the one that loaded: none, one, and several in turns.
WAYS = {"who loaded": 0, "another": 1, "four in turns": 4}
# After 64 calls of its own a thread runs them itself.
_WARM_UPS = 70


def child(name: str, file: str, threads: int, kept: bool, calls: int) -> None:
    """One repeat: prints the median of its calls in microseconds."""
    import torch

    import autosched
    from autosched.runtime.calling_threads import CallingThreads

    if kept:
        setattr(CallingThreads, "run", lambda self, run, inputs, threads: run(inputs))  # noqa: B010
        setattr(CallingThreads, "let_go", lambda self: None)  # noqa: B010
    model, args, kwargs = build(name)
    fast = autosched.load(file, model, strict=True)

    def call() -> float:
        with torch.inference_mode():
            begin_ns = time.perf_counter_ns()
            fast(*args, **kwargs)
            return (time.perf_counter_ns() - begin_ns) / 1e3

    turns = [_elsewhere(call) for _ in range(threads)] or [call]
    times = [turns[place % len(turns)]() for place in range(_WARM_UPS + calls)]
    print(json.dumps(statistics.median(times[_WARM_UPS:])))


def _elsewhere(call: Callable[[], float]) -> Callable[[], float]:
    """``call`` on a thread of its own, which sleeps between two."""
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[float] = queue.SimpleQueue()

    def work() -> None:
        while True:
            asked.get()
            answers.put(call())

    threading.Thread(target=work, daemon=True).start()

    def hand_over() -> float:
        asked.put(None)
        return answers.get()

    return hand_over


def measure(name: str, repeats: int, calls: int) -> dict[str, Any]:
    """All ways of calling one model."""
    from autosched.capture.export import capture
    from autosched.core.schedule import sequential
    from autosched.runtime.cores import usable_cores

    model, args, kwargs = build(name)
    captured = capture(model, args, kwargs, rewrite=True, target="cpu")
    contestants = [(way, kept) for way in WAYS for kept in (False, True) if WAYS[way] or not kept]
    times: dict[tuple[str, bool], list[float]] = {contestant: [] for contestant in contestants}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.autosched"
        file.write_bytes(bundle_of(captured, sequential(captured.program.graph, width=usable_cores()), name))
        for _ in range(repeats):
            for way, kept in rng.sample(contestants, len(contestants)):
                asked = [name, str(file), str(WAYS[way]), str(int(kept)), str(calls)]
                done = subprocess.run([sys.executable, __file__, "--child", *asked], check=True, capture_output=True, text=True)
                times[way, kept].append(float(json.loads(done.stdout.splitlines()[-1])))
    rows = {way: {"kept" if kept else "loaded": values for (found, kept), values in times.items() if found == way} for way in WAYS}
    for row in rows.values():
        if "kept" in row:
            ratios = [before / now for before, now in zip(row["kept"], row["loaded"], strict=True)]
            row["ratio"], row["ratio_ci"] = statistics.median(ratios), interval(ratios)  # type: ignore[assignment]
    return {"model": name, "operators": len(captured.program.graph), "repeats": repeats, "calls": calls, "rows": rows}


def main() -> None:
    from autosched.runtime.native.build import build_native

    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, file, threads, kept, calls = arguments.child
        child(name, file, int(threads), bool(int(kept)), int(calls))
        return
    models, repeats, calls = arguments.models or list(MODELS), arguments.repeats, arguments.calls
    if arguments.smoke:
        models, repeats, calls = ["tower:12"], 1, 4
    if reason := build_native():
        print(f"no native lanes here: {reason}")
    cases = [measure(name, repeats, calls) for name in models]
    for case in cases:
        for way, row in case["rows"].items():
            said = {kind: round(statistics.median(row[kind])) for kind in ("loaded", "kept") if kind in row}
            print(f"{case['model']}: {way}, {said} us", *(f"{row['ratio']:.2f}x" for _ in range("ratio" in row)))
    keep(arguments, "callers.json", {"cases": cases})


if __name__ == "__main__":
    main()
