"""Compile at the same time what comparisons of several models will ask for one after the other, so that a GPU waits for it once.

    python experiments/h200/ahead.py torchvision:googlenet transformers:bert --out somewhere
    python experiments/h200/ahead.py torchvision:googlenet --untimed --out somewhere      # export TRITON_CACHE_DIR=... first
    python experiments/h200/ahead.py --smoke --out somewhere                              # the CPU, one tiny model

Of each model the regions of the lowering ``fused``, and the whole model in ``torch.compile``'s default mode and in max-autotune, as
baseline and as lowering: by the job's own functions, in processes like its own, so that a job finds them in the caches of autosched and
Inductor. All compile beside each other, but a kernel is timed only while no other is: what is chosen is chosen on a GPU that computes
nothing else, as far as this script knows.

``--untimed`` fills Triton's cache alone and times nothing, beside other work or where there is no GPU (over ``tools/cuda_emulator``, with
``--values zeros``): Triton finds the kernels again where torch, Triton, Python's minor version, the GPU's properties and
``TRITON_CACHE_DIR`` are the same. Everything else, chosen by nothing, is thrown away. ``ahead.json`` says what each part took. Exit
status: 0 all is compiled, 1 something failed, 10 something was not done in time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.variants import Lowering  # noqa: E402
from experiments.calls import LEFT, Call, run_logged, write_json  # noqa: E402
from experiments.suite import environment, stem_of  # noqa: E402

# What takes longest comes first.
PARTS = (Lowering.MAX_AUTOTUNE, Lowering.FUSED, Lowering.INDUCTOR)
_TURNS = Path(__file__).resolve().parent / "turns"
_LEAST_S = 10.0


@dataclass(frozen=True)
class Part:
    """One lowering of one model, and the baseline of its name."""

    model: str
    lowering: Lowering

    @property
    def name(self) -> str:
        """In logs and results."""
        return f"{stem_of(self.model)}_{self.lowering}"


def compile_part(part: Part, place: str) -> None:
    """Compile it in this process and those that a job would start."""
    from autosched import zoo
    from autosched.capture.export import lower_draft
    from autosched.core.progress import Silent
    from autosched.core.records import Failure
    from autosched.device.compiled_baseline import from_zoo
    from autosched.device.cuda.baselines import MODES
    from autosched.pipeline.baselines import Rivals
    from autosched.pipeline.original import Original
    from autosched.pipeline.preparing import NotHad, prepare
    from autosched.pipeline.references import Yardstick
    from autosched.pipeline.replaying import open_device

    loaded = zoo.load(part.model)
    model, args, kwargs = loaded.model, loaded.args, loaded.kwargs
    device, original = open_device(place), Original(model, args, kwargs)
    if (mode := next((kind for kind, lowering in MODES.items() if lowering is part.lowering), None)) is not None:
        os.environ["AUTOSCHED_COMPILE_MODES"] = mode.value
        captured = lower_draft(original.draft(), Lowering.FUSED, device.key.kind)
        with Rivals(model, args, kwargs, device, compiled=True, source=from_zoo(part.model), progress=Silent()) as rivals:
            for rival in rivals.ready(captured, Yardstick(model, args, kwargs, 0).of(captured.program).answer):
                taken = rival.round_us()
                print(f"{part.name}, baseline {rival.name}: {taken.detail if isinstance(taken, Failure) else 'runs'}", flush=True)
    found = prepare(part.lowering, original, device, Silent())
    if isinstance(found, NotHad):
        raise SystemExit(f"{part.name}: {found.why}")
    found.session.close()


def measure(part: Part, arguments: argparse.Namespace, call: Call, turns: str, folder: str) -> dict[str, Any]:
    """One process for ``part``: its exit status (``None`` if its time was over) and how long it took."""
    if call.left_s < _LEAST_S:
        return {"status": None, "took_s": 0.0}
    command = [sys.executable, "-P", __file__, part.model, "--part", part.lowering.value, "--device", arguments.device]
    path = os.pathsep.join([str(_TURNS), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "AHEAD_TURNS": turns}
    if arguments.untimed:
        own |= {name: f"{folder}/{part.name}/{name.lower()}" for name in ("AUTOSCHED_CACHE", "TORCHINDUCTOR_CACHE_DIR")}
    begin = time.monotonic()
    status = run_logged(command, call.limit_s, arguments.out / "ahead" / f"{part.name}.log", environment={**os.environ, **own})
    took_s = round(time.monotonic() - begin, 1)
    print(f"{part.name}: {'its time was over' if status is None else f'status {status}'}, {took_s:.0f} s", flush=True)
    return {"status": status, "took_s": took_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["torchvision:googlenet"], help="names of the zoo, the most important first")
    parser.add_argument("--out", type=Path, default=None, help="folder for ahead.json and logs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds for this call")
    parser.add_argument("--jobs", type=int, default=0, help="parts at the same time; by default one for every two cores")
    parser.add_argument("--untimed", action="store_true", help="fill Triton's cache alone")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--part", type=Lowering, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        compile_part(Part(arguments.models[0], arguments.part), arguments.device)
        # At an ordinary end Inductor waits up to five minutes for its own compiling processes, which have nothing left to do.
        sys.stdout.flush()
        os._exit(0)
    if arguments.out is None:
        parser.error("give --out")
    if arguments.untimed and "TRITON_CACHE_DIR" not in os.environ:
        parser.error("--untimed fills the folder that TRITON_CACHE_DIR names; it names none")
    models, parts = arguments.models, PARTS
    if arguments.smoke:
        models, parts, arguments.device = ["autosched:toy"], (Lowering.FUSED,), "cpu"
    asked = [Part(model, lowering) for lowering in parts for model in models]
    call = Call(arguments.deadline)
    jobs = arguments.jobs or max(1, len(os.sched_getaffinity(0)) // 2)
    with tempfile.TemporaryDirectory(prefix="autosched-ahead-", ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(jobs) as pool:
        lock = Path(folder) / "turn"
        lock.touch()
        turns = "untimed" if arguments.untimed else str(lock)
        found = pool.map(lambda part: measure(part, arguments, call, turns, folder), asked)
        rows = {part.name: row for part, row in zip(asked, found, strict=True)}
    write_json(arguments.out / "ahead.json", {"environment": environment(), "untimed": arguments.untimed, "parts": rows})
    ends = {row["status"] for row in rows.values()}
    return LEFT if None in ends else int(ends != {0})


if __name__ == "__main__":
    raise SystemExit(main())
