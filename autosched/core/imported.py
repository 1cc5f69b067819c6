"""What a name in a file means among the modules that this process has imported already: nothing is imported for it."""

from __future__ import annotations

import sys
from typing import Any


def imported_class(name: str) -> type[Any] | None:
    """The class that calls itself so, ``module.qualified name``; ``None`` if there is none."""
    head, dot, rest = name.partition(".")
    # Which part of the name is the module nobody says: a class may lie in another.
    while dot:
        found: Any = sys.modules.get(head)
        for part in rest.split("."):
            # Not getattr: a module may import something to answer.
            found = getattr(found, "__dict__", {}).get(part)
        if isinstance(found, type) and f"{found.__module__}.{found.__qualname__}" == name:
            return found
        part, dot, rest = rest.partition(".")
        head = f"{head}.{part}"
    return None
