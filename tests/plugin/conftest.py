from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autosched import compiled, plugin


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, Dynamo without memory, and no race that a busy machine could lose."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_faster", lambda *args: True)
    torch._dynamo.reset()
    plugin._graphs.clear()  # those in reference cycles outlive a reset
    with torch.no_grad():
        yield tmp_path / "cache" / "schedules"
    torch._dynamo.reset()
