"""What compiling costs before a model can be tuned or loaded: the first time, and again in a new process that finds it kept.

    python experiments/fused/compile_cost.py timm:nasnetalarge                       # regions of the lowering fused, on the CPU
    python experiments/fused/compile_cost.py --device cuda timm:nasnetalarge
    python experiments/fused/compile_cost.py --serial timm:nasnetalarge              # and once more with one process at a time
    python experiments/fused/compile_cost.py --lowering inductor torchvision:googlenet   # the whole model, bound again and again
    python experiments/fused/compile_cost.py --smoke --out somewhere                 # one tiny model; its figures mean nothing

Every turn is a process of its own; all turns of a model share an empty folder for autosched's, Inductor's and Triton's caches (the serial
turn has another, and is ended at the deadline). ``fused``: every variant of every operator, for one thread and for all on a CPU.
``inductor``: what a server does when it loads a bundle, without its comparisons. One file for each model:
``experiments/results/<device>/compile_cost/<lowering>_<model>.json``; calling it again goes on with what is missing there. Exit status: 0
all turns have a result, 1 one failed (``--retry`` makes it again, with those that share its caches), 10 something is left for the next
call.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from experiments.calls import LEFT, Call, read_json, run_to_end, write_json  # noqa: E402
from experiments.devices import results_of  # noqa: E402
from experiments.suite import environment, stem_of  # noqa: E402

LEAST_S = 10.0
"""No process is worth starting with less."""


def fused_turn(model: str, kind: str) -> dict[str, Any]:
    """Capture, compile every variant, and compare one run with the operators' calls."""
    import dataclasses

    import torch

    from autosched import zoo
    from autosched.capture.export import capture
    from autosched.core.schedule import sequential
    from autosched.core.variants import Lowering, Variant
    from autosched.runtime.host_key import cpu_device_key, software_key
    from autosched.runtime.kernels import bind, random_inputs
    from autosched.runtime.numerics import compare
    from autosched.runtime.plan import make_plan
    from autosched.runtime.regions.library import region_library
    from autosched.runtime.regions.pieces import UNCOMPILED, piece_digest, pieces_of

    device = torch.device("cuda:0" if kind == "cuda" else "cpu")
    loaded = zoo.load(model)
    begin = time.monotonic()
    captured = capture(loaded.model, loaded.args, loaded.kwargs, target=kind, lowering=Lowering.FUSED)
    capture_s = time.monotonic() - begin
    program, graph = captured.program, captured.program.graph
    if kind == "cuda":
        from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key

        library = region_library(program, device, cuda_device_key(0), cuda_software_key(0))
    else:
        library = region_library(program, device, cpu_device_key(), software_key())
    assert library is not None
    widths = tuple(dict.fromkeys((1, torch.get_num_threads()))) if kind == "cpu" else (1,)
    # Libraries, and kernels of our own, have variants too, which cost no compiler anything.
    wanted = [
        (index, width, int(variant))
        for width in widths
        for index in range(len(graph))
        for variant in library.variants(index)
        if variant not in UNCOMPILED
    ]
    pieces = {index: [piece for piece in pieces_of(graph.operators[index], graph) if piece.compiled] for index, _, _ in wanted}
    distinct = {(piece_digest(piece, graph), width, variant) for index, width, variant in wanted for piece in pieces[index]}
    begin = time.monotonic()
    library.prepare(wanted)
    prepared_s = time.monotonic() - begin
    for item in wanted:
        library.kernel(*item)
    ready_s = time.monotonic() - begin
    constants = {value: tensor.to(device) for value, tensor in captured.constants.items()}
    bound = bind(program, constants, device)
    variants = tuple(int(Variant.COMPILED) if Variant.COMPILED in library.variants(index) else 0 for index in range(len(graph)))
    compiled = library.apply(bound, make_plan(graph, dataclasses.replace(sequential(graph), variant=variants)))
    inputs = random_inputs(program, 1, device)
    agreement = compare([item.cpu() for item in compiled.run(inputs)], [item.cpu() for item in bound.run(inputs)])
    return {
        "operators": len(graph),
        "widths": widths,
        "variants": len(wanted),
        "regions": sum(len(pieces[index]) for index, _, _ in wanted),
        "distinct": len(distinct),
        "compiled": library.compiled,
        "from_the_store": library.reused,
        "processes": library.processes,
        "refused": [f"{graph.operators[item.operator].name}, {item.variant.name}: {item.reason}" for item in library.refusals],
        "capture_s": capture_s,
        "pool_s": prepared_s,
        "ready_s": ready_s,
        "same_as_calls": agreement.within_tolerance,
    }


def inductor_turn(model: str, kind: str, program_file: Path) -> dict[str, Any]:
    """Capture the launches of the whole model, if no turn before has; else bind them, as a loader does."""
    import torch

    from autosched import zoo
    from autosched.core.program_json import decode_program, encode_program
    from autosched.pipeline.inductor_capture import capture_inductor
    from autosched.runtime.inductor import kept as inductor_kept
    from autosched.runtime.inductor.common import Refused
    from autosched.runtime.kernels import bind, gather_constants

    loaded = zoo.load(model)
    device = torch.device("cuda:0" if kind == "cuda" else "cpu")
    begin = time.monotonic()
    if not program_file.exists():
        captured = capture_inductor(loaded.model, loaded.args, loaded.kwargs, target=kind)
        if isinstance(captured, Refused):
            return {"refused": [captured.reason]}
        program_file.write_bytes(encode_program(captured.program))
        what = "captured"
    else:
        program = decode_program(program_file.read_bytes())
        bind(program, gather_constants(program, loaded.model.to(device), {}), device)
        what = "bound"
    return {
        "what": what,
        "ready_s": time.monotonic() - begin,
        "from_the_store": inductor_kept.counts.found,
        "kept": inductor_kept.counts.kept,
    }


def turn(model: str, arguments: argparse.Namespace, folder: str, workers: int | None, limit_s: float) -> dict[str, Any]:
    """One process: what it says, and how long it took in all; ended after ``limit_s`` seconds."""
    kept = {"AUTOSCHED_CACHE": "autosched", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    variables = {**os.environ, **{name: f"{folder}/{part}" for name, part in kept.items()}}
    if workers is not None:
        variables["AUTOSCHED_COMPILE_WORKERS"] = str(workers)
    command = [sys.executable, "-P", __file__, model, "--device", arguments.device, "--lowering", arguments.lowering, "--turn", folder]
    if limit_s < LEAST_S:
        return {"error": f"not begun: {max(limit_s, 0.0):.0f} s were left", "late_after_s": 0.0}
    # What it says for people goes on to where this process says it.
    ended = run_to_end(command, limit_s, environment=variables)
    sys.stderr.write(ended.err)
    if ended.status is None:
        return {"error": f"not done in {limit_s:.0f} s", "took_s": ended.took_s, "late_after_s": limit_s}
    lines = ended.out.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if ended.status == 0 and lines else {"error": f"status {ended.status}"}
    return {**found, "took_s": ended.took_s}


def measure(model: str, arguments: argparse.Namespace, target: Path, call: Call) -> int:
    """The turns of one model that have no result yet, those that share a cache together.

    Returns:
        0, 1 if one failed, ``LEFT`` if one is left.
    """
    here = environment()
    document: dict[str, Any] = {"environment": here, "model": model, "lowering": arguments.lowering}
    if not arguments.again:
        document |= read_json(target) or {}

    def lacks(name: str, *, retry: bool = False) -> bool:
        if retry and "error" in document.get(name, {}):
            return True
        late_after_s = document[name].get("late_after_s") if name in document else 0.0
        return late_after_s is not None and not call.had_all(late_after_s)

    together = [(("first", "second"), arguments.workers), *([(("serial",), 1)] if arguments.serial else [])]
    for names, workers in together:
        if not any(lacks(name, retry=arguments.retry) for name in names):
            continue
        # Not that of an earlier call, which may be of another commit.
        document["environment"] = here
        # What Inductor's own processes still write there outlives the turn.
        with tempfile.TemporaryDirectory(prefix="autosched-cost-", ignore_cleanup_errors=True) as folder:
            failed = ""
            for name in names:
                # Where the first has not compiled everything, the second finds little, and would have no time either.
                said = {"error": f"not begun: the {failed} turn has no result"} if failed else None
                document[name] = said or turn(model, arguments, folder, workers, call.limit_s)
                failed = failed or (name if "error" in document[name] else "")
                print(model, name, json.dumps(document[name]), flush=True)
                # After every turn: a call that is ended keeps those before.
                write_json(target, document)
    if any(lacks(name) for names, _ in together for name in names):
        return LEFT
    return int(any("error" in document[name] for names, _ in together for name in names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["timm:nasnetalarge"])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lowering", default="fused", choices=("fused", "inductor"))
    parser.add_argument("--workers", type=int, default=None, help="processes; by default as many as autosched takes")
    parser.add_argument("--serial", action="store_true", help="compile once more with one process")
    parser.add_argument("--deadline", type=float, default=None, help="seconds this call may take; by default 520 on a GPU, else no limit")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--again", action="store_true", help="measure again what has a file")
    parser.add_argument("--retry", action="store_true", help="make again what failed in earlier calls")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--turn", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = ["autosched:toy"] if arguments.smoke else arguments.models
    if arguments.turn is not None:
        fused = arguments.lowering == "fused"
        program_file = Path(arguments.turn) / "program.json"
        try:
            found = fused_turn(models[0], arguments.device) if fused else inductor_turn(models[0], arguments.device, program_file)
            print(json.dumps(found), flush=True)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        # At an ordinary end Inductor waits up to five minutes for its own compiling processes, which have nothing left to do.
        os._exit(0)
    out: Path = arguments.out or results_of(arguments.device) / "compile_cost"
    deadline_s = arguments.deadline if arguments.deadline is not None else 520.0 if arguments.device == "cuda" else math.inf
    call = Call(deadline_s)
    files = {model: out / f"{arguments.lowering}_{stem_of(model)}.json" for model in models}
    ends = {model: measure(model, arguments, target, call) for model, target in files.items()}
    if left := [model for model, end in ends.items() if end == LEFT]:
        print(f"{len(left)} of {len(models)} models are not done, the next is {left[0]}; call again", flush=True)
    return max(ends.values())


if __name__ == "__main__":
    raise SystemExit(main())
