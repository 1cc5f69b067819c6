"""What a schedule becomes where lanes are not run as they were when it was tuned."""

from __future__ import annotations

import dataclasses

import torch

from autosched.core.records import Engine
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.cores import usable_cores

_WIDE = "sequential_wide"


def for_engine(bundle: Bundle, engine: Engine) -> Bundle:
    """``bundle`` as it may run on ``engine``.

    A schedule of several lanes that was the fastest without the interpreter can be much slower than none with it: there the operators run
    in order on one lane, as wide as in the better of the sequential schedules that were measured.
    """
    schedule = bundle.schedule
    if bundle.key.software.engine is engine or engine is Engine.NATIVE or schedule.lanes == 1:
        return bundle
    rows = [row for row in bundle.evidence.report.strategies if row.name in ("sequential", _WIDE) and row.measured_us is not None]
    best = min(rows, key=lambda row: row.measured_us or 0.0, default=None)
    width = max(1, min(torch.get_num_threads(), usable_cores())) if best is not None and best.name == _WIDE else 1
    count = len(schedule.order)
    return dataclasses.replace(bundle, schedule=dataclasses.replace(schedule, lane=(0,) * count, width=(width,) * count))
