"""The kernels of our own, which all tests here need."""

from __future__ import annotations

import pytest

from autosched.runtime.cpu_kernels.library import kernel_library


@pytest.fixture
def kernel(native: None) -> None:
    """The kernels, compiled once for all tests; ``native`` says where they are kept."""
    if isinstance(made := kernel_library(), str):
        pytest.skip(f"no kernel: {made}")
