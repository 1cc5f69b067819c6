"""Which function answers which probe; each takes a bench and returns its answer in a sentence, and its raw data."""

from __future__ import annotations

from collections.abc import Callable

import probe_measuring
import probe_memory
import probe_nodes
import probe_order
import probe_pace
import probe_products
from probe_bench import Answer, Bench

ANSWERS: dict[str, Callable[[Bench], Answer]] = {
    "P1": probe_memory.p1,
    "P2": probe_memory.p2,
    "P2r": probe_memory.p2r,
    "P3": probe_order.p3,
    "P4": probe_order.p4,
    "P5a": probe_order.p5a,
    "P5b": probe_order.p5b,
    "P6": probe_order.p6,
    "P7": probe_memory.p7,
    "P8": probe_nodes.p8,
    "P9": probe_measuring.p9,
    "P10": probe_nodes.p10,
    "P11": probe_measuring.p11,
    "P12": probe_measuring.p12,
    "P13": probe_order.p13,
    "P14": probe_measuring.p14,
    "P15": probe_products.p15,
    "P16": probe_pace.p16,
}
ON_THE_DOUBLE = frozenset({"P1", "P2", "P3", "P6", "P9", "P11", "P12", "P16"})
