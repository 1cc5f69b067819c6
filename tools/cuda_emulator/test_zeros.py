"""What ``--values zeros`` promises; run under run.py with it, and skipped elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

ZEROS = torch.cuda.is_available() and os.environ.get("EMULATED_CUDA_VALUES") == "zeros"
pytestmark = pytest.mark.skipif(not ZEROS, reason="runs on the emulated device without values only: use run.py --values zeros")


def test_nothing_reaches_the_device_and_zeros_come_back() -> None:
    given = torch.arange(1.0, 5.0)
    there = given.cuda()
    assert there.tolist() == [0.0] * 4
    assert (there + 1).tolist() == [0.0] * 4
    assert torch.full((4,), 7, dtype=torch.uint8, device="cuda").tolist() == [0] * 4
    assert given.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_tensors_of_one_shape_are_equal_there() -> None:
    one, other = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    assert torch.equal(one, other)
    assert not torch.equal(one, other[:2])


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_tuning_job_goes_through_and_says_where(home: str) -> None:
    import autosched

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval().to(home)
    tuned = autosched.tune(model, (torch.randn(4, 8, device=home),), device="cuda", effort="quick", budget_s=5, lowering="aten")
    report = tuned.report
    assert report.device.name == "Emulated sm_90, no kernels run"
    assert [row.name for row in report.strategies if row.failure is not None] == []
    assert {row.max_abs_error for row in report.strategies} == {0.0}
    served = autosched.load(tuned.to_bytes(), model.cuda(), strict=True)
    assert served(torch.randn(4, 8, device="cuda")).tolist() == [[0.0, 0.0]] * 4
