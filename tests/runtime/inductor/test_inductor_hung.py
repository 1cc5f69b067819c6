"""A C++ compiler that hangs costs the code that it was asked for, and neither the process nor what PyTorch knows of the processor."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.hung import CompilerHung, asking_compilers, compilers_limited
from autosched.runtime.regions import library as regions
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.regions.pieces import Piece
from tests.conformance.programs import chain_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no limit elsewhere")

cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """A script that starts another process, as a compiler does, notes both, and never ends."""
    path = tmp_path / "c++"
    path.write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {tmp_path / 'pids'}\nwait\n")
    path.chmod(0o755)
    return str(path)


def seen(tmp_path: Path) -> list[int]:
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def compiling(command: str, folder: Path) -> None:
    """What ``VecISA.check_build`` does: a failure is an answer."""
    try:
        cpp_builder.run_compile_cmd(f"{command} kernel.cpp -o kernel.so", str(folder))
    except Exception:
        pytest.fail("taken for an answer")


def gone(pids: list[int]) -> bool:
    end_s = time.monotonic() + 10.0
    while any(map(runs, pids)) and time.monotonic() < end_s:
        time.sleep(0.05)
    return not any(map(runs, pids))


@pytest.mark.parametrize("limited", [compilers_limited, asking_compilers])
@pytest.mark.timeout(60)
def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    limited: Callable[[float], AbstractContextManager[None]], compiler: str, tmp_path: Path
) -> None:
    run = cpp_builder.run_compile_cmd
    with subprocess.Popen(["sleep", "1000"]) as other:
        with pytest.raises(CompilerHung, match=r"the C\+\+ compiler had not ended after 1.5 s"), limited(1.5):
            compiling(compiler, tmp_path)
        assert gone(seen(tmp_path))
        # It was this thread's, and there before.
        assert other.poll() is None
        other.kill()
    assert cpp_builder.run_compile_cmd is run


@pytest.mark.timeout(60)
def test_a_compiler_that_does_not_tell_its_version_is_ended(compiler: str, tmp_path: Path) -> None:
    with pytest.raises(CompilerHung), asking_compilers(1.5):
        subprocess.check_output([compiler, "--version"])
    assert gone(seen(tmp_path))


@pytest.mark.timeout(60)
def test_a_compiler_in_a_thread_of_pytorchs_is_ended(compiler: str, tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            compiling(compiler, tmp_path)
        except CompilerHung as error:
            raised.append(error)

    with compilers_limited(1.5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(raised) == 1
    assert gone(seen(tmp_path))


def test_what_fails_by_itself_is_what_it_was(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="C\\+\\+ compile error"), compilers_limited(100.0):
        cpp_builder.run_compile_cmd("/bin/false kernel.cpp", str(tmp_path))
    with compilers_limited(0.1):
        time.sleep(0.3)  # no compiler runs


def test_a_program_whose_compiler_hangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> None:
        raise CompilerHung(240.0)

    monkeypatch.setattr(inductor_compile, "_compiled", compiled)
    made = inductor_compile.compile_whole(None, [])  # type: ignore[arg-type]
    assert made == Refused("the C++ compiler had not ended after 240 s, so it was ended")


@pytest.mark.parametrize("where", ["settings_digest", "compile_piece"])
def test_a_compiler_hangs_once_for_all_regions(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hang(*args: object, **kwargs: object) -> None:
        asked.append(where)
        raise CompilerHung(240.0)

    monkeypatch.setattr(regions, "missing_compiler", lambda kind: "")
    monkeypatch.setattr(regions, "settings_digest", lambda kind: "settings")
    monkeypatch.setattr(regions, where, hang)
    program, _ = chain_program()
    graph = program.graph
    library = RegionLibrary(program, torch.device("cpu"), "scope")
    monkeypatch.setattr(library, "variants", lambda operator: (1,))
    # All of them are alike, and would be one region.
    monkeypatch.setattr(regions, "piece_digest", lambda piece, graph: repr(piece.reads))
    monkeypatch.setattr(regions, "pieces_of", lambda operator, graph: (Piece(operator.calls, operator.reads, operator.writes, True),))
    library.prepare([(operator, 1, 1) for operator in range(len(graph))], workers=1)
    made = [library.kernel(operator, 1, 1) for operator in range(2)]
    assert [item.reason for item in made if isinstance(item, Refused)] == [
        "the C++ compiler had not ended after 240 s, so it was ended"
    ] * 2
    assert asked == [where]
