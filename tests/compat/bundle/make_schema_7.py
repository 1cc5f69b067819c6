"""Writes ``schema-7.autosched`` beside this file. Ran once; the file stays as it is for ever, whatever later writers do."""

from __future__ import annotations

from pathlib import Path

import torch

from autosched.capture.export import capture
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.schedule import sequential
from autosched.export.bundle import make_bundle, write_bundle
from tests.conformance.bundles import evidence_for
from tests.conformance.deciding import Deciding

DEVICE = DeviceKey("cpu", "golden processor", (("cores", "2"),))
SOFTWARE = SoftwareKey((("torch", "2.13.0"),))
NUMERICS = (("deterministic", "False"),)


def main() -> None:
    """Write the file."""
    captured = capture(Deciding().eval(), (torch.ones(4, 8),))
    graph = captured.program.graph
    evidence = evidence_for(len(graph), DEVICE, graph.hash)
    bundle = make_bundle(captured.program, sequential(graph), evidence, {}, DEVICE, SOFTWARE, numerics=NUMERICS)
    write_bundle(Path(__file__).parent / "schema-7.autosched", bundle)


if __name__ == "__main__":
    main()
