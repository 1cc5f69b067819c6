"""The command line of another Python process that has this package."""

from __future__ import annotations

import sys
from pathlib import Path

# A source checkout may not be installed, and may not come before site-packages: its own datasets/ would hide another's.
_ROOT = str(Path(__file__).resolve().parents[2])


def python_command(code: str, *arguments: str) -> list[str]:
    """Of this interpreter, to run ``code`` with ``arguments`` in ``sys.argv``; what lies in the working directory is not imported."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_ROOT!r}); {code}", *arguments]
