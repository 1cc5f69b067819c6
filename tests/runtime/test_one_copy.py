"""What several schedules pack alike is in memory once, and nothing else is ever shared."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from autosched.capture.export import Captured, capture
from autosched.core.extents import storage_of
from autosched.core.program import ConstantSource
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime import one_copy as module
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.kernels import bind, random_inputs
from autosched.runtime.load import load
from autosched.runtime.numerics import compare
from autosched.runtime.one_copy import one_copy
from tests.conformance.bundles import evidence_for

MKLDNN: Any = torch.ops.mkldnn


def _made(seed: int = 1, count: int = 4096) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def manner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares where the memory is read by its address, and by operators."""
    if request.param == "as on a GPU":
        monkeypatch.setattr(module, "_on_host", lambda tensor: False)
        monkeypatch.setattr(module, "_PIECE_BYTES", 4096)


@pytest.mark.usefixtures("manner")
def test_equal_tensors_become_one() -> None:
    first = one_copy(_made(), ())
    assert one_copy(_made(), ()) is first
    assert one_copy(_made(2), ()) is not first


@pytest.mark.usefixtures("manner")
@pytest.mark.parametrize("count", [4096, 4097, 5000])
def test_memory_of_any_size_is_compared_to_its_end(count: int) -> None:
    first = one_copy(_made(9, count).to(torch.float16), ())
    assert one_copy(_made(9, count).to(torch.float16), ()) is first
    for place in (1, count // 2 + 1, count - 1):
        other = _made(9, count).to(torch.float16)
        other[place] += 1
        assert one_copy(other, ()) is other
        first = one_copy(_made(9, count).to(torch.float16), ())


@pytest.mark.usefixtures("manner")
@pytest.mark.parametrize(
    "other",
    [
        lambda made: made.view(64, 64),
        lambda made: made.view(torch.int32),
        lambda made: torch.cat([made, made[:1]]),
        lambda made: made.clone().view(64, 64).t(),
        lambda made: torch.cat([made[:-1], -made[-1:]]),
    ],
    ids=["shape", "dtype", "longer", "strides", "one number"],
)
def test_what_differs_in_anything_stays_apart(other: Any) -> None:
    first = one_copy(_made(3), ())
    theirs = other(_made(3))
    assert one_copy(theirs, ()) is theirs
    assert theirs is not first


@pytest.mark.usefixtures("manner")
def test_bits_decide_and_not_values() -> None:
    zeros, negative = torch.zeros(4096), -torch.zeros(4096)
    first = one_copy(zeros, ())
    assert one_copy(negative, ()) is negative
    assert one_copy(torch.zeros(4096), ()) is first
    unknown = one_copy(torch.full((4096,), float("nan")), ())
    assert one_copy(torch.full((4096,), float("nan")), ()) is unknown


@pytest.mark.usefixtures("manner")
def test_views_and_what_was_given_stay_what_they_are() -> None:
    first, weight = one_copy(_made(5), ()), _made(5)
    turned = weight.view(4096)
    assert one_copy(turned, {storage_of(weight)}) is turned
    part = _made(5, 8192)[:4096].copy_(first)
    assert one_copy(part, ()) is part
    small = _made(5, 8)
    assert one_copy(small, ()) is small
    assert one_copy(_made(5, 8), ()) is not small


@pytest.mark.usefixtures("manner")
def test_nothing_is_held_for_those_who_have_gone() -> None:
    first = one_copy(_made(6), ())
    held = weakref.ref(first)
    del first
    gc.collect()
    assert held() is None
    theirs = _made(6)
    assert one_copy(theirs, ()) is theirs


def test_packed_weights_are_one_where_their_layout_is() -> None:
    weight = torch.randn(96, 64)
    packed = {rows: MKLDNN._reorder_linear_weight(weight, rows) for rows in (1, 8, 64)}
    layouts = {rows: bytes(MKLDNN._get_mkldnn_serialized_md(item).tolist()) for rows, item in packed.items()}
    kept = {rows: one_copy(item, ()) for rows, item in packed.items()}
    for one in packed:
        for other in packed:
            assert (kept[one] is kept[other]) == (layouts[one] == layouts[other])
    others = MKLDNN._reorder_linear_weight(weight + 1, 8)
    assert one_copy(others, ()) is others


class Mixed(nn.Module):
    """A convolution with a batch norm to fold, and a linear layer that is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.dense = nn.Linear(32, 512)
        self.last = nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dense(self.norm(self.conv(x)).relu().mean((2, 3))).relu())


@pytest.fixture
def model() -> Mixed:
    torch.manual_seed(7)
    return Mixed().eval()


def _captured(model: nn.Module, rows: int) -> Captured:
    return capture(model, (torch.randn(rows, 16, 8, 8),), rewrite=True)


def _kept(captured: Captured) -> dict[int, torch.Tensor]:
    """What binding has computed ahead, by address of its memory."""
    bound = bind(captured.program, captured.constants, "cpu")
    given = {storage_of(tensor) for tensor in captured.constants.values()}
    made = (item for item in bound.constants if isinstance(item, torch.Tensor) and storage_of(item) not in given)
    return {MKLDNN.data_ptr(item) if item.layout is not torch.strided else item.data_ptr(): item for item in made}


def test_schedules_of_several_shapes_have_one_copy_of_what_they_pack_alike(model: Mixed) -> None:
    few, many = _captured(model, 32), _captured(model, 64)
    first, second = _kept(few), _kept(many)
    shared = first.keys() & second.keys()
    assert shared, "oneDNN packs for 32 rows as for 64"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    # New weights: the old packed ones are as they were, and the new ones are computed from what is there now.
    again = _kept(few)
    assert not again.keys() & first.keys()
    inputs = random_inputs(few.program, 3)
    with torch.no_grad():
        expected = model(*inputs)
    assert compare(bind(few.program, few.constants, "cpu").run(inputs), [expected]).within_tolerance


def test_another_model_of_the_same_kind_shares_nothing(model: Mixed) -> None:
    torch.manual_seed(8)
    other = Mixed().eval()
    first, second = _kept(_captured(model, 32)), _kept(_captured(other, 32))
    assert not first.keys() & second.keys()


class ReturnsFolded(nn.Module):
    """Answers with something computed from its weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        folded = self.table * 2.0
        return x + folded, folded


def test_what_is_answered_with_is_nobody_elses() -> None:
    model = ReturnsFolded().eval()
    captured = capture(model, (torch.randn(64, 64),), rewrite=True)
    one, other = (bind(captured.program, captured.constants, "cpu") for _ in range(2))
    inputs = random_inputs(captured.program, 1)
    answers = [bound.run(inputs)[1] for bound in (one, other)]
    assert answers[0].data_ptr() != answers[1].data_ptr()


def test_the_report_counts_shared_memory_once(model: Mixed) -> None:
    device, software = cpu_device_key(), software_key()
    bundles = []
    for rows in (32, 64):
        captured = _captured(model, rows)
        graph, program = captured.program.graph, captured.program
        literals = {item.name: captured.constants[item.value] for item in program.bindings if item.source is ConstantSource.LITERAL}
        bundles.append(make_bundle(program, sequential(graph), evidence_for(len(graph), device, graph.hash), literals, device, software))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(encode_bundle(*bundles), model, strict=True)
    report = loaded.report()
    assert report.shared_bytes > 0
    assert report.workspace_bytes == sum(shape.workspace_bytes for shape in report.shapes) - report.shared_bytes
    assert report.workspace_bytes > max(shape.workspace_bytes for shape in report.shapes)
    for rows in (32, 64):
        x = torch.randn(rows, 16, 8, 8)
        with torch.no_grad():
            assert compare([loaded(x)], [model(x)]).within_tolerance
