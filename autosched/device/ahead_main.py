"""The process that compiles a whole model ahead: one question, one answer, and no sign of life in between, so that its limit is a limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from autosched.core.decoding import decode_json
from autosched.core.errors import UsageError
from autosched.core.program import Program
from autosched.core.variants import Lowering
from autosched.device.ahead import AHEAD, AheadBody, AheadResult
from autosched.device.worker_child import Channel
from autosched.device.worker_messages import Answer, ExtraAnswer, ExtraRequest, Request
from autosched.device.worker_tensors import read_program
from autosched.runtime.compiler_files import compilers_write_into
from autosched.runtime.host_key import apply_numerics
from autosched.runtime.inductor.bind import forms_of, record
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.modes import Mode


def handle(request: Request) -> Iterator[Answer]:
    """Answer one request."""
    if not isinstance(request, ExtraRequest) or request.name != AHEAD:
        raise UsageError(f"the compiling process cannot answer {type(request).__name__}")
    found = AheadResult(_compiled(decode_json(request.body, AheadBody)))
    yield ExtraAnswer(AHEAD, msgspec.Raw(msgspec.json.encode(found)))


def _compiled(body: AheadBody) -> str:
    compilers_write_into(Path(body.program_file).parent)
    home = torch.device(body.device)
    if home.type == "cuda":
        torch.cuda.set_device(home)
    program, constants = read_program(body.program_file, body.constants_file, home)
    apply_numerics(body.numerics)
    why = ""
    for in_place in forms_of(program):
        why = _compiled_as(program, constants, home, Mode(Lowering(body.lowering)), body.threads, in_place=in_place)
        if not why:
            break
    return why


def _compiled_as(
    program: Program, constants: Mapping[int, torch.Tensor], home: torch.device, mode: Mode, widths: Sequence[int], *, in_place: bool
) -> str:
    """Why it cannot be compiled at one of the widths, or an empty string."""
    for threads in widths:
        torch.set_num_threads(threads)
        recorded = record(program, constants, home, mode, in_place=in_place)
        if isinstance(recorded, Refused):
            return recorded.reason
        mode = dataclasses.replace(mode, choices=recorded.program.choices)
    return ""


def main() -> None:
    """Serve until the parent is done."""
    Channel().serve(handle)
