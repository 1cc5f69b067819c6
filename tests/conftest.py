"""Options of the whole suite; what they mean is in tests/gpu/conftest.py."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests that need a CUDA device")
    group.addoption("--gpu-budget", type=float, default=470.0, help="seconds for all tests marked gpu; those left then fail (default 470)")
    group.addoption("--gpu-rehearsal", action="store_true", help="run the bodies of GPU tests on a double with CPU tensors")
