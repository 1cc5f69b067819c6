"""Some words of a weight's memory tell of what is written to all of it, and are read where there is such memory."""

from __future__ import annotations

import ctypes

import pytest
import torch

from autosched.runtime.memory_words import MemoryWords
from tests.conformance.forked import run_forked


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(64, 64),
        torch.ones(64, 64).t(),
        torch.ones(2, 8, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(16, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(9, dtype=torch.int8),
        torch.ones(65)[1:],
        torch.ones(()).double(),
        torch.ones(()),
        torch.ones(64)[3:4],
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(1, dtype=torch.int8),
        torch.cat([torch.zeros(999), torch.ones(1000)]),
        torch.nn.Parameter(torch.ones(64)),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_what_is_written_to_all_of_a_tensor_is_seen(tensor: torch.Tensor) -> None:
    words = MemoryWords([tensor])
    assert words.places
    assert not words.changed()
    tensor.data.mul_(2)
    assert words.changed()
    assert not MemoryWords([tensor]).changed()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(64)[1:60],
        torch.ones(64, 8)[:, :3],
        torch.ones(64, dtype=torch.float64)[3::5],
        torch.ones(3, dtype=torch.float64).expand(4, 3),
        torch.ones(33, dtype=torch.int8)[3:31],
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_all_that_is_read_is_the_tensors_own(tensor: torch.Tensor) -> None:
    addresses = {tensor.data_ptr() + tensor.element_size() * place for place in _offsets(tensor)}
    own = {address + byte for address in addresses for byte in range(tensor.element_size())}
    assert {place + byte for place in MemoryWords([tensor]).places for byte in range(8)} <= own


def _offsets(tensor: torch.Tensor) -> list[int]:
    if tensor.dim() == 0:
        return [0]
    inner = [_offsets(part) for part in tensor]
    return [place * tensor.stride(0) + offset for place, offsets in enumerate(inner) for offset in offsets]


@pytest.mark.parametrize("tensor", [torch.ones(0), torch.ones(4, device="meta"), torch.ones(64).to_sparse()], ids=str)
def test_what_has_no_memory_of_its_own_to_look_at_is_left_out(tensor: torch.Tensor) -> None:
    words = MemoryWords([tensor])
    assert not words.places
    assert not words.changed()


def test_what_was_given_back_is_left_out() -> None:
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    assert not MemoryWords([tensor]).places


def test_words_are_of_numbers_that_are_not_zero_where_there_are_such() -> None:
    weight = torch.zeros(1000, dtype=torch.float64)
    weight[600:] = 2.0
    words = [ctypes.c_double.from_address(place).value for place in MemoryWords([weight]).places]
    assert words == [2.0, 2.0]
    weight.data.mul_(3.0)
    # Of one that is all zeros, any.
    zeros = torch.zeros(64)
    watched = MemoryWords([zeros])
    zeros.data.fill_(1.0)
    assert watched.changed()


def test_the_memory_is_there_as_long_as_it_is_looked_at() -> None:
    tensor = torch.nn.Parameter(torch.ones(1 << 16))
    words = MemoryWords([tensor])
    tensor.data = torch.zeros(2)
    assert not words.changed()


def test_a_neighbour_of_a_small_tensor_is_not_compared() -> None:
    memory = torch.ones(64)
    words = MemoryWords([memory[3:4]])
    memory[2] = 5.0
    assert not words.changed()
    memory[3] = 5.0
    assert words.changed()


def test_memory_that_was_given_back_is_not_read() -> None:
    """It is no part of the process any more where it was large, and to read it would end that."""
    code = (
        "import torch; from autosched.runtime.memory_words import MemoryWords; kept, gone = torch.ones(4), torch.ones(1 << 24); "
        "words = MemoryWords([kept, gone]); gone.untyped_storage().resize_(0); found = words.different(); "
        "assert found and all(each is gone for each in found)"
    )
    ended = run_forked(code)
    assert ended.returncode == 0, ended.stderr
