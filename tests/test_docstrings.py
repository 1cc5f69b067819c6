"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Three of the package's folders lie beside it in a checkout.
FOLDERS = {"autosched": "autosched", "costmodel": "autosched.costmodel", "datasets": "autosched.datasets", "search": "autosched.search"}
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_in_docstrings(path: Path) -> None:
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join([FOLDERS[folder], *parts]).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert result.failed == 0
