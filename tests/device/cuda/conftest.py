"""Makes the doubles importable: test folders are no packages."""

from __future__ import annotations

import sys
from pathlib import Path

_doubles = str(Path(__file__).resolve().parents[2] / "conformance")
if _doubles not in sys.path:
    sys.path.insert(0, _doubles)
