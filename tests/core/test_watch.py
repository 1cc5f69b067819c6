"""What a model does to its arguments is seen, and comes back to the caller's own objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autosched.core.containers import unpack
from autosched.core.errors import UnsupportedGraph
from autosched.core.watch import Watch


@dataclass
class Pair:
    left: Any
    right: Any = None


@dataclass(frozen=True, slots=True)
class Sealed:
    value: Any


def answered(change: Any) -> tuple[Pair, Any]:
    """A caller's object after a call that ran elsewhere, and what came back."""
    theirs = Pair(torch.zeros(1), [1])
    given = {0: theirs}
    watch = Watch(((theirs,), {}), given)
    packed = watch.packed(change(theirs))
    mine = Pair(torch.zeros(1), [1])
    kept = mine.right
    answer = unpack(packed, {0: mine})
    assert mine.right is kept
    return mine, answer


def test_an_object_that_comes_back_changed_is_the_callers() -> None:
    def change(pair: Pair) -> Any:
        pair.left = torch.ones(1)
        pair.right.append(2)
        return {"out": pair}

    mine, answer = answered(change)
    assert answer["out"] is mine
    assert (mine.left.item(), mine.right) == (1, [1, 2])


def test_one_that_comes_back_as_it_was_is_not_touched() -> None:
    theirs = Sealed(torch.zeros(1))
    packed = Watch(((theirs,), {}), {0: theirs}).packed([theirs])
    mine = Sealed(torch.ones(1))
    assert unpack(packed, {0: mine})[0] is mine
    assert mine.value.item() == 1


@pytest.mark.parametrize("what", ["object", "list", "dictionary"])
def test_what_is_changed_and_kept_is_refused(what: str) -> None:
    pair, items, table = Pair(1), [torch.ones(1)], {"a": 1}
    watch = Watch(((pair, items, table), {}), {0: pair})
    if what == "object":
        pair.left = 2
    elif what == "list":
        items[0] = torch.ones(1)
    else:
        del table["a"]
    with pytest.raises(UnsupportedGraph, match="Pair that it is given" if what == "object" else "list or a dictionary"):
        watch.packed(torch.ones(1))
