"""A server whose user may only read the folder that Inductor keeps its files in: what is there is found, and what is new goes elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autosched.core import forks
from autosched.core.variants import Lowering
from autosched.runtime import compiler_files
from autosched.runtime.compiler_files import inductor_folder, let_inductor_write
from autosched.runtime.inductor import kept as inductor_kept
from autosched.runtime.load import load
from tests.conformance.stateful import bundle_bytes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Inductor's cache with a file in it, which this process may not change; whoever else runs this (root) is told that it may not."""
    folder = tmp_path / "inductor"
    (folder / "ab").mkdir(parents=True, exist_ok=True)
    (folder / "locks").mkdir(exist_ok=True)
    (folder / "ab" / "made.so").write_bytes(b"code")
    (folder / "locks" / "made.lock").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler_files, "_own", compiler_files._Own())
    usual = os.access

    def access(path: os.PathLike[str] | str, mode: int) -> bool:
        return usual(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(folder))

    monkeypatch.setattr(os, "access", access)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    yield folder
    folder.chmod(stat.S_IRWXU)
    if compiler_files._own.scratch is not None:
        compiler_files._own.scratch.close()


def test_what_is_there_is_found_and_the_rest_is_written_elsewhere(cache: Path) -> None:
    let_inductor_write()
    mine = inductor_folder()
    assert mine is not None
    assert mine != cache
    assert (mine / "ab" / "made.so").read_bytes() == b"code"
    assert not (mine / "locks").exists()
    (mine / "ab" / "new.so").write_bytes(b"new")
    let_inductor_write()
    assert inductor_folder() == mine
    assert [path.name for path in (cache / "ab").iterdir()] == ["made.so"]


def test_a_forked_process_has_a_folder_of_its_own(cache: Path) -> None:
    let_inductor_write()
    of_parent, scratch = inductor_folder(), compiler_files._own.scratch
    assert scratch is not None
    forks.tell_all()
    let_inductor_write()
    mine = inductor_folder()
    assert mine is not None
    assert mine not in (cache, of_parent)
    assert (mine / "ab" / "made.so").read_bytes() == b"code"
    scratch.close()


def test_a_folder_that_can_be_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    let_inductor_write()
    assert inductor_folder() == tmp_path / "inductor"


def test_where_nothing_can_be_written_at_all_nothing_changes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> str:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr("tempfile.mkdtemp", full)
    let_inductor_write()
    assert inductor_folder() == cache


def test_a_program_that_was_compiled_whole_is_served_from_a_cache_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), torch.randn(2, 8)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    bundle = bundle_bytes(model, (x,), Lowering.INDUCTOR)
    load(bundle, model, strict=True)
    cache = request.getfixturevalue("cache")
    found = inductor_kept.counts.found
    fast = load(bundle, model, strict=True)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))
    assert inductor_kept.counts.found == found + 1
    assert inductor_folder() != cache


def test_a_user_whom_the_system_has_no_name_for_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 names its cache after the user."""
    from torch._inductor.runtime import cache_dir_utils

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(cache_dir_utils, "cache_dir", nameless)
    assert inductor_folder() is None
    let_inductor_write()
