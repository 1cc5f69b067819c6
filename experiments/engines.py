"""What other engines take for a model on a CPU: eager, torch.compile with freezing, ONNX Runtime, OpenVINO and an autosched schedule.

    pip install onnx onnxscript onnxruntime openvino
    python experiments/engines.py [MODEL...]

writes ``results/<device>/engines.json``. Each engine has a process of its own, for their threads wait in loops of their own and disturb
each other in one; the processes run in turns, in random order, as many threads each as there are cores. The schedule is what
``autosched tune --effort quick`` makes of the model, whatever it keeps; the others have their defaults for short latency, in float32. An
engine that is not installed, or cannot take a model, is left out with the reason. ``--smoke`` takes one model, few turns and
a schedule that nobody tuned.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.serve.common import bundle_bytes, interval, keep, parser_of
from experiments.suite import version_of

MODELS = (
    "torchvision:resnet50", "torchvision:mobilenet_v2", "torchvision:squeezenet1_1", "torchvision:googlenet", "timm:efficientnet_b0",
    "timm:vit_small_patch16_224", "timm:convnext_tiny", "transformers:bert", "transformers:t5", "autosched:speech", "autosched:randwire",
)  # fmt: skip
AUTOSCHED = "autosched"
_PACKAGES = ("onnxruntime", "openvino", "onnx")
_TURNS, _TURN_S, _PAUSE_S = 20, 0.05, 0.02
_LEAST_CALLS, _WARM_CALLS = 2, 5

Run = Callable[[], Sequence[Any]]
"""One inference; its outputs, in order."""


def _eager(made: Any, folder: Path) -> Run:
    return lambda: _leaves(made.model(*made.args, **made.kwargs))


def _compiled(made: Any, folder: Path) -> Run:
    import torch
    import torch._inductor.config as config

    config.freezing = True
    fast = torch.compile(made.model)
    return lambda: _leaves(fast(*made.args, **made.kwargs))


def _autosched(made: Any, folder: Path) -> Run:
    import autosched

    fast = autosched.load(folder / "model.autosched", made.model, strict=True)
    return lambda: _leaves(fast(*made.args, **made.kwargs))


def _onnxruntime(made: Any, folder: Path) -> Run:
    import onnxruntime
    import torch

    exported = torch.onnx.export(made.model, made.args, kwargs=made.kwargs, dynamo=True, verbose=False, report=False)
    exported.save(str(folder / "model.onnx"), external_data=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    inputs = _leaves((made.args, made.kwargs))
    given = {item.name: tensor.numpy() for item, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: session.run(None, given)


def _openvino(made: Any, folder: Path) -> Run:
    import openvino
    import torch

    converted = openvino.convert_model(torch.export.export(made.model, made.args, made.kwargs))
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    inputs = [tensor.numpy() for tensor in _leaves((made.args, made.kwargs))]
    return lambda: list(request.infer(inputs, share_inputs=True, share_outputs=True).values())


ENGINES: dict[str, Callable[[Any, Path], Run]] = {
    "eager": _eager, "torch.compile": _compiled, "ONNX Runtime": _onnxruntime, "OpenVINO": _openvino, AUTOSCHED: _autosched,
}  # fmt: skip


def _leaves(tree: Any) -> list[Any]:
    import torch

    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def serve(engine: str, name: str, folder: Path, said: IO[str]) -> None:
    """In a process of the engine's own: make it ready, then for each line on standard input take the times of so many seconds."""
    import torch

    from autosched import zoo
    from autosched.runtime.cores import usable_cores

    torch.set_num_threads(usable_cores())
    made = zoo.load(name)
    with torch.inference_mode():
        wanted = _leaves(made.model(*made.args, **made.kwargs))
        try:
            run = ENGINES[engine](made, folder)
            pairs = zip(run(), wanted, strict=True)
            error = max(float((torch.as_tensor(mine) - theirs).abs().max()) for mine, theirs in pairs)
        except Exception as failure:
            said.write(
                json.dumps({"missing": f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"}) + "\n"
            )
            return
        for _ in range(_WARM_CALLS):
            run()
        said.write(json.dumps({"error": error}) + "\n")
        said.flush()
        for line in sys.stdin:
            said.write(json.dumps(_times(run, float(line))) + "\n")
            said.flush()


def _times(run: Run, seconds: float) -> list[float]:
    """Microseconds of each call, after one that is not counted."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST_CALLS or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return times


class _Engine:
    """The process of one engine."""

    def __init__(self, engine: str, model: str, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", engine, model, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first = self._answer()
        self.missing: str = first.get("missing", "")
        self.error: float = first.get("error", 0.0)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"missing": f"its process ended with {self._process.wait()}"}

    def times(self, seconds: float) -> list[float]:
        """Microseconds of each call that it makes in so many seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        found: list[float] = self._answer()
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def tuned(name: str, path: Path) -> None:
    """Write the schedule of a model that a job of its own finds."""
    command = [sys.executable, "-m", "autosched", "tune", name, "--device", "cpu", "--effort", "quick", "-o", str(path), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")


def untuned(name: str, path: Path) -> None:
    """Write a schedule of a model without measuring anything."""
    from autosched import zoo

    made = zoo.load(name)
    path.write_bytes(bundle_bytes(made.model, made.args, made.kwargs, lanes=1)[0])


def measure(name: str, turns: int, schedule: Callable[[str, Path], None] = tuned) -> dict[str, Any]:
    """Of one model: microseconds of each engine (median over turns of a turn's median, and its 95 % interval), and the largest error
    against eager; the reasons of those that are missing."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        schedule(name, folder / "model.autosched")
        engines = {engine: _Engine(engine, name, folder) for engine in ENGINES}
        for process in engines.values():
            stack.callback(process.close)
        there = {engine: process for engine, process in engines.items() if not process.missing}
        medians: dict[str, list[float]] = {engine: [] for engine in there}
        order = list(there)
        for turn in range(turns):
            random.Random(turn).shuffle(order)
            for engine in order:
                medians[engine].append(statistics.median(there[engine].times(_TURN_S)))
                # What waits in a loop for more to do gives up by then.
                time.sleep(_PAUSE_S)
    return {
        "model": name,
        "us": {engine: statistics.median(values) for engine, values in medians.items()},
        "ci_us": {engine: interval(values) for engine, values in medians.items()},
        "errors": {engine: process.error for engine, process in there.items()},
        "missing": {engine: process.missing for engine, process in engines.items() if process.missing},
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        # What engines print themselves goes where errors go.
        said, sys.stdout = sys.stdout, sys.stderr
        serve(sys.argv[2], sys.argv[3], Path(sys.argv[4]), said)
        return
    asked = parser_of(__doc__).parse_args()
    names = asked.models or (["autosched:toy"] if asked.smoke else MODELS)
    versions = {package: version for package in _PACKAGES if (version := version_of(package))}
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append(measure(name, 2, untuned) if asked.smoke else measure(name, _TURNS))
        print(name, {engine: round(us) for engine, us in rows[-1]["us"].items()}, rows[-1]["missing"] or "", flush=True)
        # After each, so that what was measured is kept.
        keep(asked, "engines.json", {"versions": versions, "turns": _TURNS, "rows": rows})


if __name__ == "__main__":
    main()
