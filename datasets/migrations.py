"""How to read what older schema versions wrote: cells of version ``n`` become cells of version ``n + 1``, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from autosched.core.decoding import decode_json


def upgraded(table: str, version: int, target: int, cells: dict[str, Any]) -> dict[str, Any]:
    """The cells of a row of ``table`` written by schema ``version``, as schema ``target`` writes them."""
    for step in range(version, target):
        cells = STEPS[step](table, cells)
    return cells


def _from_1(table: str, cells: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 ran each member of a group once, and had neither schedules nor graphs."""
    if table != "groups":
        return cells
    finish_us = decode_json(cells["finish_us"], list[float])
    once = msgspec.json.encode([1] * len(finish_us)).decode()
    return {**cells, "repeats": once, "together_us": max(finish_us)}


STEPS: dict[int, Callable[[str, dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""Schema ``n`` -> the step to ``n + 1``; every schema below today's has one."""
