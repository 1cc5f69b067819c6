"""All that a session has written, as one file: whoever takes the machine away leaves the results."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection
from pathlib import Path

CACHE = "cache"
"""In the folder of a GPU, by commit: what jobs leave to each other."""
# Of it: code that another machine would compile anew, and more of it than all results together.
_COMPILED = ("regions", "native")


class Archive:
    """All of a folder as one file; whoever ends this leaves the one before.

    Args:
        whole: the folder.
        target: the file.
        restless: names of files that change all the time, as logs do, and are no results.
    """

    def __init__(self, whole: Path, target: Path, restless: Collection[str] = ()) -> None:
        self._whole, self._target, self._restless = whole, target, restless
        self._packed: dict[Path, int] = {}

    def pack(self) -> None:
        """Write it."""
        results = self._results()
        self._target.parent.mkdir(parents=True, exist_ok=True)
        part = self._target.with_name(f".{self._target.name}.part")
        with tarfile.open(part, "w:gz") as file:
            for item in sorted(self._whole.iterdir()):
                file.add(item, item.name, filter=lambda member: None if _is_compiled(Path(member.name)) else member)
        part.replace(self._target)
        self._packed = results

    def look(self) -> None:
        """Write it if a step that runs has got further since: a machine may be taken away in the middle of a long one."""
        # What goes while it is read was not finished: the next look finds what it has become.
        with contextlib.suppress(OSError):
            if self._results() != self._packed:
                self.pack()

    def keep(self) -> None:
        """Write it if that can be done: a full disk must not end the steps that need none of it."""
        try:
            self.pack()
        except OSError as error:
            print(f"{self._target} is as it was: {error}", flush=True)

    def _results(self) -> dict[Path, int]:
        """Files of results and when they were written."""
        files = (path for path in self._whole.rglob("*") if path.is_file() and not _is_compiled(path.relative_to(self._whole)))
        return {path: path.stat().st_mtime_ns for path in files if path.suffix != ".log" and path.name not in self._restless}


def unpack(archive: Path, out: Path, last: str) -> None:
    """What another machine has packed; all of it or nothing. A file that was cut off on its way is put aside, and costs no call.

    Files named ``last`` come last: whoever finds one finds everything else.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        try:
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            aside = archive.replace(archive.with_name(f"{archive.name}.unreadable"))
            print(f"{archive} cannot be read ({error}); it is {aside} now, and everything is begun anew", flush=True)
            return
        shutil.copytree(folder, out, ignore=shutil.ignore_patterns(last), dirs_exist_ok=True)
        shutil.copytree(
            folder, out, ignore=lambda place, names: [name for name in names if _is_other_file(place, name, last)], dirs_exist_ok=True
        )


def _is_other_file(place: str, name: str, last: str) -> bool:
    return name != last and not Path(place, name).is_dir()


def _is_compiled(path: Path) -> bool:
    """Whether what lies there, below the folders of GPUs, is compiled code."""
    return path.parts[1:2] == (CACHE,) and path.parts[3:4] in [(name,) for name in _COMPILED]
