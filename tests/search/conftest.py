"""Makes the conformance suites and this folder's doubles importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
for _folder in (str(_HERE), str(_HERE.parent / "conformance")):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
