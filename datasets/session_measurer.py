"""A device session as a measurer, so that collecting needs to know nothing of devices."""

from __future__ import annotations

from collections.abc import Sequence

from autosched.core.records import Failure, GroupRecord, PairRecord, SoloRecord
from autosched.datasets.choices import GroupChoice, PairChoice
from autosched.device.base import Group, Pair, Session


class SessionMeasurer:
    """Asks an open session; ``repeats`` as in ``Session``. The session stays the caller's to close."""

    def __init__(self, session: Session, *, repeats: int) -> None:
        self._session = session
        self._repeats = repeats

    def solo(self, widths: Sequence[int]) -> list[list[SoloRecord | Failure]]:
        """Every operator alone."""
        return self._session.solo(widths, repeats=self._repeats)

    def pairs(self, choices: Sequence[PairChoice]) -> list[PairRecord | Failure]:
        """Pairs in their start order."""
        asked = [Pair(choice.first, choice.last, choice.first_width, choice.last_width) for choice in choices]
        return self._session.pairs(asked, repeats=self._repeats)

    def groups(self, choices: Sequence[GroupChoice]) -> list[GroupRecord | Failure]:
        """Groups in their start order."""
        return self._session.groups([Group(choice.operators, choice.widths) for choice in choices], repeats=self._repeats)
