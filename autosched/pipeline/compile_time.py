"""How long compilers of whole models may take in one job: each for itself, and all together."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from autosched.config import compile_limit_s, compile_total_s

_SHARE = 0.5
_LEAST_S = 1.0


class CompileTime:
    """Hands out time to one compiler after the other.

    Each gets at most the limit for one, and at most half of what is left of the total: the first leave something to the last, however slow
    they are, and what they do not use is there for the others. Without a total only the limit counts.

    Raises:
        UsageError: if a variable of the environment holds no positive number.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = compile_limit_s(limit_s)
        self._left_s = compile_total_s(math.inf)

    @contextlib.contextmanager
    def turn(self) -> Iterator[float]:
        """Seconds that one compiler may take; what passes inside is taken off the total."""
        begin = time.monotonic()
        try:
            yield max(_LEAST_S, min(self._limit_s, _SHARE * self._left_s))
        finally:
            self._left_s -= time.monotonic() - begin
