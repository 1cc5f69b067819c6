"""Which of the modules that Inductor writes are the code of a graph."""

from __future__ import annotations

import threading
from types import ModuleType

from autosched.runtime.inductor.common import modules_into

_GRAPH = "def call(args):\n    return args\n"
# What the compiler writes to time a template with an operator fused into it, seen in PyTorch 2.11 and 2.13.
_HARNESS = "def call(args):\n    pass\n\ndef benchmark_all_configs(args):\n    pass\n"


def test_a_module_that_times_one_kernel_is_not_the_code_of_a_graph() -> None:
    from torch._inductor.codecache import PyCodeCache

    before = vars(PyCodeCache)["load_by_key_path"]
    found: list[ModuleType] = []
    with modules_into(found):
        PyCodeCache.load(_HARNESS)
        PyCodeCache.load("kernel = 1\n")
        made = PyCodeCache.load(_GRAPH)
    assert found == [made]
    assert vars(PyCodeCache)["load_by_key_path"] is before


def test_what_another_thread_compiles_meanwhile_is_its_own() -> None:
    from torch._inductor.codecache import PyCodeCache

    found: list[ModuleType] = []
    theirs: list[ModuleType] = []
    with modules_into(found):
        mine = PyCodeCache.load(_GRAPH)
        other = threading.Thread(target=lambda: theirs.append(PyCodeCache.load(f"other = 1\n{_GRAPH}")))
        other.start()
        other.join()
    assert found == [mine]
    assert len(theirs) == 1
