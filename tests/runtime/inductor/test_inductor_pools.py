"""The processes that Inductor compiles in end when they are told, not when they like."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from autosched.runtime.inductor.pools import end_pools


def test_a_pool_that_would_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pool = SimpleNamespace(process=process, running=True)
    # An executor of the standard library stands there too, where compiling is not apart.
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace(_pool_set={0: SimpleNamespace(), 1: pool}.values()))
    end_pools()
    assert process.poll() is not None
    assert not pool.running


def test_without_a_pool_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    end_pools()
    assert "torch._inductor.async_compile" not in sys.modules
