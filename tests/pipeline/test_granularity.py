"""What a job is told that it may have missed."""

from __future__ import annotations

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.variants import Lowering
from autosched.pipeline.granularity import templates_note


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize(("rows", "said"), [(1, True), (2, True), (64, False)])
def test_products_of_few_rows_are_pointed_to_templates(rows: int, said: bool, lowering: Lowering) -> None:
    said = said and not (rows == 1 and lowering is Lowering.FUSED)  # which compiles them
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)).eval()
    note = templates_note(capture(model, (torch.randn(rows, 512),), lowering=lowering).program)
    assert bool(note) is said
    assert not said or ("--effort balanced" in note and note.startswith(("99%", "100%")))


def test_what_reads_little_of_its_memory_for_products_is_not() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    ).eval()
    assert templates_note(capture(model, (torch.randn(1, 3, 64, 64),)).program) == ""
