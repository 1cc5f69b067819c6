"""The random numbers of compiled code: one state in, one state out, the same on every machine."""

from __future__ import annotations

import numpy as np

from autosched.search.compiled.cache import compiled


@compiled("f8(u8[::1])")
def next_uniform(random_state):  # type: ignore[no-untyped-def]
    """Uniform in [0, 1). *Source:* Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplitMix64)."""
    random_state[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = random_state[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(mixed >> np.uint64(11)) * (1.0 / 9007199254740992.0)
