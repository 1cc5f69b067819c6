"""Bytes that a unit of Inductor's code reads, and those of what it changes that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autosched.core.graph import Value
from autosched.runtime.inductor.units import Unit


def bytes_read(unit: Unit, place: Mapping[str, int], values: Sequence[Value]) -> int:
    """Bytes of the values read; a buffer only handed over to be written to, or read through its windows, counts no second time."""
    windows = {name.partition("#")[0] for name in (*unit.reads, *unit.makes) if "#" in name}
    names = [name for name in unit.reads if name not in windows]
    if unit.name.startswith("_mkl_linear") and len(names) >= 3:
        # (input, packed weight, weight): one of the two is read, and MKL packs the smallest weight into megabytes.
        names.pop(1)
    return sum(values[place[name]].spec.bytes for name in names)


def bytes_changed(changes: Sequence[int], reads: Sequence[int], values: Sequence[Value]) -> int:
    """Of each buffer no more than what is read: who fills one place of a large cache leaves the rest alone."""
    read = sum(values[value].spec.bytes for value in reads)
    return sum(min(values[value].spec.bytes, read or values[value].spec.bytes) for value in changes)
