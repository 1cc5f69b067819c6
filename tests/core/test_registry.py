"""Registries: lazy, no silent overwrite, unknown names list the known ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosched.core.errors import UnknownName, UsageError
from autosched.core.registry import Registry


def test_entries_are_imported_on_first_use() -> None:
    registry: Registry[type] = Registry("thing", "autosched.no_such_group")
    registry.add("fraction", "fractions:Fraction")
    assert registry.get("fraction").__name__ == "Fraction"
    assert registry.names() == ["fraction"]


def test_a_duplicate_name_and_an_unknown_name_raise() -> None:
    registry: Registry[type] = Registry("thing", "autosched.no_such_group")
    registry.add("a", "fractions:Fraction")
    with pytest.raises(UsageError, match="twice"):
        registry.add("a", "decimal:Decimal")
    with pytest.raises(UnknownName, match="known: a"):
        registry.get("b")


def test_an_entry_that_cannot_be_imported_names_the_cause() -> None:
    registry: Registry[type] = Registry("thing", "autosched.no_such_group")
    registry.add("broken", "no_such_module_at_all:x")
    with pytest.raises(UsageError, match="no_such_module_at_all"):
        registry.get("broken")


def test_a_module_that_raises_anything_when_imported_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin_that_raises.py").write_text("raise RuntimeError('no driver of version 3')")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing", "autosched.no_such_group")
    registry.add("broken", "a_plugin_that_raises:x")
    with pytest.raises(UsageError, match=r"RuntimeError: no driver of version 3.*uninstall"):
        registry.get("broken")


def install(folder: Path, *entries: str) -> None:
    """A package with such entry points."""
    about = folder / "acme-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(["[autosched.things_of_a_test]", *entries, ""]))


def test_what_other_packages_bring_is_known_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "square = fractions:Fraction")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    registry.add("round", "decimal:Decimal")
    assert registry.plugged() == ["square"]
    assert registry.names() == ["round", "square"]
    assert registry.get("square").__name__ == "Fraction"


def test_whoever_asks_is_told_that_a_package_has_taken_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "square = fractions:Fraction", "round = fractions:Fraction")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    registry.add("round", "decimal:Decimal")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'round' is registered twice: decimal:Decimal and fractions:Fraction; rename one"):
            registry.names()
