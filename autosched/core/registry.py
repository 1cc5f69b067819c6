"""One kind of registry for everything with a name: strategies, cost models, devices.

Entries are ``name -> "module:attribute"`` and are imported on first use, so that listing names imports nothing.
Other packages add entries through an entry-point group of the registry's name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

from autosched.core.errors import UnknownName, UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and where to import what they mean.

    Args:
        what: for messages, for example ``"strategy"``.
        group: entry-point group that plugins use, for example ``"autosched.searchers"``.
    """

    def __init__(self, what: str, group: str) -> None:
        self._what = what
        self._group = group
        self._places: dict[str, str] = {}
        self._plugged: dict[str, str] | None = None

    def add(self, name: str, place: str) -> None:
        """Register ``place`` (``module:attribute``) under ``name``.

        Raises:
            UsageError: if the name is taken.
        """
        self._require_free(name, place, self._places)
        self._places[name] = place

    def names(self) -> list[str]:
        """All names, in the order they were registered, plugins last."""
        return [*self._places, *self._read_plugins()]

    def plugged(self) -> list[str]:
        """The names that other packages brought."""
        return list(self._read_plugins())

    def get(self, name: str) -> T:
        """Import and return what ``name`` means.

        Raises:
            UnknownName: listing the known names.
            UsageError: if its import fails, naming the cause.
        """
        places = {**self._places, **self._read_plugins()}
        if name not in places:
            raise UnknownName(f"unknown {self._what} {name!r}; known: {', '.join(sorted(places))}")
        module_name, _, attribute = places[name].partition(":")
        try:
            return cast(T, getattr(importlib.import_module(module_name), attribute))
        except Exception as error:  # a plugin's module may raise anything
            raise UsageError(
                f"{self._what} {name!r} cannot be loaded from {places[name]}: {type(error).__name__}: {error}. "
                "Repair the package that brings it, or uninstall it."
            ) from error

    def _read_plugins(self) -> dict[str, str]:
        if self._plugged is None:
            found: dict[str, str] = {}
            for entry in importlib.metadata.entry_points(group=self._group):
                self._require_free(entry.name, entry.value, {**self._places, **found})
                found[entry.name] = entry.value
            # All at once or none: another thread may look meanwhile, and where two have one name, that is said each time.
            self._plugged = found
        return self._plugged

    def _require_free(self, name: str, place: str, taken: Mapping[str, str]) -> None:
        if name in taken:
            raise UsageError(f"{self._what} {name!r} is registered twice: {taken[name]} and {place}; rename one")
