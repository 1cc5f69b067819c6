"""Cache folders of tests' own that have our C++ compiled: a compiler takes half a minute for it, and many tests tune in a folder each."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# Settled now: a test, or what it starts, may set TMPDIR later.
_NATIVE = Path(tempfile.gettempdir()) / f"autosched-tests-native-{os.getuid()}"


def own_cache(folder: Path) -> str:
    """``folder`` for ``AUTOSCHED_CACHE``: made, and with nothing but what is compiled of our C++, which is kept between test runs.

    Whoever needs it first builds it. Not for tests of how it is built, found or removed.
    """
    native = folder / "native"
    if not native.is_symlink():
        _NATIVE.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        native.symlink_to(_NATIVE, target_is_directory=True)
    return str(folder)
