"""A session asked through the measurer gets the pairs and groups as they were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autosched.core.records import Contamination, Failure, FailureKind, GroupRecord, PairRecord
from autosched.datasets.choices import GroupChoice, PairChoice
from autosched.datasets.session_measurer import SessionMeasurer
from autosched.device.base import Group, Pair


class RecordingSession:
    def __init__(self) -> None:
        self.asked: list[Pair] = []
        self.groups_asked: list[Group] = []

    def groups(self, groups: Sequence[Group], *, repeats: int) -> list[GroupRecord | Failure]:
        self.groups_asked += groups
        return [Failure(FailureKind.UNAVAILABLE, "a double") for _ in groups]

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[Any]]:
        return [[(width, repeats) for width in widths]]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        self.asked += pairs
        return [PairRecord("a", 1, "b", 2, 1.0, 1.0, 1.5, 1.0, 1.0, 0.75, 1, 1, repeats, Contamination()) for _ in pairs]


def test_pairs_are_asked_in_their_start_order_and_width() -> None:
    session = RecordingSession()
    measurer = SessionMeasurer(session, repeats=7)  # type: ignore[arg-type]
    (answer,) = measurer.pairs([PairChoice(4, 2, 1, 2)])
    assert session.asked == [Pair(4, 2, 1, 2)]
    assert isinstance(answer, PairRecord)
    assert answer.count == 7
    asked: object = measurer.solo((1, 2))
    assert asked == [[(1, 7), (2, 7)]]


def test_groups_are_asked_in_their_start_order_and_width() -> None:
    session = RecordingSession()
    (answer,) = SessionMeasurer(session, repeats=4).groups([GroupChoice((3, 1, 2), (1, 1, 2))])  # type: ignore[arg-type]
    assert session.groups_asked == [Group((3, 1, 2), (1, 1, 2))]
    assert isinstance(answer, Failure)
