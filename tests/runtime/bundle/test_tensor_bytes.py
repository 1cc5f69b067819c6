"""Every dtype that a value may have gets into a bundle, into a measuring process, and back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from autosched.capture.export import capture
from autosched.core.graph import ITEM_BYTES
from autosched.device import worker_tensors
from autosched.device.worker_tensors import read_tensors, write_tensors
from autosched.runtime.bundle.tensor_bytes import from_stored, to_stored
from autosched.runtime.kernels import random_inputs

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
_DTYPES = sorted(ITEM_BYTES)


def tensor_of(name: str, rows: int = 4, columns: int = 6) -> torch.Tensor:
    """Any bits but those that mean no number."""
    dtype: torch.dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 2, (rows, columns * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_the_table_has_the_size_of_every_dtype() -> None:
    assert {name: getattr(torch, name).itemsize for name in _DTYPES} == dict(ITEM_BYTES)


@pytest.mark.parametrize("name", _DTYPES)
def test_a_file_of_tensors_gives_back_what_it_got(name: str, tmp_path: Path) -> None:
    whole = tensor_of(name)
    scalar = whole.reshape(-1)[:1].view(torch.uint8).clone().view(whole.dtype).reshape(())
    given = {"whole": whole, "turned": whole.t(), "part": whole[1:3], "scalar": scalar, "nothing": whole[:0]}
    write_tensors(tmp_path / "tensors", given)
    for key, tensor in read_tensors(tmp_path / "tensors").items():
        wanted = given[key]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert bits(tensor) == bits(wanted)


def test_a_file_of_tensors_is_written_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, int] = {}
    save = worker_tensors.save_file

    def noting(flats: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        written.update({name: tensor.data_ptr() for name, tensor in flats.items()})
        save(flats, path, metadata=metadata)

    monkeypatch.setattr(worker_tensors, "save_file", noting)
    whole, other = torch.randn(4, 6), torch.randn(6, 4).t()
    given = {"whole": whole, "other": other, "tied": whole, "rows": whole[1:3], "again": torch.from_numpy(other.numpy())}
    write_tensors(tmp_path / "tensors", given)
    # Two of one memory are two pieces of the file, for which safetensors wants one of them copied.
    assert len(written) == 3
    assert len(set(written.values())) == 3
    assert {whole.data_ptr(), other.data_ptr()} <= set(written.values())
    for key, tensor in read_tensors(tmp_path / "tensors").items():
        assert torch.equal(tensor, given[key])
        assert tensor.stride() == given[key].stride()


@pytest.mark.parametrize("name", _DTYPES)
def test_a_safetensors_file_takes_it_as_bytes_if_it_has_no_name_for_it(name: str) -> None:
    tensor = tensor_of(name)
    stored = safetensors.torch.load(safetensors.torch.save({"a": to_stored(tensor)}))["a"]
    found = from_stored(stored, name, tuple(tensor.shape))
    assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))


def test_bytes_of_another_size_are_not_taken_for_a_tensor() -> None:
    stored = torch.zeros(7, dtype=torch.uint8)
    assert from_stored(stored, "complex128", (1,)) is stored


class Same(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.view(-1)


@pytest.mark.parametrize("name", _DTYPES)
def test_random_inputs_are_drawn_of_every_dtype(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    example = torch.randn(4, 6).to(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else tensor_of(name)
    program = capture(Same(), (example,)).program
    first, again, other = (random_inputs(program, seed)[0] for seed in (1, 1, 2))
    assert (first.dtype, first.shape) == (dtype, (4, 6))
    assert bits(first) == bits(again)
    assert bits(first) != bits(other)


def test_wide_integers_are_drawn_within_what_a_file_may_say() -> None:
    example = torch.tensor([2**63 - 1, -(2**63), 5])
    item = capture(Same(), (example,)).program.inputs[0]
    assert (item.low, item.high) == (-(2**62), 2**62)
