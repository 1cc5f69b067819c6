"""The depth of a JSON text is told exactly, whatever its strings hold, and never too low for the part a parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autosched.runtime.bundle.json_nesting import nests_within

_LEAVES = st.one_of(st.none(), st.integers(), st.text(st.sampled_from('[]{}"\\/na\n\té')))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(st.sampled_from('[]{}"\\k'), max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=300, deadline=None)
@given(_VALUES, st.integers(0, 8), st.booleans())
def test_the_depth_of_any_value_is_told_exactly(value: Any, depth: int, plain: bool) -> None:
    text = json.dumps(value, ensure_ascii=not plain).encode()
    assert nests_within(text, depth) == (_depth(value) <= depth)
    # JSON inside JSON is a string like any other.
    assert nests_within(json.dumps([text.decode()]).encode(), 1)


def _depth_read(text: str) -> int:
    """How deep a parser gets that reads character by character, up to a backslash where none may be."""
    deepest = level = place = 0
    inside = False
    while place < len(text):
        character = text[place]
        if character == "\\":
            if not inside:
                break
            place += 1
        elif character == '"':
            inside = not inside
        elif not inside and character in "[{":
            level += 1
            deepest = max(deepest, level)
        elif not inside and character in "]}":
            level -= 1
        place += 1
    return deepest


@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from('[[]{}"\\a')), st.integers(0, 4))
@example("[[\\" + '"]]', 1)
def test_of_no_text_is_it_said_that_a_parser_stays_higher_than_it_does(text: str, depth: int) -> None:
    if nests_within(text.encode(), depth):
        assert _depth_read(text) <= depth


@pytest.mark.parametrize("text", ["[", "]", "[[]", "{", "[" * 100_000, '{"a":' * 100_000, "[" * 60 + "]" * 60])
def test_brackets_that_do_not_match_or_nest_too_deep_are_refused(text: str) -> None:
    assert not nests_within(text.encode(), 48)
