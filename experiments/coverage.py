"""Which models autosched takes: a sweep over architectures of torchvision, timm, transformers and PyTorch, hand-written known and odd ones.

    python experiments/coverage.py                      all of them, one process each; a rerun goes on where the last one ended
    python experiments/coverage.py 'timm:*' odd:half    those that match; run again even if they are done

Weights are random, and nothing is downloaded. Each model is captured in every lowering without compiling, run in order and on two random
lanes, written to a bundle and loaded; what comes back is compared with the model as it came on two inputs. One JSON line a model goes to
``--lines``; the summary (counts by source and outcome, and every refusal with its reason) to ``results/coverage.json``. No
figure is a time. ``--smoke`` runs a handful and writes nothing unless told where.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(HERE.parent))

from experiments.coverage_cases.outcome import Outcome  # noqa: E402
from experiments.suite import environment  # noqa: E402

SOURCES = (
    "odd",
    "low_precision",
    "regions",
    "torch_modules",
    "known_models",
    "transformers_models",
    "transformers_tasks",
    "timm_families",
    "torchvision_models",
)
SMOKE = ("odd:returns-nested-dict", "odd:tied-weights", "odd:branch-on-value", "torch:lstm", "odd:in-place-through-views")


def cases(sources: tuple[str, ...] = SOURCES) -> dict[str, Any]:
    """Case name to builder, of every source whose library is installed."""
    found: dict[str, Any] = {}
    for source in sources:
        try:
            found.update(importlib.import_module(f"experiments.coverage_cases.{source}").cases())
        except ImportError as error:
            print(f"{source} left out: {error}", file=sys.stderr)
    return found


def child(source: str, name: str, memory_bytes: int, answer: Connection) -> None:
    """Check one model and send what came of it."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    sys.setrecursionlimit(10_000)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    import dataclasses

    import torch

    from experiments.coverage_cases.check import check

    torch.set_num_threads(1)
    try:
        found = dataclasses.asdict(check(cases((source,))[name]))
    except MemoryError:
        found = {"outcome": Outcome.MEMORY, "reason": "MemoryError"}
    if "allocate memory" in found["reason"] or "MemoryError" in found["reason"]:
        found["outcome"] = Outcome.MEMORY
    answer.send(found)


def run(source: str, name: str, timeout_s: float, memory_bytes: int) -> dict[str, Any]:
    """What came of one model, whatever happens to its process."""
    # Forked from a process that has imported and exported before, but started no thread: seconds saved for each model.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(source, name, memory_bytes, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            return {"outcome": Outcome.TIMEOUT, "reason": f"no answer within {timeout_s:.0f} s"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        process.join(10)
        return {"outcome": Outcome.CRASH, "reason": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        ours.close()


def done(lines: Path) -> dict[str, dict[str, Any]]:
    """The last line of each model; a line cut short is as if it were not there."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
        try:
            item = json.loads(line)
        except ValueError:
            continue
        found[item["name"]] = item
    return found


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by source and outcome, and one entry for each model that does not simply work."""
    counts: dict[str, dict[str, int]] = {}
    for name, item in found.items():
        of_source = counts.setdefault(name.partition(":")[0], dict.fromkeys(map(str, Outcome), 0))
        of_source[item["outcome"]] += 1
    others = [
        {"name": name, "outcome": item["outcome"], "reason": item["reason"], "export_refuses": item.get("export_refuses")}
        for name, item in sorted(found.items())
        if item["outcome"] != Outcome.WORKS
    ]
    notes = {name: item["notes"] for name, item in sorted(found.items()) if item.get("notes")}
    # A sweep that was continued after a change says so.
    commits = dict(Counter(str(item.get("commit", "")) for item in found.values()))
    return {"counts": counts, "others": others, "notes": notes, "commits": commits}


def _sweep(chosen: list[tuple[str, str]], lines: Path, timeout_s: float, memory_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    lines.parent.mkdir(parents=True, exist_ok=True)
    commit = environment()["commit"]
    for source, name in chosen:
        item = run(source, name, timeout_s, memory_bytes)
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **item, "commit": commit}) + "\n")
        yield name, item


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="patterns of case names; default all that are not done")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a model")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB a process")
    parser.add_argument("--lines", type=Path, default=Path(tempfile.gettempdir()) / "autosched_coverage.jsonl")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    sources = ("odd", "torch_modules") if arguments.smoke else SOURCES
    listed = {name: source for source in sources for name in cases((source,))}
    if arguments.smoke and not arguments.names:
        arguments.names = list(SMOKE)
    finished = done(arguments.lines)
    names = [name for name in listed if _wanted(name, arguments.names, finished)]
    _warm_up()
    for name, item in _sweep([(listed[name], name) for name in names], arguments.lines, arguments.timeout, int(arguments.memory * 2**30)):
        print(
            f"{name}: {item['outcome']} {item.get('seconds', '')} {item['reason'][:300]} {'; '.join(item.get('notes', ()))[:300]}",
            flush=True,
        )
    made = summary({name: item for name, item in done(arguments.lines).items() if name in listed})
    made["not_run"] = dict(Counter(name.partition(":")[0] for name in listed if name not in done(arguments.lines)))
    for source, counts in made["counts"].items():
        print(source, {outcome: count for outcome, count in counts.items() if count})
    if arguments.out is not None or not (arguments.smoke or arguments.names):
        out = arguments.out or HERE / "results" / "coverage.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"environment": environment(), **made}, indent=1) + "\n", encoding="utf-8")
    bad = [name for name in names if done(arguments.lines)[name]["outcome"] in (Outcome.WRONG, Outcome.ERROR, Outcome.CRASH)]
    sys.exit(f"wrong or crashed: {', '.join(bad)}" if bad else 0)


def _warm_up() -> None:
    """Everything that a child would otherwise import for itself: export alone brings seconds' worth."""
    import torch

    from autosched.capture.export import capture
    from autosched.core.schedule import sequential
    from experiments.serve.common import bundle_of

    importlib.import_module("experiments.coverage_cases.check")
    torch.set_num_threads(1)
    captured = capture(torch.nn.Linear(2, 2), (torch.randn(1, 2),))
    bundle_of(captured, sequential(captured.program.graph), "warm-up")


def _wanted(name: str, patterns: list[str], finished: Mapping[str, Any]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns) if patterns else name not in finished


if __name__ == "__main__":
    main()
