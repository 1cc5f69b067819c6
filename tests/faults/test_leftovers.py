"""What a killed process leaves behind is taken away by the next one, and nothing that somebody still uses."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.schedule import sequential
from autosched.core.scratch import Scratch, remove_abandoned_files
from autosched.datasets.journal import Scope
from autosched.datasets.store import Store
from autosched.export.cache import keep
from autosched.pipeline.memory import open_journal
from autosched.runtime.regions.store import RegionStore
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches
from tests.conformance.store_suite import example_rows
from tests.conformance.waiting import wait_until

ROOT = str(Path(__file__).resolve().parents[2])
LONG_AGO_S = 2 * 3600.0


SCOPE = Scope(DeviceKey("cpu", "double", ()), SoftwareKey((("torch", "0"),)))


def killed(then: str, *arguments: str) -> str:
    """Run ``then`` in a process that prints a line and is killed while it waits; the line."""
    code = f"import sys; sys.path.append({ROOT!r})\n{then}\nsys.stdout.flush(); import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-P", "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()
    return line


def ended() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def aged(path: Path) -> Path:
    """``path``, last written long ago."""
    os.utime(path, (time.time() - LONG_AGO_S,) * 2)
    return path


MAKE = "from pathlib import Path; from autosched.core.scratch import Scratch; made = Scratch(Path(sys.argv[1])); print(made.path)"


def test_the_folder_of_a_killed_process_goes_with_the_next_one_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    left = Path(killed(MAKE, str(tmp_path)))
    (left / "inside").mkdir()
    assert left.is_dir()
    mine = Scratch(tmp_path)
    assert not left.exists()
    assert mine.path.stat().st_mode & 0o077 == 0
    other = Scratch(tmp_path)
    assert mine.path.is_dir()
    mine.close()
    mine.close()
    with other as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_forgotten_goes_with_its_object(tmp_path: Path) -> None:
    path = Scratch(tmp_path).path
    gc.collect()
    assert not path.exists()


def test_a_process_elsewhere_with_a_number_unknown_here_keeps_its_folder(tmp_path: Path) -> None:
    """Containers may share the folder and not the numbers."""
    theirs = tmp_path / f"autosched-{ended()}-theirs"
    theirs.mkdir()
    with (theirs / ".held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Scratch(tmp_path).close()
        assert theirs.exists()
    Scratch(tmp_path).close()
    assert not theirs.exists()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_where_there_are_no_locks_a_process_on_another_machine_keeps_its_folder(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre, and NFS without its locks: the number of a process there is unknown here."""

    def refuse(handle: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    theirs = tmp_path / f"autosched-{ended()}-theirs"
    theirs.mkdir()
    (theirs / ".held").touch()
    mine = Scratch(tmp_path)
    assert theirs.exists()
    mine.close()
    assert not mine.path.exists()


def test_a_folder_that_is_only_being_made_stays(tmp_path: Path) -> None:
    young, old = tmp_path / f"autosched-{ended()}-young", tmp_path / f"autosched-{ended()}-old"
    for folder in (young, old):
        folder.mkdir()
    aged(old)
    Scratch(tmp_path).close()
    assert young.exists()
    assert not old.exists()


def test_a_folder_of_a_like_name_with_other_things_in_it_stays(tmp_path: Path) -> None:
    results = tmp_path / f"autosched-{ended()}-results"
    results.mkdir()
    (results / "table").write_text("of a year")
    aged(results)
    Scratch(tmp_path).close()
    assert (results / "table").exists()


def test_what_an_interrupted_removal_left_is_still_known_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = Path(killed(MAKE, str(tmp_path)))
    for name in ("a", "z", ".a"):
        (left / name).write_text("weights")
        (left / f"{name}-folder").mkdir()

    class Killed(BaseException):
        pass

    def end(path: Path | str, **_: object) -> None:
        if Path(path) == left:
            raise Killed

    monkeypatch.setattr(shutil, "rmtree", end)
    with pytest.raises(Killed):
        Scratch(tmp_path)
    monkeypatch.undo()
    assert (left / ".held").exists()
    assert not any((left / name).exists() for name in ("a", "z", ".a"))
    Scratch(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_by_its_name_stays(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("autosched-notes", "autosched-99999999x-a", "other-1-a", "autosched-results-1")]
    for folder in others:
        folder.mkdir()
        aged(folder)
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / f"autosched-{ended()}-link"
    link.symlink_to(target)
    Scratch(tmp_path).close()
    assert all(folder.exists() for folder in others)
    assert link.is_symlink()
    assert target.exists()


def test_a_forked_child_does_not_take_its_parents_folder_along(tmp_path: Path) -> None:
    code = "import os\nchild = os.fork()\nif child == 0: made.close(); os._exit(0)\nos.waitpid(child, 0); print(made.path.is_dir())"
    assert killed(f"{MAKE.rpartition(';')[0]}\n{code}", str(tmp_path)) == "True"


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("private", [True, False])
def test_a_journal_that_nobody_reads_later_leaves_nothing(private: bool, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = temporary.parent / "file"
    in_the_way.write_text("no folder")
    monkeypatch.setenv("AUTOSCHED_CACHE", str(in_the_way))
    with open_journal(SCOPE, private=private) as journal:
        assert len(list(temporary.iterdir())) == 1
    del journal
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_a_journal_of_a_killed_job_goes_with_the_next_one(temporary: Path) -> None:
    then = (
        "import tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from autosched.pipeline.memory import open_journal\nfrom tests.faults.test_leftovers import SCOPE\n"
        "journal = open_journal(SCOPE, private=True); print(1)"
    )
    assert killed(then, str(temporary)) == "1"
    [left] = temporary.iterdir()
    journal = open_journal(SCOPE, private=True)
    assert not left.exists()
    journal.close()


def test_half_written_files_go_when_they_are_old(tmp_path: Path) -> None:
    name = re.compile(r"\.part-\d+")
    old, young, other = (tmp_path / item for item in (".part-1", ".part-2", "part-3"))
    for path in (old, young, other):
        path.write_text("x")
    aged(old)
    aged(other)
    folder = tmp_path / ".part-4"
    folder.mkdir()
    aged(folder)
    remove_abandoned_files(tmp_path, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".part-2", ".part-4", "part-3"]
    remove_abandoned_files(tmp_path / "not there", name)


def test_half_a_schedule_in_the_cache_goes_with_the_next_one_kept(tmp_path: Path) -> None:
    bundle = two_branches_bundle(TwoBranches().eval())
    kept = keep(tmp_path, bundle)
    assert kept is not None
    another = kept.name.replace(kept.name[0], "0" if kept.name[0] != "0" else "1", 1)
    left = [tmp_path / f".{name}.{'ab' * 8}.part" for name in (kept.name, another)]
    for path in left:
        path.write_bytes(b"half")
    keep(tmp_path, bundle)
    assert all(path.exists() for path in left)  # somebody may be at it
    for path in left:
        aged(path)
    keep(tmp_path, two_branches_bundle(TwoBranches().eval(), schedule=sequential(bundle.program.graph)))
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_half_a_text_half_a_part_of_runs(tmp_path: Path) -> None:
    store = tmp_path / "regions"
    assert RegionStore(store).put("key", "text")
    aged_text = store / ".new-abc"
    aged_text.write_bytes(b"half")
    aged(aged_text)
    assert RegionStore(store).put("other", "text")
    assert not aged_text.exists()
    assert RegionStore(store).get("key") == "text"
    runs = Store.create(tmp_path / "runs")
    runs.append(example_rows())
    half = runs.folder / "solo" / f".part-1.parquet.{'ab' * 8}.part"
    half.write_bytes(b"half")
    aged(half)
    runs.append(example_rows("xy"))
    assert not half.exists()


COMPILER = """
import subprocess, tempfile
from pathlib import Path
from autosched.core.scratch import Scratch
from autosched.runtime.compiler_files import compilers_write_into
from torch._inductor.runtime.cache_dir_utils import cache_dir
from os import environ
environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
before = cache_dir(), tempfile.gettempdir()
environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
made = Scratch(Path(sys.argv[1]))
compilers_write_into(made.path)
assert (cache_dir(), tempfile.gettempdir()) == before
compiler = subprocess.Popen([sys.argv[2], "-x", "c++", "-c", "-o", "/dev/null", "-"], stdin=subprocess.PIPE)
compiler.stdin.write(b"int main() { return 0; }")
compiler.stdin.flush()
print(made.path, compiler.pid)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_what_a_killed_compiler_has_begun_lies_where_it_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    base = tmp_path / "base"
    base.mkdir()
    code = f"import sys; sys.path.append({ROOT!r})\n{COMPILER}\nsys.stdout.flush(); import time; time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(base), "g++"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().split()[0])
    assert wait_until(lambda: any(path.name.startswith("cc") for path in folder.iterdir()))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert any(path.name.startswith("cc") for path in folder.iterdir())
    assert not any(path.name.startswith("cc") for path in (tmp_path / "elsewhere").iterdir())
    Scratch(base).close()
    assert list(base.iterdir()) == []
