"""The command line of another Python process that has this package, and how such a process imports."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

# A source checkout may not be installed, and may not come before site-packages: its own datasets/ would hide another's.
_ROOT = str(Path(__file__).resolve().parents[2])

# What this interpreter was told not to look at would be looked at by another one, which may find another PyTorch there.
_LEFT_OUT = [flag for flag, told in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)) if told]


def python_command(code: str, *arguments: str) -> list[str]:
    """Of this interpreter, to run ``code`` with ``arguments`` in ``sys.argv``; what lies in the working directory is not imported.

    What this process ignores (``python -I``, ``-E``, ``-s``), that one ignores, too.

    Nothing looks for garbage until ``code`` calls :func:`imports_done`: while PyTorch and Inductor are imported there is none, and to look
    takes up to a seventh of the time.
    """
    return [sys.executable, "-P", *_LEFT_OUT, "-c", f"import gc, sys; gc.disable(); sys.path.append({_ROOT!r}); {code}", *arguments]


def imports_done() -> None:
    """Garbage is looked for from now on, and not among what has been imported, which stays."""
    gc.freeze()
    gc.enable()
