"""Control groups as files below a folder, as Linux shows a process its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def written_groups(folder: Path, files: Mapping[str, str], own: str | None) -> tuple[Path, Path]:
    """Where ``files`` of groups and the process's ``own`` lines (none: there is no such file) were written."""
    groups, lines = folder / "groups", folder / "own"
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        lines.write_text(own)
    return groups, lines
