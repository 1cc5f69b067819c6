"""Writes ``schema-1.autosched`` beside this file. Ran once; the file stays as it is for ever, whatever later writers do."""

from __future__ import annotations

import random
from pathlib import Path

from autosched.core.records import DeviceKey, SoftwareKey
from autosched.export.bundle import make_bundle
from tests.conformance.bundles import encode_schema_1, evidence_for
from tests.conformance.graphs import TwoBranches, random_placement, two_branches_program

DEVICE = DeviceKey("cpu", "golden processor", (("cores", "2"),))
SOFTWARE = SoftwareKey((("torch", "2.13.0"),))
NUMERICS = (("deterministic", "False"),)


def main() -> None:
    """Write the file."""
    program, literals = two_branches_program(TwoBranches(seed=0).eval())
    schedule = random_placement(random.Random(5), program.graph, 2)
    evidence = evidence_for(len(program.graph), DEVICE, program.graph.hash)
    bundle = make_bundle(program, schedule, evidence, literals, DEVICE, SOFTWARE, numerics=NUMERICS)
    (Path(__file__).parent / "schema-1.autosched").write_bytes(encode_schema_1(bundle))


if __name__ == "__main__":
    main()
