"""Reading a bundle takes the memory of that bundle."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from autosched.runtime.bundle.zip import read_file


def test_reading_a_small_file_sets_no_more_memory_aside(tmp_path: Path) -> None:
    path = tmp_path / "small.autosched"
    path.write_bytes(bytes(5000))
    tracemalloc.start()
    try:
        data = read_file(path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data) == 5000
    assert most_bytes < 1 << 20
