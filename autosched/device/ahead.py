"""Compiling a whole model ahead, in a process that can be ended: whoever compiles it next finds what was done in Inductor's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from autosched.core.decoding import decode_json
from autosched.core.errors import WorkerLost
from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.core.records import FailureKind
from autosched.core.variants import Lowering
from autosched.device.worker import Worker, WorkerDied
from autosched.device.worker_messages import Broken, ExtraAnswer, ExtraRequest
from autosched.runtime.inductor_unfinished import remove_unfinished

MODULE = "autosched.device.ahead_main"
AHEAD = "compile-ahead"


class AheadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile the program in ``program_file`` for ``device`` in the mode of ``lowering``, once for each number of ``threads``.

    What is chosen by timing is chosen for the first of them, and taken for the others.
    """

    program_file: str
    constants_file: str
    device: str
    threads: tuple[int, ...]
    lowering: str
    matmul_precision: str  # part of what Inductor's cache goes by


class AheadResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``reason``: why the code cannot be used; empty if it can."""

    reason: str


def compile_ahead(
    source: Program,
    constants: Mapping[int, torch.Tensor],
    device: torch.device | str,
    threads: Sequence[int],
    limit_s: float,
    lowering: Lowering = Lowering.INDUCTOR,
) -> str:
    """Compile ``source`` as a whole in a process of its own.

    Args:
        source: a program of ATen calls, as ``pipeline.inductor_capture.lower_inductor`` gets it.
        constants: tensor of each of its bindings, by value index.
        device: what it is compiled for.
        threads: the numbers of threads that code is wanted for, most first; on a GPU they mean nothing.
        limit_s: seconds after which the process is ended.
        lowering: one of ``WHOLE``: Inductor's mode. In one that times kernels, nothing else should run on the device.

    Returns:
        Why the lowering is not to be had, or empty: then compiling it here takes little time.
    """
    worker = Worker(MODULE, timeout_s=limit_s)
    try:
        program_file = worker.folder / "program.json"
        program_file.write_bytes(encode_program(source))
        tensors = {str(value): tensor.detach().cpu() for value, tensor in constants.items()}
        constants_file = worker.write_tensors("constants.safetensors", tensors)
        home, precision = str(torch.device(device)), torch.get_float32_matmul_precision()
        body = AheadBody(str(program_file), str(constants_file), home, tuple(threads), lowering.value, precision)
        for answer in worker.ask(ExtraRequest(AHEAD, msgspec.Raw(msgspec.json.encode(body)))):
            if isinstance(answer, Broken):
                return answer.failure.detail
            if isinstance(answer, ExtraAnswer) and answer.name == AHEAD:
                return decode_json(answer.body, AheadResult).reason
        return "the compiling process gave no answer"
    except WorkerDied as death:
        remove_unfinished()
        if death.failure.kind is FailureKind.TIMEOUT:
            return f"Inductor had not compiled the whole model after {limit_s:.0f} s; raise --budget"
        return f"the process that compiled the whole model ended: {death.failure.detail}"
    except (ValueError, WorkerLost) as error:
        return f"the model cannot be compiled in another process: {error}"
    finally:
        worker.close()
