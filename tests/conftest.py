"""What holds for the whole suite. What the options mean is in tests/gpu/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests that need a CUDA device")
    group.addoption("--gpu-budget", type=float, default=470.0, help="seconds for all tests marked gpu; those left then fail (default 470)")
    group.addoption("--gpu-rehearsal", action="store_true", help="run the bodies of GPU tests on a double with CPU tensors")


@pytest.fixture(scope="session", autouse=True)
def _no_memory_of_earlier_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is in the user's cache (measurements, attempts at compiling) must not decide a test, nor a test the user's next tuning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSCHED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
