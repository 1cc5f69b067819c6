"""Write the tables of README.md, experiments/README.md and docs/ from recorded results.

Each stands between ``<!-- table:NAME -->`` and ``<!-- end:NAME -->``.

python experiments/tables.py            rewrite them
python experiments/tables.py --check    fail if one would change
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGES = (HERE.parent / "README.md", HERE / "README.md", *sorted((HERE.parent / "docs").glob("*.md")))
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(HERE.parent))

from experiments import (  # noqa: E402
    tables_attention,
    tables_chains,
    tables_claims,
    tables_convolutions,
    tables_coverage,
    tables_engines,
    tables_fused,
    tables_gpu,
    tables_halves,
    tables_packing,
    tables_pooling,
    tables_products,
    tables_recurrent,
    tables_search,
    tables_serve,
    tables_suite,
    tables_winograd,
)
from experiments.devices import RESULTS  # noqa: E402
from experiments.tables_recorded import NOT_YET, cpus, for_each, gpus  # noqa: E402


def pasted(path: Path) -> str:
    """What a command printed, as a code block."""
    if not path.exists():
        return NOT_YET
    return "```\n" + "\n".join(line.rstrip() for line in path.read_text().strip("\n").splitlines()) + "\n```"


def of_gpus(table: Callable[[Path], str]) -> str:
    """``table`` of each GPU that something was recorded on."""
    return for_each(gpus(RESULTS), table)


def of_cpus(table: Callable[[Path], str]) -> str:
    """``table`` of each CPU that something was recorded on."""
    return for_each(cpus(RESULTS), table)


def of_cpu(table: Callable[[Path], str]) -> str:
    """``table`` of the CPU with most models, of those where it was recorded."""
    return next((text for folder in cpus(RESULTS) if (text := table(folder)) != NOT_YET), NOT_YET)


def included(path: Path) -> str:
    """Markdown that a script wrote."""
    return path.read_text().strip("\n") if path.exists() else NOT_YET


TABLES = {
    "cpu-short": lambda: of_cpu(tables_suite.short_table),
    "cpu-suite": lambda: of_cpus(tables_suite.suite_table),
    "cpu-more": lambda: of_cpus(lambda folder: tables_suite.more_table(folder / "more")),
    "processes-cpu": lambda: of_cpus(lambda folder: tables_suite.processes_table(folder / "processes.json")),
    "tune-googlenet": lambda: of_cpu(lambda folder: pasted(folder / "tune_googlenet.txt")),
    "bench-googlenet": lambda: of_cpu(lambda folder: pasted(folder / "bench_googlenet.txt")),
    "compile-cost-cpu": lambda: of_cpus(lambda folder: tables_fused.compile_cost_table(folder / "compile_cost")),
    "gpu-short": lambda: of_gpus(lambda folder: tables_gpu.short_table(folder / "suite")),
    "gpu-suite": lambda: of_gpus(lambda folder: tables_gpu.suite_table(folder / "suite")),
    "gpu-lowerings": lambda: of_gpus(lambda folder: tables_gpu.lowerings_table(folder / "suite")),
    "gpu-fused": lambda: of_gpus(lambda folder: tables_fused.fused_table(folder / "fused")),
    "gpu-compile-cost": lambda: of_gpus(lambda folder: tables_fused.compile_cost_table(folder / "compile_cost")),
    "gpu-serve": lambda: of_gpus(tables_serve.serve_table),
    "gpu-probes": lambda: of_gpus(lambda folder: tables_gpu.probes_table(folder / "probes.json")),
    "gpu-opara": lambda: of_gpus(lambda folder: tables_gpu.opara_table(folder / "opara")),
    "gpu-costmodel": lambda: of_gpus(lambda folder: tables_gpu.costmodel_table(folder / "costmodel.json")),
    "claims": lambda: tables_claims.claims_table(RESULTS, RESULTS / "sim"),
    "coverage": lambda: tables_coverage.coverage_table(RESULTS / "coverage.json"),
    "state-cpu": lambda: of_cpus(lambda folder: tables_serve.state_table(folder / "state.json")),
    "generate-cpu": lambda: of_cpus(lambda folder: tables_serve.generate_table(folder / "generate.json")),
    "generate-gpu": lambda: of_gpus(lambda folder: tables_serve.generate_table(folder / "generate.json")),
    "memory-cpu": lambda: of_cpus(lambda folder: tables_serve.memory_table(folder / "memory.json")),
    "paused-cpu": lambda: of_cpus(lambda folder: tables_serve.paused_table(folder / "paused.json")),
    "callers-cpu": lambda: of_cpus(lambda folder: tables_serve.callers_table(folder / "callers.json")),
    "serve-cpu": lambda: of_cpus(tables_serve.serve_table),
    "lanes-cpu": lambda: of_cpus(tables_serve.lanes_table),
    "packing-cpu": lambda: of_cpus(tables_packing.packing_table),
    "narrow-cpu": lambda: of_cpus(tables_packing.narrow_table),
    "attention-cpu": lambda: of_cpus(tables_attention.attention_table),
    "pooling-cpu": lambda: of_cpus(tables_pooling.pooling_table),
    "convolutions-cpu": lambda: of_cpus(tables_convolutions.convolutions_table),
    "chains-cpu": lambda: of_cpus(tables_chains.chains_table),
    "engines-cpu": lambda: of_cpus(tables_engines.engines_table),
    "winograd-cpu": lambda: of_cpus(tables_winograd.winograd_table),
    "products-cpu": lambda: of_cpus(tables_products.products_table),
    "halves-cpu": lambda: of_cpus(tables_halves.halves_table),
    "recurrent-cpu": lambda: of_cpus(tables_recurrent.recurrent_table),
    "fused-cpu": lambda: of_cpus(lambda folder: tables_fused.fused_table(folder / "fused")),
    "search-quality": lambda: tables_search.quality_table(RESULTS / "sim" / "quality.json"),
    "search-spare-time": lambda: tables_search.spare_time_table(RESULTS / "sim" / "spare_time.json"),
    "search-speed": lambda: tables_search.speed_table(RESULTS / "sim" / "speed.json"),
    "composition-cpu": lambda: of_cpus(lambda folder: included(folder / "composition.txt")),
    "composition-gpu": lambda: of_gpus(lambda folder: included(folder / "composition.txt")),
    "train-cpu": lambda: of_cpu(lambda folder: included(folder / "train.txt")),
}


def rewritten(text: str) -> str:
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- table:{name} -->\n).*?(<!-- end:{name} -->)", re.DOTALL)
        body = make()
        text = pattern.sub(lambda match, body=body: match.group(1) + body + "\n" + match.group(2), text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    after = {path: rewritten(text) for path, text in texts.items()}
    if arguments.check:
        stale = [str(path.relative_to(HERE.parent)) for path in PAGES if after[path] != texts[path]]
        sys.exit(f"{', '.join(stale)} is not what the recorded results say; run experiments/tables.py" if stale else 0)
    for path in PAGES:
        path.write_text(after[path], encoding="utf-8")


if __name__ == "__main__":
    main()
