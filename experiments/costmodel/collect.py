"""Measure kernels and pairs of zoo models on a device into a store; stop it at any time, run it again and it goes on.

python experiments/costmodel/collect.py torchvision:googlenet autosched:deepfm -o runs --device cpu --budget 120
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from autosched import zoo
from autosched.capture.export import capture
from autosched.core.errors import AutoschedError
from autosched.datasets.audit import audit
from autosched.datasets.collect import collect_model
from autosched.datasets.facts import device_facts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import ScopeRow
from autosched.datasets.session_measurer import SessionMeasurer
from autosched.datasets.store import Store
from autosched.device.registry import device_named


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each model")
    parser.add_argument("--pairs", type=int, default=400, help="ordered pairs for each model")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = device_named(options.device)
    scope = ScopeRow(Scope(device.key, device.software).digest, device.key, device.software, device_facts(device.key))
    store = Store.create(options.output)
    for name in options.models:
        try:
            made = zoo.load(name)
            captured = capture(made.model, made.args, made.kwargs)
        except AutoschedError as error:
            sys.stderr.write(f"{name} is left out: {error}\n")
            continue
        session = device.open(captured.program, captured.constants, timeout_s=120.0)
        try:
            report = collect_model(
                captured.program.graph,
                SessionMeasurer(session, repeats=options.repeats),
                store,
                scope,
                model=name,
                widths=session.limits.widths,
                max_pairs=options.pairs,
                max_groups=0,
                budget_s=options.budget,
                rng=np.random.default_rng(options.seed),
                progress=lambda what, done, total, of=name: sys.stderr.write(f"{of}: {what} {done} of {total}\n"),
            )
        finally:
            session.close()
        sys.stderr.write(f"{name}: {report}\n")
    found = audit(store)
    usable = found.pair_rows - len(found.excluded & {row.key for row in store.pairs()})
    sys.stdout.write("\n".join([f"{usable} usable pairs, noise floor {found.noise_floor_pct:.1f} %", *found.lines()]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
