"""What a model computes, whatever it was captured by and into: the key under which tuned schedules of any lowering are found."""

from __future__ import annotations

from autosched.capture.build import build_program
from autosched.capture.draft import Draft
from autosched.capture.passes.common_calls import eliminate_common_calls
from autosched.capture.passes.constants import fold_constants
from autosched.capture.passes.identities import drop_identities
from autosched.core.likeness import structure_key


def structure_of(draft: Draft) -> str:
    """``structure_key`` of an observed draft before it is rewritten for a device; ``draft`` is left as it is.

    Identities, repeated calls and what is computed from constants alone go first: Dynamo and ``torch.export`` leave different ones.

    Raises:
        UnsupportedGraph: if an argument cannot be written down.
    """
    copy = draft.copy()
    drop_identities(copy)
    eliminate_common_calls(copy)
    fold_constants(copy)
    program, _ = build_program(copy, "aten")
    return structure_key(program.graph)
