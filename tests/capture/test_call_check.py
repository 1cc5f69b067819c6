"""Arguments that describe no call are refused before they are taken for something else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import autosched
from autosched import pipeline
from autosched.capture.export import capture
from autosched.core.errors import UnsupportedGraph, UsageError

NET = torch.nn.Linear(4, 4).eval()
ROWS = torch.randn(1, 4)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (NET, ROWS, r"write \(x,\)"),  # a tensor is a sequence too: of rows that lack the first dimension
        (NET, {"input": ROWS}, "example_kwargs"),
        (NET, "x", r"write \(x,\)"),
        (NET, 3, "expected a tuple"),
        ("torchvision:googlenet", (ROWS,), "expected a torch.nn.Module"),
    ],
)
@pytest.mark.parametrize("function", [autosched.tune, autosched.compile, pipeline.compare], ids=["tune", "compile", "compare"])
def test_what_is_no_call_is_refused_at_once(function, model, inputs, words) -> None:
    with pytest.raises(UsageError, match=words):
        function(model, inputs, device="cpu")


@pytest.mark.parametrize("function", [autosched.tune, autosched.compile, pipeline.compare], ids=["tune", "compile", "compare"])
def test_a_model_that_is_compiled_already_is_refused_with_what_to_give(function) -> None:
    with pytest.raises(UsageError, match=r"Give model\._orig_mod"):
        function(torch.compile(NET), (ROWS,), device="cpu")


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="PyTorch is built without gloo")
@pytest.mark.parametrize("function", [autosched.tune, autosched.compile, pipeline.compare], ids=["tune", "compile", "compare"])
def test_a_model_of_which_processes_average_gradients_is_refused_with_what_to_give(function) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"DistributedDataParallel has wrapped.*Give model\.module"):
            function(torch.nn.parallel.DistributedDataParallel(NET), (ROWS,), device="cpu")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model", [NET, torch.nn.Linear(4, 4, device="meta").eval()], ids=["input", "weight"])
def test_what_has_no_values_is_refused(model: torch.nn.Module) -> None:
    words = "example input .* is on the meta device" if model is NET else "weight weight is on the meta device.*Load"
    with pytest.raises(UnsupportedGraph, match=words):
        capture(model, (ROWS.to("meta"),))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_what_to_give() -> None:
    with pytest.raises(UnsupportedGraph, match=r"nested tensor.*Pad"):
        capture(NET, (torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)]),))


def test_each_example_of_several_shapes_is_looked_at() -> None:
    with pytest.raises(UsageError, match=r"example 1 of tune_shapes.*write \(x,\)"):
        autosched.tune_shapes(NET, [(ROWS,), torch.randn(2, 4)], device="cpu")


def test_keyword_arguments_are_a_dictionary() -> None:
    with pytest.raises(UsageError, match="example_kwargs"):
        autosched.tune(NET, (), [ROWS], device="cpu")


def test_a_model_too_large_for_the_machine_is_told_to_shrink() -> None:
    class Vast(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return (rows[:, None] + rows[None, :] * torch.ones(1 << 20, 1, 1)).sum()  # 2**60 bytes

    with pytest.raises(UnsupportedGraph, match="smaller batch"):
        capture(Vast().eval(), (torch.randn(1 << 19),))
