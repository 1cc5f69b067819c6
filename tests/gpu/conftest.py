"""Where there is no CUDA device these tests skip and say so; where there is one, ``pytest -m gpu`` is the whole check of the CUDA side."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_root = Path(__file__).resolve().parents[2]
if str(_root) not in sys.path:
    sys.path.append(str(_root))


def missing() -> str:
    """Why there is no device to test on; empty if there is one."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        # What PyTorch warns of when CUDA starts is not this project's to fix, and would be an error here.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {reason}"))
