"""C++ of our own, compiled on this machine: a library that is found in the cache folder, else built there once.

What is in the folder is run as code, and trusted as the store of compiled regions trusts its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from autosched.config import NATIVE_LIBRARY, cpp_compiler, native_dir
from autosched.core.atomic_write import write_atomically
from autosched.core.computed_once import computed_once
from autosched.core.scratch import Scratch
from autosched.runtime.cores import usable_cores
from autosched.runtime.orphans import start_tied
from autosched.runtime.regions.store import private_file, private_folder

_FALLBACKS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class Recipe:
    """How a library is made.

    Args:
        name: what its file is called after; one of ``config.NATIVE_LIBRARY``.
        sources: the files that are compiled, all of one folder, whose other files they take in; the one that takes longest first.
        compile, link: what the compiler is told in each of two steps.
        places: what it is told in both of where things are, which may be elsewhere next time.
        depends: what else the library depends on.
    """

    name: str
    sources: tuple[Path, ...]
    compile: tuple[str, ...]
    link: tuple[str, ...]
    places: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()

    @computed_once
    def key(self) -> str:
        """Digest of what is built, and for what. The compiler is not in it: where it was built it may since be gone."""
        folder = self.sources[0].parent
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".h")]
        told = [*texts, *self.compile, *self.link, *self.depends, sys.platform, platform.machine()]
        return hashlib.sha256("\n".join(told).encode()).hexdigest()[:24]

    def find(self) -> Path | None:
        """The library, if it was built before and nobody else can have written it."""
        folder = native_dir()
        with contextlib.suppress(OSError):
            if private_folder(folder):
                return next(filter(_sound, sorted(folder.glob(f"{self.name}-{self.key}-*.so"))), None)
        return None

    def obstacle(self) -> str:
        """Why it cannot be built here, as far as can be told without trying; empty if nothing is in the way."""
        if not self.sources[0].is_file():
            return f"{self.sources[0]} is no file: this autosched is in a zip file, where no compiler reads; install it unpacked"
        folder = native_dir()
        there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
        if there == folder and not private_folder(folder):
            return _not_private(folder)
        if not os.access(there, os.W_OK | os.X_OK):
            return f"what is built cannot be kept: {there} cannot be written"
        return "" if compiler() else "there is no C++ compiler; install g++ or clang++, or name one in CXX"

    def make(self, limit_s: float) -> Path | str:
        """The library, built if it is not there, in ``limit_s`` seconds at most; or why it cannot be. Other processes wait for one."""
        folder = native_dir()
        deadline = time.monotonic() + limit_s
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not private_folder(folder):
                return _not_private(folder)
            with FileLock(folder / ".lock", timeout=limit_s):
                return self.find() or self._build(folder, deadline)
        except Timeout:
            return f"another process has been building for {limit_s:.0f} s"
        except OSError as error:
            return f"what is built cannot be kept: {error}"

    def _build(self, folder: Path, deadline: float) -> Path | str:
        with Scratch() as scratch:
            made, whole = [scratch / f"{source.stem}.o" for source in self.sources], scratch / f"{self.name}.so"
            compiled = [
                [*compiler(), *self.compile, *self.places, "-c", str(source), "-o", str(to)]
                for source, to in zip(self.sources, made, strict=True)
            ]
            linked = [*compiler(), *map(str, made), *self.places, *self.link, "-o", str(whole)]
            if why := _run(compiled, deadline) or _run([linked], deadline):
                return why
            content = whole.read_bytes()
        # Whatever the mask is (002 where each user has a group): what others may write is not loaded.
        write_atomically(folder / f"{self.name}-{self.key}-{_digest(content)}.so", content, mode=0o644)
        return self.find() or f"what was built cannot be read back from {folder}, or others may write it there"


def not_loaded(path: Path, error: Exception) -> str:
    """What to say of a library that is what was written, and that ``error`` came of loading."""
    # It is found again also where another compiler would do better: the name does not say which built it.
    advice = "after 'autosched cache clear native' it is built anew"
    with contextlib.suppress(OSError):
        if os.statvfs(path).f_flag & os.ST_NOEXEC:
            advice = "nothing that lies there may be run (noexec): set AUTOSCHED_CACHE to a folder on another file system"
    return f"what was built cannot be loaded ({str(error).splitlines()[0]}); {advice}"


def _not_private(folder: Path) -> str:
    return f"{folder} belongs to somebody else, or others may write into it, and what is built there is run"


def compiler() -> list[str]:
    """The command: ``CXX`` or g++, as Inductor has it, else another that is there; empty if none is."""
    try:
        named = shlex.split(cpp_compiler())
    except ValueError:  # a quotation mark without the other: no command
        named = []
    for command in (named, *([name] for name in _FALLBACKS)):
        if command and shutil.which(command[0]):
            return command
    return []


def _run(commands: Sequence[Sequence[str]], deadline: float) -> str:
    """Why one of the commands did not do what it should; empty if all did. As many run at a time as there are cores."""
    waiting, running = list(commands), list[tuple[Sequence[str], subprocess.Popen[bytes], IO[bytes]]]()
    said: IO[bytes]
    with contextlib.ExitStack() as opened:
        try:
            while waiting or running:
                while waiting and len(running) < usable_cores():
                    command, said = waiting.pop(0), opened.enter_context(tempfile.TemporaryFile())
                    # The compiler is more than one process, and all of them end together.
                    try:
                        running.append((command, start_tied(command, stdout=said, stderr=subprocess.STDOUT), said))
                    except OSError as error:
                        return f"{command[0]} cannot be run: {error.strerror or error}"
                command, process, said = running[0]
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return f"{command[0]} was ended after its time was over"
                running.pop(0)
                if why := _failure(command, process.returncode, said):
                    return why
        finally:
            for _, process, _ in running:
                _end(process)
                process.wait()
    return ""


def _failure(command: Sequence[str], status: int, said: IO[bytes]) -> str:
    """Why a command that has ended did not do what it should; empty if it did."""
    if status == 0:
        return "" if Path(command[-1]).is_file() else f"{command[0]} ended without an error, and wrote nothing"
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if "error" in line]
    return f"{command[0]} failed: {lines[0].strip() if lines else f'exit status {status}'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _sound(path: Path) -> bool:
    """Whether a library is what was written, by somebody who may."""
    with contextlib.suppress(OSError):
        return bool(re.fullmatch(NATIVE_LIBRARY, path.name)) and private_file(path) and path.stem.endswith(_digest(path.read_bytes()))
    return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
