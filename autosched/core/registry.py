"""One kind of registry for everything with a name: strategies, cost models, devices.

Entries are ``name -> "module:attribute"`` and are imported on first use, so that listing names imports nothing.
Other packages add entries through an entry-point group of the registry's name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
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
        self._plugged: list[str] | None = None

    def add(self, name: str, place: str) -> None:
        """Register ``place`` (``module:attribute``) under ``name``.

        Raises:
            UsageError: if the name is taken.
        """
        if name in self._places:
            raise UsageError(f"{self._what} {name!r} is registered twice: {self._places[name]} and {place}; rename one")
        self._places[name] = place

    def names(self) -> list[str]:
        """All names, in the order they were registered, plugins last."""
        self._read_plugins()
        return list(self._places)

    def plugged(self) -> list[str]:
        """The names that other packages brought."""
        return list(self._read_plugins())

    def get(self, name: str) -> T:
        """Import and return what ``name`` means.

        Raises:
            UnknownName: listing the known names.
            UsageError: if its import fails, naming the cause.
        """
        self._read_plugins()
        if name not in self._places:
            raise UnknownName(f"unknown {self._what} {name!r}; known: {', '.join(sorted(self._places))}")
        module_name, _, attribute = self._places[name].partition(":")
        try:
            return cast(T, getattr(importlib.import_module(module_name), attribute))
        except Exception as error:  # a plugin's module may raise anything
            raise UsageError(
                f"{self._what} {name!r} cannot be loaded from {self._places[name]}: {type(error).__name__}: {error}. "
                "Repair the package that brings it, or uninstall it."
            ) from error

    def _read_plugins(self) -> list[str]:
        if self._plugged is None:
            own, plugged = dict(self._places), []
            try:
                for entry in importlib.metadata.entry_points(group=self._group):
                    self.add(entry.name, entry.value)
                    plugged.append(entry.name)
            except UsageError:
                # Whoever asks next is told, too, and does not go on without the others.
                self._places = own
                raise
            self._plugged = plugged
        return self._plugged
