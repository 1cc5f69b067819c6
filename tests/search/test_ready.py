"""What a job's searches call is compiled before its time counts: a search after that compiles nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autosched.search.compiled.ready import PROCESSES

_SEARCHES = """
import sys
import numpy as np
from autosched.search.compiled.ready import load_searches, searches_loaded

assert not searches_loaded()
load_searches()
assert searches_loaded()
before = set(sys.modules)
from autosched.search import synthetic
from autosched.search.strategy import STRATEGIES, SearchContext

problem = synthetic.random_problem(0, 7)
for name in STRATEGIES.names():
    STRATEGIES.get(name).propose(problem, SearchContext(np.random.default_rng(0), max_evaluations=300))
print(sorted(name for name in set(sys.modules) - before if name.startswith("autosched.search.compiled.")))
"""

_SHARES = """
from autosched.search.compiled import ready

ready.load_searches({number})
assert ready.searches_loaded()
"""


@pytest.mark.parametrize("number", range(PROCESSES))
def test_every_process_ends_with_all_of_them(number: int) -> None:
    subprocess.run([sys.executable, "-c", _SHARES.format(number=number)], timeout=600, check=True)


def test_no_strategy_has_anything_left_to_compile() -> None:
    done = subprocess.run([sys.executable, "-c", _SEARCHES], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"
