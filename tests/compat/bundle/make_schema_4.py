"""Writes ``schema-4.autosched`` beside this file. Ran once; the file stays as it is for ever, whatever later writers do."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from autosched.core.program_json import encode_program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.export.bundle import make_bundle, write_bundle
from tests.conformance.bundles import evidence_for
from tests.conformance.graphs import TwoBranches, random_placement, two_branches_program

DEVICE = DeviceKey("cpu", "golden processor", (("cores", "2"),))
SOFTWARE = SoftwareKey((("torch", "2.13.0"),))
NUMERICS = (("deterministic", "False"),)


def main() -> None:
    """Write the file."""
    program, literals = two_branches_program(TwoBranches(seed=0).eval(), 1)
    choices = (("mm float32[1, 8], float32[8, 4]", "triton_mm BLOCK_K=32, BLOCK_M=16"), ("addmm float32[4], float32[1, 8]", "addmm"))
    source = encode_program(program).decode()
    program = dataclasses.replace(program, lowering="max_autotune", source=source, frozen=True, choices=choices)
    schedule = random_placement(random.Random(6), program.graph, 2)
    evidence = evidence_for(len(program.graph), DEVICE, program.graph.hash)
    bundle = make_bundle(program, schedule, evidence, literals, DEVICE, SOFTWARE, numerics=NUMERICS)
    write_bundle(Path(__file__).parent / "schema-4.autosched", bundle)


if __name__ == "__main__":
    main()
