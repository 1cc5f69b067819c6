"""A model that changes its buffers or inputs, on a recorded graph: the caller's and the model's own tensors are changed, not copies."""

from __future__ import annotations

from typing import Any

import pytest

from autosched.capture.export import capture
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.cuda_key import cuda_device_key, cuda_software_key
from autosched.runtime.load import load
from tests.conformance.bundles import evidence_for
from tests.conformance.stateful import STATEFUL, Stateful, assert_like_eager, example, made

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.gpu_only(reason="it loads a file on the device")]


def reset(model: Any, number: int) -> None:
    if number == 3:
        for buffer in model.buffers():
            buffer.zero_()


@pytest.mark.parametrize("kind", STATEFUL)
def test_calls_in_a_row_are_those_of_the_model(kind: type[Stateful]) -> None:
    model = made(kind).cuda()
    captured = capture(model, (example().cuda(),))
    graph, device = captured.program.graph, cuda_device_key(0)
    literals = {item.name: captured.constants[item.value].cpu() for item in captured.program.bindings if item.source.value == "literal"}
    evidence = evidence_for(len(graph), device, graph.hash)
    bundle = make_bundle(captured.program, sequential(graph), evidence, literals, device, cuda_software_key(0))
    loaded = load(encode_bundle(bundle), model, strict=True)
    assert_like_eager(loaded, model, [(example().cuda(),) for _ in range(5)], reset)
    assert loaded.report().calls == 5
