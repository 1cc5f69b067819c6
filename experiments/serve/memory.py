"""What keeping memory between calls is worth: a model as it comes and its operators in order, under glibc's defaults and with memory kept.

    python experiments/serve/memory.py [MODEL@BATCH...]

writes ``results/<device>/memory.json``. glibc gives the memory of large tensors back to the operating system when they are freed;
after ``autosched.keep_memory()`` it does not. Two processes have the same model, and one of them keeps; their calls are timed in
interleaved rounds, and the system's share of the processor time is counted. Schedules are sequential ones on all threads, nothing was
searched. ``--smoke`` does it with a small model and writes nothing unless told where.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.serve.common import beside, keep, parser_of  # noqa: E402

MODELS = (
    "torchvision:resnet50@1",
    "torchvision:resnet50@16",
    "torchvision:mobilenet_v2@16",
    "torchvision:googlenet@16",
    "timm:hrnet_w18@4",
)
DEFAULT, KEPT = "as glibc does by itself", "kept"
_BLOCK_S = 0.4
_ROUNDS = 9


class Caller:
    """A process that has the model, and keeps memory or not; calls what it is told to and says how long it took."""

    def __init__(self, model: str, *, keeping: bool) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, __file__, "--serve", model, *(["--keeping"] if keeping else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def ask(self, which: str) -> dict[str, float]:
        """One block of calls: microseconds a call, the system's share (0 to 1), and the bytes it gave for each."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(which, file=self._process.stdin, flush=True)
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def serve(model: str, *, keeping: bool) -> None:
    """Be the process of a :class:`Caller`."""
    import torch

    import autosched
    from autosched.capture.export import capture
    from autosched.core.schedule import sequential
    from autosched.device.paging import PagingMeter
    from autosched.zoo import load
    from experiments.serve.common import bundle_of

    if keeping and not autosched.keep_memory():
        sys.exit("memory cannot be kept with this C library")
    name, _, batch = model.partition("@")
    made = load(name, batch=int(batch))
    captured = capture(made.model, made.args, made.kwargs)
    wide = sequential(captured.program.graph, width=torch.get_num_threads())
    fast = autosched.load(bundle_of(captured, wide, name), made.model, strict=True)
    runs = {"eager": made.model, "schedule": fast}
    with torch.inference_mode():
        for which in map(str.strip, sys.stdin):
            call = runs[which]
            call(*made.args, **made.kwargs)
            meter, times = PagingMeter(), []
            until = time.monotonic() + _BLOCK_S
            while not times or time.monotonic() < until:
                began = time.perf_counter_ns()
                with meter:
                    call(*made.args, **made.kwargs)
                times.append((time.perf_counter_ns() - began) / 1e3)
            paging = meter.read()
            print(json.dumps({"us": statistics.median(times), "system": paging.system_share, "bytes": paging.anew_bytes}), flush=True)


def measure(model: str, rounds: int) -> dict[str, Any]:
    """One model."""
    callers = {DEFAULT: Caller(model, keeping=False), KEPT: Caller(model, keeping=True)}
    try:
        turns = [(how, which) for how in callers for which in ("eager", "schedule")]
        for how, which in turns:  # a first block each, to settle
            callers[how].ask(which)
        found: dict[tuple[str, str], list[dict[str, float]]] = {turn: [] for turn in turns}
        rng = random.Random(0)
        for _ in range(rounds):
            for how, which in rng.sample(turns, len(turns)):
                found[how, which].append(callers[how].ask(which))
    finally:
        for caller in callers.values():
            caller.close()
    rows = []
    for how, which in turns:
        base, times = ([answer["us"] for answer in found[turn]] for turn in ((DEFAULT, which), (how, which)))
        row = {
            "name": which,
            "memory": how,
            **beside(base, times),
            "system_share": statistics.median(answer["system"] for answer in found[how, which]),
            "anew_bytes": int(statistics.median(answer["bytes"] for answer in found[how, which])),
        }
        rows.append(row)
        print(f"{model}, {which}, {how}: {row['median_us']:,.0f} us, {row['speedup']:.2f}x, system {row['system_share']:.0%}", flush=True)
    return {"model": model, "rounds": rounds, "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--serve", metavar="MODEL", help="for the script itself")
    parser.add_argument("--keeping", action="store_true", help="for the script itself")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, keeping=asked.keeping)
        return
    models, rounds = (asked.models or MODELS, _ROUNDS) if not asked.smoke else (("autosched:toy@2",), 1)
    keep(asked, "memory.json", {"cases": [measure(model, rounds) for model in models]})


if __name__ == "__main__":
    main()
