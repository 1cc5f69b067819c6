"""A program survives JSON whole, and a field that did not exist when a file was written takes its default."""

from __future__ import annotations

import msgspec
import pytest

from autosched.core.program_json import decode_program, encode_program
from tests.conformance.graphs import TwoBranches, two_branches_program


def test_a_program_is_read_as_it_was_written() -> None:
    program, _ = two_branches_program(TwoBranches().eval())
    data = encode_program(program)
    assert decode_program(data) == program
    assert encode_program(decode_program(data)) == data


@pytest.mark.parametrize("edit", ["unknown", "missing", "type"])
def test_what_is_no_program_is_refused(edit: str) -> None:
    tree = msgspec.json.decode(encode_program(two_branches_program(TwoBranches().eval())[0]))
    if edit == "unknown":
        tree["extra"] = 1
    elif edit == "missing":
        del tree["input_tree"]
    else:
        tree["bindings"] = 7
    with pytest.raises(msgspec.ValidationError):
        decode_program(msgspec.json.encode(tree))
