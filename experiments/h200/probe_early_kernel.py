"""A link of a chain, for P13: it may start while the link before it still runs, and then waits for its end before it reads.

A module of its own, because Triton is not everywhere the other probes are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def link(source, target, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """``target = source + 1``, ``BLOCK`` elements a block."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_wait()
    values = tl.load(source + places)
    if EARLY:
        gdc_launch_dependents()
    tl.store(target + places, values + 1)
