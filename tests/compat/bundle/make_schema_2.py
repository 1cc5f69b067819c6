"""Writes ``schema-2.autosched`` beside this file. Ran once; the file stays as it is for ever, whatever later writers do."""

from __future__ import annotations

import random
from pathlib import Path

from autosched.core.records import DeviceKey, SoftwareKey
from autosched.export.bundle import make_bundle, write_bundle
from autosched.runtime.bundle.format import Bundle
from tests.conformance.bundles import evidence_for
from tests.conformance.graphs import TwoBranches, random_placement, two_branches_program

DEVICE = DeviceKey("cpu", "golden processor", (("cores", "2"),))
SOFTWARE = SoftwareKey((("torch", "2.13.0"),))
NUMERICS = (("deterministic", "False"),)
ROWS = (1, 4)


def main() -> None:
    """Write the file."""
    shapes: list[Bundle] = []
    for rows in ROWS:
        program, literals = two_branches_program(TwoBranches(seed=0).eval(), rows)
        schedule = random_placement(random.Random(5), program.graph, 2)
        evidence = evidence_for(len(program.graph), DEVICE, program.graph.hash)
        shapes.append(make_bundle(program, schedule, evidence, literals, DEVICE, SOFTWARE, numerics=NUMERICS))
    write_bundle(Path(__file__).parent / "schema-2.autosched", *shapes)


if __name__ == "__main__":
    main()
