"""The inside of a process that compiles regions for another: one region at a time, its generated module returned as text.

It reads one job a line from its input and writes one result a line, both JSON, and ends when its input does. What it compiles is
checked here as it would be in the process that asked (``compile_piece`` runs it once); that process only loads it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import msgspec

from autosched.core.decoding import decode_json
from autosched.core.python_command import imports_done
from autosched.runtime.compiler_files import compilers_write_into
from autosched.runtime.inductor.turns import turns, wait_for_turns
from autosched.runtime.orphans import begin_serving


class Opening(msgspec.Struct, frozen=True):
    """What every job has in common.

    Args:
        program: as ``program_json.encode_program`` writes it.
        device: as torch names it.
        settings: ``inductor.settings.settings_digest`` of the process that asks; a process with others would write other code.
        numerics: ``host_key.numerics_key`` there.
        lock_file: held by whoever uses the device, so that nothing is timed while another process is on it; its name need not be UTF-8.
    """

    program: str
    device: str
    settings: str
    numerics: tuple[tuple[str, str], ...]
    lock_file: bytes


class OpeningFile(msgspec.Struct, frozen=True):
    """The first thing that such a process is told: the file of its :class:`Opening`, whose name need not be UTF-8."""

    path: bytes


class Job(msgspec.Struct, frozen=True):
    """One region: a piece of an operator (``regions.pieces.pieces_of``), for so many threads, in a variant."""

    number: int
    operator: int
    piece: int
    width: int
    variant: int


class Result(msgspec.Struct, frozen=True):
    """What came of a job: the text of a module, or why there is none. ``number`` -1 is the answer to the opening, with no text.

    Neither a text nor a reason: the module cannot be written down, and is to be compiled where it is needed.
    """

    number: int
    source: str = ""
    refused: str = ""


class _Compiler:
    def __init__(self, opening: Opening) -> None:
        import torch

        from autosched.core.program_json import decode_program
        from autosched.runtime.regions.pieces import pieces_of

        self._device = torch.device(opening.device)
        self._program = decode_program(opening.program.encode())
        self._pieces_of = pieces_of
        self._turn = turns(opening.lock_file)

    @staticmethod
    def refusal(opening: Opening) -> str:
        """Why this process cannot stand in for the one that asked, or an empty string."""
        import torch

        from autosched.runtime.host_key import apply_numerics
        from autosched.runtime.inductor.settings import settings_digest

        device = torch.device(opening.device)
        if device.index:
            torch.cuda.set_device(device)
        apply_numerics(opening.numerics)
        if settings_digest(device.type) != opening.settings:
            return "its settings of PyTorch or Inductor are others"
        if device.type == "cuda" and not wait_for_turns(turns(opening.lock_file)):
            return "this PyTorch times kernels in a way not known here"
        return ""

    def compile(self, job: Job) -> Result:
        from autosched.core.variants import Variant
        from autosched.runtime.inductor.common import Refused
        from autosched.runtime.regions.compile import compile_piece

        graph = self._program.graph
        piece = self._pieces_of(graph.operators[job.operator], graph)[job.piece]
        made = compile_piece(piece, graph, self._device, width=job.width, variant=Variant(job.variant), turn=self._turn)
        if self._device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        return Result(job.number, refused=made.reason) if isinstance(made, Refused) else Result(job.number, made.source)


def _import(kind: str) -> None:
    """What the first region would import, for a ``kind`` of device."""
    import torch

    # Each of these processes is one of a team as large as the machine; before anything of Inductor that would start such a team itself.
    import torch._inductor.config as inductor_config

    # Not 1 on a GPU: Triton then compiles in this process, and with PyTorch 2.11 its second kernel here was a compilation error.
    inductor_config.compile_threads = 2 if kind == "cuda" else 1
    torch.set_num_threads(1)
    import torch._inductor.compile_fx

    import autosched.core.program_json
    import autosched.runtime.regions.compile  # noqa: F401


def _read_lines(descriptor: int, into: SimpleQueue[bytes]) -> None:
    with os.fdopen(descriptor, "rb") as file:
        for line in file:
            into.put(line)
    # Whoever asked is gone or wants nothing more: so go we, with every compiler we may have started.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _run_plugin(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("autosched_region_plugin", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the plugin {path}")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main() -> None:
    """Serve until the input ends."""
    answers, kind, plugin = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    requests = begin_serving(answers)
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(requests, lines), name="autosched-region-jobs", daemon=True).start()
    output = os.fdopen(answers, "wb", buffering=0)

    def answer(result: Result) -> None:
        data = memoryview(msgspec.json.encode(result) + b"\n")
        while data:
            data = data[output.write(data) :]

    refusal = ""
    try:
        _import(kind)
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    # It may have been started before there was anything to compile.
    opening_file = Path(os.fsdecode(decode_json(lines.get(), OpeningFile).path))
    opening = decode_json(opening_file.read_bytes(), Opening)
    compilers_write_into(opening_file.parent)
    compiler = None
    try:
        if plugin:
            _run_plugin(Path(plugin))
        refusal = refusal or _Compiler.refusal(opening)
        compiler = None if refusal else _Compiler(opening)
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    imports_done()
    answer(Result(-1, refused=refusal))
    while compiler is not None:
        job = decode_json(lines.get(), Job)
        try:
            result = compiler.compile(job)
        except Exception as error:
            result = Result(job.number, refused=f"{type(error).__name__}: {error}")
        answer(result)
