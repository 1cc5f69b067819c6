"""Which cores the threads of a team are woken on, on machines that are described as Linux describes them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

import autosched.runtime.native

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

# Arguments: folder, how many cores, the caller's core, then for each member its last core.
_ASKING = r"""
#include "cores.h"

#include <iostream>

int main(int count, char** given) {
  Topology topology(given[1]);
  cpu_set_t usable;
  CPU_ZERO(&usable);
  for (int core = 0; core < std::stoi(given[2]); ++core) CPU_SET(core, &usable);
  Cores cores(topology, usable, std::stoi(given[3]));
  for (int member = 4; member < count; ++member) std::cout << cores.take(usable, std::stoi(given[member])) << " ";
}
"""

Ask = Callable[..., list[int]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cores")
    (folder / "asking.cpp").write_text(_ASKING)
    sources = Path(next(iter(autosched.runtime.native.__path__)))
    command = ["g++", "-std=c++20", "-Wall", "-Werror", "-I", str(sources), "asking.cpp", "-o", "asking"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "asking"


@pytest.fixture
def ask(program: Path, tmp_path: Path) -> Ask:
    """Where members go whose last cores were ``lasts``, on a machine of such physical cores and sockets."""

    def ask(physical: Sequence[Sequence[int]], sockets: Sequence[Iterable[int]], callers: int, lasts: Sequence[int]) -> list[int]:
        count = sum(map(len, physical))
        for name, groups in (("thread_siblings_list", physical), ("core_siblings_list", sockets)):
            for group in groups:
                for core in group:
                    folder = tmp_path / f"cpu{core}" / "topology"
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_text(_as_list(group) + "\n")
        arguments = [str(item) for item in (tmp_path, count, callers, *lasts)]
        return [int(core) for core in subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout.split()]

    return ask


def _as_list(group: Iterable[int]) -> str:
    """As Linux writes it: neighbours as a range.

    >>> _as_list([0, 1, 2, 8])
    '0-2,8'
    """
    parts: list[list[int]] = []
    for core in group:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
APART = [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_each_gets_a_physical_core_while_there_are_any(ask: Ask) -> None:
    assert ask(PAIRS, [range(8)], 0, [-1, -1, -1]) == [2, 4, 6]
    assert ask(PAIRS, [range(8)], 0, [-1] * 8) == [2, 4, 6, 1, 3, 5, 7, -1]
    assert ask(APART, [range(8)], 5, [-1, -1, -1]) == [0, 2, 3]


def test_each_stays_where_it_was_unless_that_is_half_of_a_core_with_another_one_free(ask: Ask) -> None:
    assert ask(PAIRS, [range(8)], 0, [7, 2, 5]) == [7, 2, 5]
    assert ask(PAIRS, [range(8)], 0, [1, 7, 6]) == [2, 7, 4]
    assert ask(PAIRS, [range(8)], 0, [3, 4, 6, 1]) == [3, 4, 6, 1]


def test_the_callers_socket_comes_first(ask: Ask) -> None:
    sockets = [range(4), range(4, 8)]
    assert ask(PAIRS, sockets, 4, [-1, -1, -1, -1]) == [6, 0, 2, 5]
    assert ask(PAIRS, sockets, 4, [2, -1]) == [2, 6]


def test_where_nothing_is_said_of_the_machine_the_lowest_that_is_free(ask: Ask) -> None:
    assert ask([[0], [1], [2], [3]], [], 1, [-1, 1, 3]) == [0, 2, 3]
    assert ask([[0], [1]], [], 0, [0, 0]) == [1, -1]
