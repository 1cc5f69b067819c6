"""What a call that a schedule was not made for is told: the place, what is there, and what was expected."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from autosched.core.containers import pack_call
from autosched.runtime.call_difference import difference_of_calls

_Point = namedtuple("_Point", ["x", "y"])


def said(given: Any, expected: Any) -> str:
    """The difference of two calls, each ``(args, kwargs)``."""
    return difference_of_calls(*(pytree.tree_structure(pack_call(call)) for call in (given, expected)))


@pytest.mark.parametrize(
    ("given", "expected", "words"),
    [
        (
            ((1, 2), {}),
            ((1,), {}),
            "the call has 2 arguments by position and none by name; the schedule was made for 1 argument by position",
        ),
        (((1,), {"scale": 2}), ((1,), {}), "1 argument by position and 'scale' by name; the schedule was made for 1 .* none by name"),
        ((([1, 2],), {}), (({"a": 1, "b": 2},), {}), "argument 0 is a list of 2; the schedule was made for a dict of 'a', 'b'"),
        (((1,), {}), (((1, 2),), {}), "argument 0 is a single tensor, value or object; the schedule was made for a tuple of 2"),
        (((OrderedDict(a=1),), {}), (({"a": 1},), {}), "is a OrderedDict of 'a'; the schedule was made for a dict of 'a'"),
        ((({"a": 1},), {}), (({"a": 1, "b": 2, "c": 3},), {}), "^argument 0 lacks the keys 'b', 'c'$"),
        (
            (({"a": 1, "d": 2},), {}),
            (({"a": 1, "b": 2},), {}),
            "lacks the key 'b' and has the key 'd', which the schedule was not made for",
        ),
        ((({"b": 1, "a": 2},), {}), (({"a": 1, "b": 2},), {}), "keys in the order 'b', 'a'; the schedule was made for 'a', 'b'"),
        (((), {"f": [1, {"a": (2, 3)}]}), ((), {"f": [1, {"a": (2,)}]}), r"argument 'f'\[1\]\['a'\] is a tuple of 2; .* for a tuple of 1"),
        (((defaultdict(list, a=[1]),), {}), ((defaultdict(list, a=[1, 2]),), {}), r"argument 0\['a'\] is a list of 1; .* a list of 2"),
        (((_Point(1, 2),), {}), (((1, 2),), {}), "argument 0 is a _Point of 2; the schedule was made for a tuple of 2"),
        ((({},), {}), (([],), {}), "argument 0 is a dict of nothing; the schedule was made for a list of 0"),
    ],
)
def test_the_first_difference_is_said_with_its_place(given: Any, expected: Any, words: str) -> None:
    found = said(given, expected)
    assert re.search(words, found), found
    assert "TreeSpec" not in found


def test_calls_alike_do_not_differ() -> None:
    call = ((1, [2, {"a": 3}]), {"k": (4,)})
    assert said(call, call) == ""


def test_of_many_keys_a_few_are_named() -> None:
    found = said((({},), {}), (({f"key{place}": place for place in range(500)},), {}))
    assert found.endswith("'key7' and 492 more")
    assert len(found) < 150
