"""The inside of a worker process, whatever it measures: requests in, answers out, beats on the board, and death with the parent."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType

from autosched.core.errors import IllegalSchedule
from autosched.core.python_command import imports_done
from autosched.core.records import Failure, FailureKind
from autosched.device.registrations import register_there
from autosched.device.worker_messages import BOARD, LENGTH, Answer, Broken, Done, Ready, Request, pack, read_request
from autosched.runtime.no_memory import tells_of_no_memory
from autosched.runtime.orphans import begin_serving

COMPILE_S = 1800.0
"""How long a compilation may take before its process counts as hung, in seconds."""

_BEAT_S = 1.0


class Channel:
    """The process's end of the conversation. Made once, before anything that may fail."""

    def __init__(self) -> None:
        self._answers, board, plugin = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
        self._requests = begin_serving(self._answers)
        with board.open("r+b") as file:
            self._board = mmap.mmap(file.fileno(), BOARD.size)
        self._beats = 0
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, name="autosched-worker-requests", daemon=True).start()
        self.plugin = _load_plugin(Path(plugin)) if plugin else None
        register_there(sys.argv[4])

    def beat(self, item: int) -> None:
        """Show progress, and what is worked on now (-1: nothing in particular). Costs less than a microsecond."""
        self._beats += 1
        BOARD.pack_into(self._board, 0, self._beats, item)

    @contextlib.contextmanager
    def working(self, limit_s: float) -> Iterator[None]:
        """Beat from another thread while the block does one long thing (a compilation), for at most ``limit_s`` seconds."""
        done = threading.Event()

        def beat() -> None:
            end_s = time.monotonic() + limit_s
            while not done.wait(_BEAT_S) and time.monotonic() < end_s:
                self.beat(-1)

        thread = threading.Thread(target=beat, name="autosched-worker-beats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def answer(self, message: Answer) -> None:
        """Send one answer."""
        data = memoryview(pack(message))
        while data:
            data = data[os.write(self._answers, data) :]

    def serve(self, handle: Callable[[Request], Iterator[Answer]]) -> None:
        """Answer requests until the input ends. What ``handle`` raises becomes a ``Broken`` answer.

        A ``Broken`` answer, also one that ``handle`` yields, is the last of its request; any other request ends with ``Done``.
        """
        imports_done()
        self.answer(Ready())
        while True:
            body = self._queue.get()
            self.beat(-1)
            try:
                broken = False
                for message in handle(read_request(body)):
                    self.answer(message)
                    broken = isinstance(message, Broken)
                self.beat(-1)
                if not broken:
                    self.answer(Done())
            except Exception as error:
                self.beat(-1)
                self.answer(Broken(describe(error)))

    def _read(self) -> None:
        while (head := self._read_exactly(LENGTH.size)) is not None:
            body = self._read_exactly(int(LENGTH.unpack(head)[0]))
            if body is None:
                break
            self._queue.put(body)
        # The parent has closed our input or is gone: so go we, with everything we may have started.
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def _read_exactly(self, count: int) -> bytes | None:
        found = bytearray()
        while len(found) < count:
            data = os.read(self._requests, count - len(found))
            if not data:
                return None
            found += data
        return bytes(found)


def describe(error: BaseException) -> Failure:
    """The failure that an exception of a candidate means. Never raises, whatever the exception does when it is printed."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__} (which cannot be printed)"
    if isinstance(error, MemoryError) or tells_of_no_memory(text):
        return Failure(FailureKind.OOM, text[:2000])
    if isinstance(error, IllegalSchedule):
        return Failure(FailureKind.ILLEGAL, text[:2000])
    return Failure(FailureKind.CRASH, text[:2000])


def _load_plugin(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("autosched_worker_plugin", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the plugin {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
