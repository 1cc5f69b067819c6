"""A model that changes its buffers or inputs, on a recorded graph: the caller's and the model's own tensors are changed, not copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autosched.core.schedule import sequential
from autosched.core.variants import Lowering
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.cuda.in_place import InPlaceRunner
from autosched.runtime.cuda.key import cuda_device_key, cuda_software_key
from autosched.runtime.load import load
from tests.conformance.bundles import evidence_for
from tests.conformance.stateful import SIZE, STATEFUL, KeyValueCache, LongCache, Stateful, assert_like_eager, captured_in, example, made

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.gpu_only(reason="it loads a file on the device")]


def reset(model: Any, number: int) -> None:
    if number == 3:
        for buffer in model.buffers():
            buffer.zero_()


def loaded_on_the_device(model: Any, args: tuple[torch.Tensor, ...], lowering: Lowering = Lowering.REWRITTEN, **options: Any) -> Any:
    captured = captured_in(lowering, model, args)
    graph, device = captured.program.graph, cuda_device_key(0)
    literals = {item.name: captured.constants[item.value].cpu() for item in captured.program.bindings if item.source.value == "literal"}
    evidence = evidence_for(len(graph), device, graph.hash)
    bundle = make_bundle(captured.program, sequential(graph), evidence, literals, device, cuda_software_key(0))
    return load(encode_bundle(bundle), model, strict=True, **options)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", STATEFUL)
def test_calls_in_a_row_are_those_of_the_model(kind: type[Stateful], in_place: bool) -> None:
    model = made(kind).cuda()
    loaded = loaded_on_the_device(model, (example().cuda(),), in_place=in_place)
    assert_like_eager(loaded, model, [(example().cuda(),) for _ in range(5)], reset)
    assert loaded.report().calls == 5


@pytest.mark.parametrize("lowering", [Lowering.REWRITTEN, Lowering.INDUCTOR])
def test_a_cache_is_recorded_where_it_lies_and_neither_copied_in_nor_back(lowering: Lowering) -> None:
    model = made(KeyValueCache).cuda()
    loaded = loaded_on_the_device(model, (example().cuda(),), lowering)
    runner = loaded._table.slots[0].prepared.runner
    assert isinstance(runner, InPlaceRunner)
    before = runner.recorded
    versions = [buffer._version for buffer in (model.keys, model.values, model.count)]

    def moved(changed: Any, number: int) -> None:
        if number == 4:
            # Another tensor in its place, and back on copies for a call.
            changed.keys = torch.zeros_like(changed.keys)

    assert_like_eager(loaded, model, [(example().cuda(),) for _ in range(8)], moved)
    assert runner.recorded >= before + 2
    # Autograd's guard against changed tensors sees what a graph has written.
    assert all(buffer._version > old for buffer, old in zip((model.values, model.count), versions[1:], strict=True))
    assert loaded.report().shapes[0].copied_back_bytes == 0


def test_the_memory_of_copies_is_given_back_where_nobody_needs_them() -> None:
    # So long that the size of the caches shows.
    long = partial(LongCache, 2**16)
    model = made(long).cuda()
    loaded = loaded_on_the_device(model, (example().cuda(),))
    eager, x = made(long).cuda(), example().cuda()
    caches = sum(buffer.nbytes for buffer in (model.keys, model.values))
    held = []
    with torch.no_grad():
        for number in range(130):
            torch.testing.assert_close(loaded(x), eager(x))
            if number in (10, 129):
                held.append(torch.cuda.memory_allocated())
        assert held[0] - held[1] >= caches
        # Another tensor in a buffer's place is copied once more.
        for changed in (model, eager):
            changed.keys = torch.ones_like(changed.keys)
        for _ in range(3):
            torch.testing.assert_close(loaded(x), eager(x))
            torch.testing.assert_close(model.keys, eager.keys)


def test_caches_that_are_given_in_turn_are_each_changed_where_they_lie() -> None:
    class Given(Stateful):
        def forward(self, x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache.index_copy_(0, place, self.layer(x[:1]))
            return torch.softmax(x @ cache.t(), 1) @ cache, cache

    model = made(Given).cuda()
    place = torch.tensor([3], device="cuda")
    loaded = loaded_on_the_device(model, (example().cuda(), torch.zeros(16, SIZE, device="cuda"), place))
    mine = [torch.zeros(16, SIZE, device="cuda") for _ in range(2)]
    theirs = [cache.clone() for cache in mine]
    with torch.no_grad():
        for number in range(12):
            which = number // 3 % 2
            x, place = example().cuda(), torch.tensor([number], device="cuda")
            answer, expected = loaded(x, mine[which], place), model(x, theirs[which], place)
            assert answer[1] is mine[which]
            torch.testing.assert_close(answer[0], expected[0])
            torch.testing.assert_close(mine[which], theirs[which])
    assert loaded.report().calls == 12
