"""Writes ``schema-12.autosched`` beside this file. Ran once; the file stays as it is for ever, whatever later writers do."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.variants import Variant
from autosched.export.bundle import make_bundle, write_bundle
from tests.conformance.bundles import evidence_for
from tests.conformance.graphs import TwoBranches, random_placement, two_branches_program

DEVICE = DeviceKey("cpu", "golden processor", (("cores", "2"),))
SOFTWARE = SoftwareKey((("torch", "2.13.0"),))
NUMERICS = (("deterministic", "False"),)


def main() -> None:
    """Write the file."""
    program, literals = two_branches_program(TwoBranches(seed=0).eval(), 1)
    placed = random_placement(random.Random(12), program.graph, 2)
    schedule = dataclasses.replace(placed, variant=(int(Variant.OWN_POOLING),) * len(program.graph))
    evidence = evidence_for(len(program.graph), DEVICE, program.graph.hash)
    bundle = make_bundle(program, schedule, evidence, literals, DEVICE, SOFTWARE, numerics=NUMERICS)
    write_bundle(Path(__file__).parent / "schema-12.autosched", bundle)


if __name__ == "__main__":
    main()
