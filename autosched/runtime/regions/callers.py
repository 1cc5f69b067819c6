"""Compiled pieces of an operator as callables on its slots."""

from __future__ import annotations

import logging
from operator import itemgetter

from autosched.runtime.calls import Kernel, Slots
from autosched.runtime.inductor.instructions import region_instructions
from autosched.runtime.inductor.source import Unrecognised
from autosched.runtime.instructions import carrying
from autosched.runtime.regions.compile import Code, Entry
from autosched.runtime.regions.pieces import Piece

_log = logging.getLogger(__name__)


def caller(entry: Entry, piece: Piece) -> Kernel:
    """What calls ``entry`` with what the piece reads, and puts what it returns where the piece writes."""
    reads, writes = piece.reads, piece.writes
    if len(reads) > 1 and len(writes) == 1:
        take, only = itemgetter(*reads), writes[0]

        def run_one(slots: Slots) -> None:
            slots[only] = entry(list(take(slots)))[0]

        return run_one

    def run(slots: Slots) -> None:
        made = entry([slots[value] for value in reads])
        for value, tensor in zip(writes, made, strict=True):
            slots[value] = tensor

    return run


def caller_on_cpu(code: Code, piece: Piece, name: str) -> Kernel:
    """The callable of a piece, with its instructions if the code is understood."""
    kernel = caller(code.entry, piece)
    try:
        namespace = getattr(code.entry, "__globals__", {})
        return carrying(kernel, region_instructions(code.source, namespace, piece.reads, piece.writes))
    except Unrecognised as error:
        _log.debug("%s needs the interpreter: %s", name, error)
        return kernel
