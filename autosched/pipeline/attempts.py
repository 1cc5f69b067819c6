"""How compiling a whole program ended on this machine before, kept beside the code that came of it.

A compiler that is ended at its limit loses that time. What it had finished stays in Inductor's cache, so it is given as long once more and
goes on from there; after that it gets half as long again or nothing. A program that was never tried gets nothing where exporting the model
has shown that it cannot be done in time.
"""

from __future__ import annotations

import hashlib

import msgspec

from autosched.config import regions_dir
from autosched.core.decoding import decode_json
from autosched.core.program import Program
from autosched.core.variants import Lowering
from autosched.device.base import Device
from autosched.runtime.regions.store import WHOLE, RegionStore

EXPORTS = {"cpu": 10.0}
"""The least that Inductor takes for a whole model, in times that exporting it takes, by kind of device: 10 for T5, 13 for GoogLeNet, 24 for
SqueezeNet, both widths compiled at once on two cores. Where a kind is missing, nothing is known before the first attempt."""

_SAME_AGAIN = 2
# No two jobs have quite the same time left.
_AS_LONG = 0.8
_LONGER = 1.5


class _Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    finished: bool
    limit_s: float = 0.0  # the longest in vain
    times: int = 0  # in a row


class Attempts:
    """The attempts at one program in one of Inductor's modes on one device."""

    def __init__(self, source: Program, lowering: Lowering, device: Device) -> None:
        # Not of the weights: how long a compiler takes does not depend on them, and a model is tuned again after each training.
        about = msgspec.json.encode((source.graph.hash, lowering.value, device.key, device.software))
        self._key = f"{WHOLE}attempts-{hashlib.sha256(about).hexdigest()}"
        self._exports = EXPORTS.get(device.key.kind, 0.0)

    def needs_s(self, export_cpu_s: float) -> float:
        """Seconds below which an attempt is not worth beginning; 0 where it was finished before.

        Args:
            export_cpu_s: what exporting the model took of one core.
        """
        ended = self._ended()
        if ended is None:
            return self._exports * export_cpu_s
        if ended.finished:
            return 0.0
        return ended.limit_s * (_LONGER if ended.times >= _SAME_AGAIN else _AS_LONG)

    def finished(self) -> None:
        """It was compiled."""
        if (ended := self._ended()) is None or not ended.finished:
            self._keep(_Ended(finished=True))

    def unfinished(self, limit_s: float) -> None:
        """It was ended after ``limit_s`` seconds."""
        before = self._ended()
        again = before is not None and not before.finished
        longest_s, times = (before.limit_s, before.times) if again and before is not None else (0.0, 0)
        # A longer attempt is a first one of its length.
        times = times + 1 if limit_s < _LONGER * longest_s else 1
        self._keep(_Ended(finished=False, limit_s=max(limit_s, longest_s), times=times))

    def _ended(self) -> _Ended | None:
        text = RegionStore(regions_dir()).get(self._key)
        if text is None:
            return None
        try:
            return decode_json(text, _Ended)
        except msgspec.MsgspecError:
            return None

    def _keep(self, ended: _Ended) -> None:
        RegionStore(regions_dir()).put(self._key, msgspec.json.encode(ended).decode())
