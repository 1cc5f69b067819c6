"""Registries: lazy, no silent overwrite, unknown names list the known ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
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


def _installed(folder: Path, name: str, entries: str) -> None:
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[autosched.things_of_a_test]\n{entries}\n")


def test_two_packages_that_bring_one_name_are_named_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path, "acme", "square = fractions:Fraction")
    _installed(tmp_path, "apex", "square = decimal:Decimal\ncircle = decimal:Context")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    for ask in (registry.names, registry.plugged, lambda: registry.get("circle")):
        with pytest.raises(UsageError, match=r"'square' is registered twice: .*; rename one"):
            ask()


def test_what_other_packages_bring_is_known_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path, "acme", "square = fractions:Fraction")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    registry.add("round", "decimal:Decimal")
    assert registry.plugged() == ["square"]
    assert registry.names() == ["round", "square"]
    assert registry.get("square").__name__ == "Fraction"


def _entry(name: str) -> EntryPoint:
    return EntryPoint(name, "fractions:Fraction", "autosched.things_of_a_test")


def test_a_look_for_plugins_that_is_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = [True]

    def entry_points(group: str) -> Iterator[EntryPoint]:
        yield _entry("square")
        if interrupted.pop():
            raise KeyboardInterrupt
        yield _entry("cube")

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    registry.add("round", "decimal:Decimal")
    with pytest.raises(KeyboardInterrupt):
        registry.names()
    interrupted.append(False)
    assert registry.names() == ["round", "square", "cube"]
    assert registry.plugged() == ["square", "cube"]


def test_threads_that_look_for_plugins_at_the_same_time_find_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    looks = iter([True, False])

    def entry_points(group: str) -> Iterator[EntryPoint]:
        yield _entry("square")
        if next(looks):
            with ThreadPoolExecutor(1) as other:
                found.append(other.submit(registry.names).result())
        yield _entry("cube")

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    found.append(registry.names())
    assert found == [["square", "cube"]] * 2


def test_whoever_asks_is_told_that_a_package_has_taken_a_name_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(tmp_path, "acme", "square = fractions:Fraction\nround = fractions:Fraction")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[type] = Registry("thing", "autosched.things_of_a_test")
    registry.add("round", "decimal:Decimal")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'round' is registered twice: decimal:Decimal and fractions:Fraction; rename one"):
            registry.names()
