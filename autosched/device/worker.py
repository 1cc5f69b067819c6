"""The parent's side of a measuring process: started when first needed, replaced when it dies, its files private and removed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from autosched.core.errors import ScratchFull, WorkerLost
from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.core.records import BY_OTHERS, Failure, FailureKind
from autosched.core.scratch import Scratch, remove_abandoned_folders
from autosched.device.worker_messages import BOARD, Answer, Broken, Done, Ready, Request, pack, read_answer
from autosched.device.worker_process import ChildDied, ChildProcess
from autosched.device.worker_tensors import write_tensors

_log = logging.getLogger(__name__)

# A bare death says that the machine is at fault; one with a candidate in hand, that the candidate may be.
MAX_BARE_DEATHS = 3
MAX_BLAMED_DEATHS = 12
ENDED_WAITING = Failure(FailureKind.CRASH, f"its process was ended while it waited{BY_OTHERS}")
"""What a request that no fresh process could answer gets instead of one."""
_SHARED = Path("/dev/shm")


class WorkerDied(Exception):
    """The process died during a request. ``item`` is the part it was working on, -1 if none; a fresh one answers the next request.

    ``by_others`` as of ``ChildDied``.
    """

    def __init__(self, failure: Failure, item: int, *, by_others: bool = False) -> None:
        super().__init__(failure.detail)
        self.failure = failure
        self.item = item
        self.by_others = by_others


class Worker:
    """A process that answers requests, and a fresh one after each death.

    Args:
        module: module whose ``main()`` is the process.
        timeout_s: how long it may show no progress before it is ended; progress is an answer, or one timed block.
        start_timeout_s: the same while it imports what it needs and answers what it :meth:`opens_with`.
        plugin: a Python file that the process runs first; tests inject faults with it.
    """

    def __init__(
        self,
        module: str,
        *,
        timeout_s: float,
        start_timeout_s: float = 120.0,
        plugin: Path | None = None,
    ) -> None:
        self._module = module
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._opening: tuple[Request, ...] = ()
        self._plugin = plugin
        self._folder: Scratch | None = None
        self._more: Scratch | None = None
        self._child: ChildProcess | None = None
        self._is_open = False
        self._bare_deaths = 0
        self._blamed_deaths = 0

    @property
    def folder(self) -> Path:
        """Private folder for files that the process reads; in shared memory if there is some, removed by :meth:`close`.

        Raises:
            ScratchFull: if none can be made.
        """
        if self._folder is None:
            self._folder = _made(_scratch)
        return self._folder.path

    @property
    def pid(self) -> int | None:
        """Of the living process, if there is one."""
        return self._child.pid if self._child is not None and self._child.alive else None

    @property
    def timeout_s(self) -> float:
        """As given."""
        return self._timeout_s

    def start(self, *, compiling_for: str = "") -> None:
        """Start the process now and do not wait for it: what it imports it imports while the caller does something else.

        Args:
            compiling_for: the kind of device whose regions its program will have it compile: it starts the compilers first; empty for none.

        Raises:
            ScratchFull: as :meth:`write_tensors`.
            WorkerLost: if this process may not have another one, or no more open files or threads, or there is no Python to run.
        """
        if self._child is not None:
            return
        board = self._write(f"board-{time.monotonic_ns()}", BOARD.size, lambda path: path.write_bytes(BOARD.pack(0, -1)))
        try:
            self._child = ChildProcess(self._module, board, compiling_for=compiling_for, plugin=self._plugin)
        except (OSError, RuntimeError) as error:  # the latter for a thread
            advice = "Raise the limits of this process on open files, processes and memory (ulimit -a), or end what takes them."
            if isinstance(error, PermissionError | FileNotFoundError):
                # Empty where another program has the interpreter in it.
                advice = f"It is another process of sys.executable, {sys.executable!r}: have that name a Python that may be run from here."
            raise WorkerLost(f"the measuring process cannot be started: {error}. {advice}") from error
        self._is_open = False

    def opens_with(self, opening: Sequence[Request]) -> None:
        """What a fresh process is sent first, from now on."""
        self._opening = tuple(opening)

    def ask(self, request: Request, *, of_same: bool = False, timeout_s: float | None = None) -> Iterator[Answer]:
        """Send a request and yield its answers as they come. A ``Broken`` answer is yielded last, like any other.

        Args:
            of_same: only the process that answered before can answer this, too; if it has ended, that is :data:`ENDED_WAITING`.
            timeout_s: in place of the worker's own, for this request.

        Raises:
            WorkerDied: if the process died or hung before the request was answered in full; all of it is gone then.
            WorkerLost: if that happened too often in a row for the request to be at fault, or as :meth:`start`.
        """
        if of_same and self.pid is None:
            raise WorkerDied(ENDED_WAITING, -1)
        try:
            child = self._ready_child()
            for answer in self._exchange(child, request, self._timeout_s if timeout_s is None else timeout_s):
                if not isinstance(answer, Broken):
                    self._bare_deaths = self._blamed_deaths = 0
                yield answer
            self._bare_deaths = self._blamed_deaths = 0
        except ChildDied as death:
            raise self._mourn(death) from None
        except GeneratorExit:
            # Whoever asked has stopped listening: the rest of the answers would be taken for those of the next request.
            self._drop()
            raise

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Put tensors where the process can read them; returns the file.

        Raises:
            ScratchFull: if they cannot be written.
        """
        return self._write(name, sum(tensor.nbytes for tensor in tensors.values()), lambda path: write_tensors(path, tensors))

    def _write(self, name: str, size_bytes: int, write: Callable[[Path], object]) -> Path:
        path = self.folder_for(size_bytes) / name
        while True:
            try:
                write(path)
            except (OSError, SafetensorError) as error:
                with contextlib.suppress(OSError):
                    path.unlink()
                # Others may have filled shared memory meanwhile, or a limit may count for it that nobody is told of.
                if path.parent.parent == _SHARED != Path(tempfile.gettempdir()):
                    path = self._folder_on_disk() / name
                    continue
                raise ScratchFull(
                    f"{size_bytes / 2**20:.1f} MiB for the measuring process cannot be written to {path.parent}: {error}. "
                    "Make room there, or set TMPDIR to a folder that has it."
                ) from error
            return path

    def folder_for(self, size_bytes: int) -> Path:
        """:attr:`folder`, or one on disk that goes with it, for a file that would take more of shared memory than it can spare.

        Raises:
            ScratchFull: as :attr:`folder`.
        """
        if self.folder.parent != _SHARED or _shared_memory_spares(size_bytes):
            return self.folder
        return self._folder_on_disk()

    def _folder_on_disk(self) -> Path:
        if self._more is None:
            self._more = _made(Scratch)
        return self._more.path

    def write_program(self, program: Program, constants: Mapping[int, torch.Tensor]) -> tuple[str, str]:
        """Put a program, and the tensor of each of its bindings by value index, where the process can read them; returns the two files.

        Raises:
            ScratchFull: as :meth:`write_tensors`.
        """
        encoded = encode_program(program)
        program_file = self._write("program.json", len(encoded), lambda path: path.write_bytes(encoded))
        # A user's model may be on the GPU.
        tensors = {str(value): tensor.detach().cpu() for value, tensor in constants.items()}
        return str(program_file), str(self.write_tensors("constants.safetensors", tensors))

    def stop(self) -> None:
        """End the process although another thread waits for its answer, which then gets :class:`WorkerDied`."""
        if (pid := self.pid) is not None:
            # Only the signal: whoever waits gives back what the process had.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and remove its files. May be called twice; a later request starts anew."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
        folders, self._folder, self._more = (self._folder, self._more), None, None
        for folder in folders:
            if folder is not None:
                folder.close()

    def _ready_child(self) -> ChildProcess:
        if self._child is not None and not self._child.alive:
            self._drop()
        if self._child is None:
            self.start()
        child = self._child
        assert child is not None  # just started
        if self._is_open:
            return child
        ready = read_answer(child.receive(timeout_s=self._start_timeout_s))
        if not isinstance(ready, Ready):
            raise WorkerLost(f"the measuring process greeted with {type(ready).__name__}; expected Ready. Reinstall autosched.")
        for request in self._opening:
            for answer in self._exchange(child, request, self._start_timeout_s):
                if isinstance(answer, Broken):
                    self._drop()
                    raise WorkerLost(f"the measuring process cannot open the program: {answer.failure.detail}")
        self._is_open = True
        return child

    @staticmethod
    def _exchange(child: ChildProcess, request: Request, timeout_s: float) -> Iterator[Answer]:
        child.send(pack(request), timeout_s=timeout_s)
        while True:
            answer = read_answer(child.receive(timeout_s=timeout_s))
            if isinstance(answer, Done):
                return
            yield answer
            if isinstance(answer, Broken):
                return

    def _mourn(self, death: ChildDied) -> WorkerDied | WorkerLost:
        self._drop()
        _log.info("measuring process lost: %s", death)
        if death.item < 0:
            self._bare_deaths += 1
        else:
            self._blamed_deaths += 1
        if self._bare_deaths >= MAX_BARE_DEATHS or self._blamed_deaths >= MAX_BLAMED_DEATHS:
            return WorkerLost(
                f"the measuring process died {self._bare_deaths + self._blamed_deaths} times in a row without answering: {death}. "
                "Check the machine's memory and its installation of PyTorch ('autosched doctor')."
            )
        return WorkerDied(Failure(death.kind, str(death)), death.item, by_others=death.by_others)

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _scratch() -> Scratch:
    """In shared memory if there is room; what a killed process has left is taken away from both places."""
    disk = Path(tempfile.gettempdir())
    base = _shared_memory()
    remove_abandoned_folders(disk if base == _SHARED else _SHARED)
    return Scratch(base)


def _made(make: Callable[[], Scratch]) -> Scratch:
    try:
        made = make()
    except OSError as error:
        raise ScratchFull(
            f"there is no folder for the files of the measuring process: {error}. Make room, or set TMPDIR to a folder that has it."
        ) from error
    try:
        str(made.path).encode()
    except UnicodeEncodeError:
        made.close()
        # Names of files go to the process as JSON.
        raise ScratchFull(
            f"the measuring process cannot be told of files in {made.path.parent}, whose name is not UTF-8. Set TMPDIR to another folder."
        ) from None
    return made


def _shared_memory() -> Path:
    return _SHARED if _shared_memory_spares(0) else Path(tempfile.gettempdir())


def _shared_memory_spares(size_bytes: int) -> bool:
    # A quarter stays free for others: a full shared memory breaks programs that have nothing to do with us.
    if not _SHARED.is_dir() or not os.access(_SHARED, os.W_OK):
        return False
    usage = shutil.disk_usage(_SHARED)
    return usage.free - size_bytes > max(usage.total // 4, 1 << 30)
