"""The experiments are scripts, not a package that is installed: found from the checkout, last, so that its datasets/ hides nobody's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
