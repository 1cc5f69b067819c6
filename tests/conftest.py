"""What holds for the whole suite. What the options mean is in tests/gpu/conftest.py."""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.conformance.caches import own_cache
from tests.conformance.composites import look_up_composites_once

# The same examples everywhere and each time, none remembered from an earlier run, and no limit on how slow a busy machine draws them.
settings.register_profile("suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_SEED = 20_240_229  # like no seed that the code or a test chooses


# A shell's background jobs are born deaf to Ctrl-C, and so would be every process that a test begins.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules of tests make bundles when they are imported, which must not depend on whether the user's cache has native lanes.
os.environ["AUTOSCHED_NATIVE"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests that need a CUDA device")
    group.addoption("--gpu-budget", type=float, default=470.0, help="seconds for all tests marked gpu; those left then fail (default 470)")
    group.addoption("--gpu-done", type=Path, default=None, help="a file of what earlier runs did: go on with what has not passed yet")
    group.addoption("--gpu-lanes", type=int, default=0, help="processes that run them at a time (default: as many as there are cores for)")
    group.addoption("--gpu-lane", type=Path, default=None, help=argparse.SUPPRESS)  # a folder: this is one of those processes
    group.addoption("--gpu-rehearsal", action="store_true", help="run the bodies of GPU tests on a double with CPU tensors")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Generator[None, Any, None]:
    """What is imported once the tests are collected stays: looking through all of PyTorch for garbage took a tenth of their time."""
    gc.disable()
    yield
    if "torch._export.utils" in sys.modules:
        look_up_composites_once()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Weights and inputs that a test draws without a seed are the same in every run and in every order, those of its fixtures too."""
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


@pytest.fixture(scope="session", autouse=True)
def _no_memory_of_earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is in the user's cache (measurements, attempts at compiling) must not decide a test, nor a test the user's next tuning.

    Nor do limits that are set where the suite is started.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AUTOSCHED_")]:
            patch.delenv(name)
        patch.setenv("AUTOSCHED_CACHE", own_cache(tmp_path_factory.mktemp("cache")))
        # Each test that needs no native lanes does without: building them takes a compiler ten seconds. The others take ``native``.
        patch.setenv("AUTOSCHED_NATIVE", "0")
        yield


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes without the interpreter, in this process and in those that it starts."""
    from autosched.config import native_dir
    from autosched.runtime.native.build import build_native

    monkeypatch.setenv("AUTOSCHED_NATIVE", "1")
    if not native_dir().exists():
        own_cache(native_dir().parent)
    if reason := build_native():
        pytest.skip(f"no native lanes: {reason}")


@pytest.fixture
def native_watches(native: None) -> None:
    """Models are watched by the words of memory that say that something was written."""
    from autosched.runtime.native.watch import can_watch

    if sys.version_info[:3] == (3, 13, 0):
        pytest.skip("this Python tells nobody of writes to attributes")
    assert can_watch()
