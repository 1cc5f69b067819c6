"""How deep a JSON text nests, before any parser sees it: parsers recurse, and a text from a stranger must not run out of their stack."""

from __future__ import annotations

_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(range(256)).translate(None, b'[]{}"')


def nests_within(text: bytes, depth: int) -> bool:
    """Whether the brackets of ``text`` outside its strings match, and nest no deeper than ``depth``.

    Of what is no JSON, this holds for the part before the first fault, which is as far as a parser gets: what follows hides no level.
    """
    # Pairs of backslashes first: what is then left before a quote makes it a part of its string.
    marks = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_ONE_KIND, _NO_MARKS)
    # Between the quotes there is by turns the outside and the inside of strings.
    brackets = b"".join(marks.split(b'"')[::2])
    # Each turn removes the innermost level.
    for _ in range(depth):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets
