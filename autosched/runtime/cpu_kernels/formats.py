"""In which dtypes kernels of our own read numbers and write them; they compute in float32, and sums of whole numbers as such."""

from __future__ import annotations

FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3}
"""As ``Format`` in ``formats.h`` numbers them."""

HALVES = ("bfloat16", "float16")
"""Those of sixteen bits."""
