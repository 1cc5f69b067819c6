"""A session asked through the measurer gets the pairs as they were chosen, and groups are refused as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autosched.core.records import Contamination, Failure, FailureKind, PairRecord
from autosched.datasets.choices import GroupChoice, PairChoice
from autosched.datasets.session_measurer import SessionMeasurer
from autosched.device.base import Pair


class RecordingSession:
    def __init__(self) -> None:
        self.asked: list[Pair] = []

    def solo(self, widths: Sequence[int], *, repeats: int) -> list[list[Any]]:
        return [[(width, repeats) for width in widths]]

    def pairs(self, pairs: Sequence[Pair], *, repeats: int) -> list[PairRecord | Failure]:
        self.asked += pairs
        return [PairRecord("a", 1, "b", 2, 1.0, 1.0, 1.5, 1.0, 1.0, 0.75, 1, 1, repeats, Contamination()) for _ in pairs]


def test_pairs_are_asked_in_their_start_order_and_width() -> None:
    session = RecordingSession()
    measurer = SessionMeasurer(session, repeats=7)  # type: ignore[arg-type]
    (answer,) = measurer.pairs([PairChoice(4, 2, 1, 2, 99.0)])
    assert session.asked == [Pair(4, 2, 1, 2)]
    assert isinstance(answer, PairRecord)
    assert answer.count == 7
    asked: object = measurer.solo((1, 2))
    assert asked == [[(1, 7), (2, 7)]]


def test_groups_are_unavailable_not_an_error() -> None:
    answers = SessionMeasurer(RecordingSession(), repeats=1).groups([GroupChoice((1, 2, 3), (1, 1, 1))])  # type: ignore[arg-type]
    assert [answer.kind for answer in answers if isinstance(answer, Failure)] == [FailureKind.UNAVAILABLE]
