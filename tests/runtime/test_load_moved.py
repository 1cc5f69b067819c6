"""A model whose weights are elsewhere for a while, parked to make room: the schedule stands aside, and is used once they are back."""

from __future__ import annotations

import pytest
import torch

from autosched.core.errors import AutoschedError
from autosched.export.bundle import encode_bundle
from autosched.runtime.guard import FallbackWarning
from autosched.runtime.load import load
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs

WORDS = "weights are on meta now, and its schedule was loaded where they were, on cpu: move the model back"


@pytest.fixture
def model() -> TwoBranches:
    return TwoBranches().eval()


@pytest.mark.parametrize("assign", [True, False])
def test_a_schedule_stands_aside_while_the_weights_are_elsewhere(model: TwoBranches, assign: bool) -> None:
    loaded = load(encode_bundle(two_branches_bundle(model)), model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    args, kwargs = two_branches_inputs(3)
    with torch.no_grad():
        wanted = output_tensors(loaded(*args, **kwargs))
        model.to("meta")
        # What the model itself makes of such a call is the answer.
        with pytest.warns(FallbackWarning, match=WORDS), pytest.raises(RuntimeError, match="meta"):
            loaded(*args, **kwargs)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="meta"):
                loaded(*args, **kwargs)
        model.to_empty(device="cpu")
        model.load_state_dict(state, assign=assign)
        found = output_tensors(loaded(*args, **kwargs))
    assert all(map(torch.equal, found, wanted))
    report = loaded.report()
    assert (report.scheduled, report.calls) == (True, 2)
    assert [calls for reason, calls in report.stepped_aside if WORDS in reason] == [3]


def test_whoever_is_strict_is_told(model: TwoBranches) -> None:
    loaded = load(encode_bundle(two_branches_bundle(model)), model, strict=True)
    args, kwargs = two_branches_inputs(3)
    model.to("meta")
    with pytest.raises(AutoschedError, match=WORDS), torch.no_grad():
        loaded(*args, **kwargs)
