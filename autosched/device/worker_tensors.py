"""Tensors in a file between processes, and programs with theirs: strides kept, shared memory written once, nothing pickled."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from autosched.core.decoding import decode_json
from autosched.core.program import Program
from autosched.core.program_json import decode_program
from autosched.runtime.bundle.tensor_bytes import from_stored, to_stored


class _View(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to cut a tensor out of the flat piece of memory it lives in."""

    flat: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write plain CPU tensors by name, from where they lie. Tensors over the same memory (tied weights) are stored once.

    Raises:
        ValueError: for a tensor whose memory cannot be read (an opaque layout), naming it.
    """
    flats: dict[str, torch.Tensor] = {}
    stored: dict[tuple[int, int, torch.dtype], str] = {}
    homes: set[int] = set()
    views: dict[str, _View] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"tensor {name} is {tensor.layout} on {tensor.device}; only dense CPU tensors cross processes")
        plain = tensor.detach().resolve_conj().resolve_neg()
        span = 0
        if plain.numel():
            span = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        place = (plain.data_ptr(), span, plain.dtype)
        if span == 0 or place not in stored:
            flat = f"t{len(flats)}"
            piece, home = plain.as_strided((span,), (1,)), plain.untyped_storage().data_ptr()
            # safetensors refuses tensors in one storage. Copies of all would be as large as the model.
            flats[flat] = to_stored(piece.clone() if home in homes else piece)
            homes.add(home)
            stored[place] = flat
        views[name] = _View(stored[place], str(plain.dtype).removeprefix("torch."), tuple(plain.shape), tuple(plain.stride()))
    save_file(flats, path, metadata={"views": msgspec.json.encode(views).decode()})


def read_tensors(path: Path, untimed: Container[str] = ()) -> dict[str, torch.Tensor]:
    """The inverse of :func:`write_tensors`; memory is aligned as PyTorch's own, so that timings are those of the original.

    Args:
        untimed: names of tensors that no operator reads whose time counts. They stay in the file, which takes no memory of this process's.
    """
    with safe_open(path, framework="pt") as file:
        views = decode_json(file.metadata()["views"], dict[str, _View])
        timed = {view.flat for name, view in views.items() if name not in untimed}
        flats = {name: _aligned(file.get_tensor(name), timed=name in timed) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return {name: _cut(flats[view.flat], view) for name, view in views.items()}


def _aligned(stored: torch.Tensor, *, timed: bool) -> torch.Tensor:
    return stored.clone() if timed or stored.data_ptr() % stored.element_size() else stored


def read_in_order(path: str) -> list[torch.Tensor]:
    """As :func:`read_tensors`, of tensors that were written under their places in a list."""
    tensors = read_tensors(Path(path))
    return [tensors[str(place)] for place in range(len(tensors))]


def read_program(program_file: str, constants_file: str, device: torch.device | str = "cpu") -> tuple[Program, dict[int, torch.Tensor]]:
    """What ``Worker.write_program`` wrote: a program, and the tensor of each of its bindings on ``device``, by value index.

    On a CPU, what only the prologue reads stays in the file: weights that are packed, which are most of a model.
    """
    program = decode_program(Path(program_file).read_bytes())
    untimed = () if program.source else [str(value) for value in _only_prepared(program)]
    return program, {int(name): tensor.to(device) for name, tensor in read_tensors(Path(constants_file), untimed).items()}


def _only_prepared(program: Program) -> set[int]:
    """Constants that neither an operator reads nor the caller gets, nor may be views of what either does."""
    graph = program.graph
    read = {value for operator in graph.operators for value in (*operator.reads, *operator.mutates)} | set(graph.outputs)
    homes = {graph.values[value].storage for value in read}
    return {binding.value for binding in program.bindings if graph.values[binding.value].storage not in homes}


def _cut(flat: torch.Tensor, view: _View) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, view.dtype)
    return from_stored(flat, view.dtype, (flat.nbytes // dtype.itemsize,)).as_strided(view.shape, view.strides)
