"""Opara's published code beside autosched, interleaved in one process on one GPU.

    git clone https://github.com/OparaSys/Opara opara-published      # outside this repository: it has no licence
    python experiments/h200/opara.py --repository opara-published torchvision:googlenet autosched:deepfm --out DIR

The published code (read at commit 308aaaf) was written for PyTorch 2.0. What keeps it from running on 2.11 is bridged here, outside of it:
``torch._dynamo.explain`` no longer returns a tuple; Dynamo makes parameters inputs of the graph, so the graph comes from Dynamo without
that or, where that is gone, from ``torch.fx.symbolic_trace``; and a kernel is found by its place among ``cudaLaunchKernel`` events, which
newer CUDA libraries do not always use, so the profiler's trace is rewritten to have one launch of that name for each kernel. Its schedule,
its streams and its capture are its own. Batch norms stay as they are in it, so the like-for-like rows are of the lowering ``aten``;
*tuned* is what ``autosched.tune`` keeps by itself. A model that has a file is not measured again: calling it again goes on. Exit status 1:
one failed, which keeps no other from its turn; 10: something is left.

Every contestant copies its input, replays, and hands out its static outputs; *tuned*, which is called as a server would, copies those as
well. Each is launched behind work that keeps the GPU busy, as in the published example, so that the host's calls are on nobody's clock.
``--smoke`` needs no GPU and no repository: it checks the
bridge on a small model and writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.runtime.inductor.pools import end_pools  # noqa: E402
from experiments import calls  # noqa: E402
from experiments.devices import results_of  # noqa: E402
from experiments.serve.common import interval  # noqa: E402
from experiments.suite import environment, stem_of  # noqa: E402

MODELS = ("torchvision:googlenet", "autosched:deepfm")
# Of one model, besides tuning: importing, measuring operators, the published code's own profile, the rounds.
_AROUND_S = 45.0
# Half a millisecond of a GPU, as in the published example: longer than any contestant's calls take on the host.
_BUSY_CYCLES = 1_000_000
_LAUNCHES = frozenset({"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchCooperativeKernel"})
_VISIBLE = "CUDA_VISIBLE_DEVICES"
Call = Callable[[], Any]


def module_graph(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The model's graph with modules as nodes and its inputs as the only placeholders: what the published code schedules."""
    seen: list[torch.fx.GraphModule] = []

    def keep(found: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(found)
        return found.forward

    # 2.13 warns that the setting no longer does anything; then the placeholders tell.
    with (
        contextlib.suppress(Exception),
        warnings.catch_warnings(action="ignore"),
        torch._dynamo.config.patch(inline_inbuilt_nn_modules=False),
        torch.no_grad(),
    ):
        torch.compile(model, backend=keep)(*inputs)
    torch._dynamo.reset()
    if len(seen) == 1 and sum(node.op == "placeholder" for node in seen[0].graph.nodes) == len(inputs):
        return seen[0]
    return torch.fx.symbolic_trace(model)


def one_launch_per_kernel(trace: dict[str, Any]) -> dict[str, Any]:
    """A profiler's trace reduced to what the published reader looks for: one run, its nodes, each kernel beside its launch."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = {event["args"]["correlation"]: event for event in events if event.get("cat") == "kernel"}
    launches = sorted(
        (event for event in events if event["name"] in _LAUNCHES and event["args"].get("correlation") in kernels),
        key=lambda event: event["ts"],
    )
    nodes = sorted((event for event in events if event["name"].endswith(": run_node")), key=lambda event: event["ts"])
    kept: list[dict[str, Any]] = [{"name": "run", "ts": 0, "dur": 0}, *nodes]
    for launch in launches:
        kept += [{**launch, "name": "cudaLaunchKernel"}, {**kernels[launch["args"]["correlation"]], "name": "kernel"}]
    return {"deviceProperties": trace["deviceProperties"], "traceEvents": kept}


@contextlib.contextmanager
def _undone() -> Iterator[None]:
    """Puts back what the published code changes for all of the process: which GPUs those see that it starts, and the current stream."""
    visible = os.environ.get(_VISIBLE)
    with torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_available() else contextlib.nullcontext():
        try:
            yield
        finally:
            os.environ.pop(_VISIBLE, None)
            os.environ.update({} if visible is None else {_VISIBLE: visible})


@contextlib.contextmanager
def published(repository: Path) -> Iterator[ModuleType]:
    """Its ``GraphCapturer``, bridged, from a copy without the profile it ships: a fresh one is taken on this GPU and deleted."""
    package = repository / "Opara"
    if not (package / "GraphCapturer.py").is_file():
        raise SystemExit(f"{repository} holds no Opara/GraphCapturer.py; clone https://github.com/OparaSys/Opara there")
    with tempfile.TemporaryDirectory() as folder, _undone():
        shutil.copytree(package, Path(folder) / "Opara", ignore=shutil.ignore_patterns("profile_result"))
        (Path(folder) / "Opara" / "profile_result").mkdir()
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            capturer, profiler = (importlib.import_module(f"Opara.{name}") for name in ("GraphCapturer", "ModelProfiler"))
        finally:
            sys.path.remove(folder)
        shipped = profiler.profile

        def profile(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], path: str) -> None:
            # The first run of a kernel is not like the others.
            with torch.no_grad():
                graph(*inputs)
            shipped(graph, inputs, path)
            target = Path(path)
            target.write_text(json.dumps(one_launch_per_kernel(json.loads(target.read_text(encoding="utf-8")))), encoding="utf-8")

        profiler.profile = profile
        capturer.dynamo = _Explained
        try:
            yield capturer
        finally:
            for name in [name for name in sys.modules if name == "Opara" or name.startswith("Opara.")]:
                del sys.modules[name]


class _Explained:
    """What the published code asks of ``torch._dynamo``, answered as PyTorch 2.0 did."""

    reset = staticmethod(torch._dynamo.reset)

    @staticmethod
    def explain(model: torch.nn.Module, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Six values, of which the third is the list of graphs."""
        return None, None, [module_graph(model, inputs)], None, None, None


def ours(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], seed: int) -> dict[str, Call]:
    """The same operators (lowering ``aten``) in one sequential graph, and in the graphs of our implementation of Opara's two orders."""
    from autosched.capture.export import capture
    from autosched.core.variants import Lowering
    from autosched.datasets.facts import device_facts
    from autosched.device.registry import device_named
    from autosched.pipeline.budget import budget_for
    from autosched.pipeline.demands import demands
    from autosched.pipeline.graph_proofs import launch_facts
    from autosched.pipeline.measuring import Ledger, cost_table, measure_solo
    from autosched.pipeline.memory import open_journal
    from autosched.pipeline.scope import scope_of
    from autosched.runtime.cuda.load import cuda_runner
    from autosched.runtime.kernels import bind
    from autosched.runtime.plan import make_plan
    from autosched.search.heuristics.opara import OPARA
    from autosched.search.heuristics.sequential import SEQUENTIAL
    from autosched.search.problem import Problem
    from autosched.search.strategy import SearchContext

    device = device_named("cuda")
    captured = capture(model, inputs, None, target="cuda", lowering=Lowering.ATEN)
    graph = captured.program.graph
    session = device.open(captured.program, captured.constants, timeout_s=120.0)
    try:
        with open_journal(scope_of(device, session.limits), private=False) as journal:
            solo = measure_solo(session, graph, device_facts(device.key), journal, budget_for("quick").solo_rounds, Ledger())
        launches = launch_facts(session, graph)
        table = cost_table(session, graph, device.key, solo, [], launches)
    finally:
        session.close()
    wanted = demands(graph, launches, device_facts(device.key))
    problem = Problem.make(graph, table, demand=wanted.demand, memory_bound=wanted.memory_bound)
    context = SearchContext(np.random.default_rng(seed))
    schedules = {"sequential, same operators": SEQUENTIAL.propose(problem, context)[0]}
    for place, schedule in enumerate(OPARA.propose(problem, context)):
        schedules[f"opara, ours, {('alternating', 'least demand first')[place]}"] = schedule
    bound = bind(captured.program, captured.constants)
    runners = {name: cuda_runner(bound, make_plan(graph, schedule), inputs) for name, schedule in schedules.items()}
    return {name: functools.partial(runner.run_static, inputs) for name, runner in runners.items()}


def replayed_us(call: Call) -> float:
    """Microseconds on the GPU from before the inputs are copied until the outputs are there."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_BUSY_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def contest(name: str, repository: Path, rounds: int, budget_s: float, seed: int, lowering: str | None) -> dict[str, Any]:
    """Every contestant's times on one model, and how far each one's outputs are from the model's own."""
    import autosched
    from autosched import zoo

    subject = zoo.load(name)
    model, inputs = subject.model.cuda().eval(), tuple(tensor.cuda() for tensor in subject.args)
    if subject.kwargs:
        raise SystemExit(f"the published code takes positional inputs only; {name} has others")
    with torch.no_grad():
        expected = _first(model(*inputs)).clone()
    calls: dict[str, Call] = ours(model, inputs, seed)
    tuned = autosched.tune(model, inputs, device="cuda", effort="quick", budget_s=budget_s, seed=seed, name=name, lowering=lowering)
    loaded = autosched.load(tuned.to_bytes(), model)
    calls["tuned"] = functools.partial(loaded, *inputs)
    failure = ""
    with published(repository) as capturer:
        try:
            calls["opara, published"] = functools.partial(capturer.capturer(inputs, model), *inputs)
        except Exception as error:  # a result too: the published code does not run on this model
            failure = f"{type(error).__name__}: {error}"[:500]
    calls["sequential again"] = calls["sequential, same operators"]
    times: dict[str, list[float]] = {key: [] for key in calls}
    errors = {}
    with torch.no_grad():
        for key, call in calls.items():
            for _ in range(10):
                answer = _first(call())
            errors[key] = float((answer.float() - expected.float()).abs().max())
        order, rng = list(calls), random.Random(seed)
        for _ in range(rounds):
            rng.shuffle(order)
            for key in order:
                times[key].append(replayed_us(calls[key]))
    base = times["sequential, same operators"]
    rows = {}
    for key, column in times.items():
        ratios = [before / after for before, after in zip(base, column, strict=True)]
        rows[key] = {
            "median_us": statistics.median(column),
            "ci_us": interval(column),
            "over_sequential": statistics.median(ratios),
            "over_sequential_ci": interval(ratios),
            "max_abs_error": errors[key],
        }
    device = {"name": torch.cuda.get_device_name()}
    return {
        "model": name,
        "device": device,
        "rounds": rounds,
        "tuned_lowering": tuned.report.lowering,
        "rows": rows,
        "published_failed": failure,
        "tuned_verdict": tuned.report.verdict,
    }


def _first(answer: Any) -> torch.Tensor:
    while not isinstance(answer, torch.Tensor):
        answer = answer[0]
    return answer


def smoke() -> None:
    """The bridge, where there is no GPU: the graph has the model's inputs only, and a made-up trace is reduced to its launches."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    inputs = (torch.ones(1, 4),)
    graph = module_graph(model, inputs)
    assert sum(node.op == "placeholder" for node in graph.graph.nodes) == 1
    assert torch.equal(_first(graph(*inputs)), model(*inputs))
    trace = {
        "deviceProperties": [],
        "traceEvents": [
            {"ph": "X", "name": "cuLaunchKernelEx", "ts": 2, "dur": 1, "args": {"correlation": 7}},
            {"ph": "X", "name": "gemm", "cat": "kernel", "ts": 5, "dur": 3, "args": {"correlation": 7}},
            {"ph": "X", "name": "cudaLaunchKernel", "ts": 3, "dur": 1, "args": {"correlation": 8}},
            {"ph": "X", "name": "torch/fx/interpreter.py(1): run_node", "ts": 1, "dur": 9, "args": {}},
        ],
    }
    names = [event["name"] for event in one_launch_per_kernel(trace)["traceEvents"]]
    assert names == ["run", "torch/fx/interpreter.py(1): run_node", "cudaLaunchKernel", "kernel"], names
    print("the bridge holds; the contest itself needs a GPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--repository", type=Path, help="a clone of the published code")
    parser.add_argument("--out", type=Path, default=None, help="default: $OUT, else experiments/results/<device>/opara")
    parser.add_argument("--deadline", type=float, default=520.0, help="seconds for this call")
    parser.add_argument("--again", action="store_true", help="measure again what has a file")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for tuning, for each model")
    parser.add_argument("--lowering", default=None, help="of what is tuned; by default the job's choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        smoke()
        return 0
    if options.repository is None or not torch.cuda.is_available():
        parser.error("needs --repository with a clone of the published code, and a GPU")
    out = options.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else results_of("cuda") / "opara")
    call = calls.Call(options.deadline, expect_s=options.budget + _AROUND_S)
    files = {name: out / f"{stem_of(name)}.json" for name in options.models}
    left = [name for name in options.models if options.again or not files[name].exists()]
    failed = False
    while left and call.fits():
        name = left.pop(0)
        began = time.monotonic()
        try:
            found = contest(name, options.repository, options.rounds, options.budget, options.seed, options.lowering)
        except Exception:  # minutes of a GPU are too dear to be given up for one model that fails
            traceback.print_exc()
            failed = True
            continue
        took_s = time.monotonic() - began
        call.took(took_s)
        calls.write_json(files[name], {"environment": environment(), **found, "took_s": round(took_s, 1)})
        for key, row in found["rows"].items():
            print(f"{name}: {key}: {row['median_us']:.1f} us, {row['over_sequential']:.3f}x the sequential graph", flush=True)
        if found["published_failed"]:
            print(f"{name}: the published code did not run: {found['published_failed']}", flush=True)
    if left:
        print(f"{len(left)} of {len(options.models)} are left, the next is {left[0]}; call again", flush=True)
    return calls.LEFT if left else int(failed)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    finally:
        # What a compiler has left to wait for may take minutes of a GPU.
        end_pools()
