"""A program as JSON: the one place that knows its fields, so that a new field of ``Program`` travels without being listed again.

A field with a default is left out while it has that value, and may be absent: files written before the field existed stay readable,
and older readers understand programs that do not use it. Unknown fields are an error.
"""

from __future__ import annotations

import dataclasses
import typing

import msgspec

from autosched.core.decoding import decode_json
from autosched.core.graph import OpGraph
from autosched.core.program import Program


def _field_types() -> list[tuple[str, typing.Any] | tuple[str, typing.Any, typing.Any]]:
    # ``core.program`` names the graph's type for type checkers only: the graph imports that file.
    hints = typing.get_type_hints(Program, localns={"OpGraph": OpGraph})
    fields: list[tuple[str, typing.Any] | tuple[str, typing.Any, typing.Any]] = []
    for field in dataclasses.fields(Program):
        if field.default is not dataclasses.MISSING:
            fields.append((field.name, hints[field.name], field.default))
        elif field.default_factory is not dataclasses.MISSING:
            fields.append((field.name, hints[field.name], msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, hints[field.name]))
    return fields


_ProgramStruct: typing.Any = msgspec.defstruct(
    "_ProgramStruct", _field_types(), frozen=True, forbid_unknown_fields=True, omit_defaults=True
)


def encode_program(program: Program) -> bytes:
    """Canonical bytes: equal programs give equal bytes."""
    return msgspec.json.encode(
        _ProgramStruct(**{name: getattr(program, name) for name in _ProgramStruct.__struct_fields__}), order="sorted"
    )


def decode_program(data: bytes) -> Program:
    """The inverse of :func:`encode_program`. Only types are checked; ``runtime.bundle.program_check`` does the rest.

    Raises:
        msgspec.MsgspecError: if the bytes are no program.
    """
    raw = decode_json(data, _ProgramStruct)
    return Program(**{name: getattr(raw, name) for name in _ProgramStruct.__struct_fields__})
