"""Several shapes in one bundle: each call runs the schedule of its shape, memory stays bounded, padding is right or refused."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from typing import Any

import pytest
import torch

from autosched.capture.export import capture
from autosched.core.errors import IncompatibleArtifact, InputMismatch, UsageError
from autosched.core.program import Many
from autosched.core.schedule import sequential
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.bundle.format import Bundle
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.load import FallbackWarning, LoadedModel, load
from autosched.runtime.numerics import compare
from autosched.runtime.prepared import Prepared
from autosched.runtime.trees import output_tensors
from tests.conformance.apply import Apply
from tests.conformance.bundles import evidence_for, shapes_of
from tests.conformance.graphs import Recorder, TwoBranches, two_branches_inputs
from tests.conformance.waiting import at_once


@pytest.fixture(scope="module")
def model() -> TwoBranches:
    return TwoBranches().eval()


@pytest.fixture(scope="module")
def data(model: TwoBranches) -> bytes:
    return encode_bundle(*shapes_of(model, 1, 4, 8))


def _agrees(loaded: LoadedModel, model: torch.nn.Module, rows: int, seed: int = 3) -> bool:
    args, kwargs = two_branches_inputs(seed, rows)
    with torch.no_grad():
        result, expected = loaded(*args, **kwargs), model(*args, **kwargs)
    return result.keys() == expected.keys() and compare(output_tensors(result), output_tensors(expected)).within_tolerance


def test_a_shape_that_is_refreshed_makes_no_room_meanwhile(model: TwoBranches, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(data, model, strict=True, max_shapes=1, prepare="first-use")
    assert _agrees(loaded, model, 4)
    refresh = Prepared.refresh
    closed: list[Prepared] = []

    def close(prepared: Prepared) -> None:
        closed.append(prepared)

    def meanwhile(prepared: Prepared) -> None:
        other = threading.Thread(target=_agrees, args=(loaded, model, 8))
        other.start()
        other.join()
        assert closed
        assert prepared not in closed
        refresh(prepared)

    monkeypatch.setattr(Prepared, "close", close)
    monkeypatch.setattr(Prepared, "refresh", meanwhile)
    loaded.refresh()
    assert loaded.report().ready == 1


@pytest.mark.parametrize("prepare", ["all", "first-use"])
def test_every_call_runs_the_schedule_of_its_shape(model: TwoBranches, data: bytes, prepare: Any) -> None:
    loaded = load(data, model, strict=True, prepare=prepare)
    assert loaded.report().ready == (3 if prepare == "all" else 0)
    for rows in (4, 1, 8, 4):
        assert _agrees(loaded, model, rows)
    report = loaded.report()
    assert [shape.calls for shape in report.shapes] == [1, 2, 1]
    assert report.calls == 4
    assert report.ready == 3
    assert report.shapes[1].shape == "[4, 8] float32, [4, 8] float32"
    assert all(shape.workspace_bytes > 0 for shape in report.shapes)
    assert report.shapes[2].workspace_bytes > report.shapes[0].workspace_bytes
    assert report.workspace_bytes == sum(shape.workspace_bytes for shape in report.shapes)
    assert loaded._table is not None
    loaded._table.slots[1].max_abs_error = 0.25
    assert loaded.report().max_abs_error == 0.25
    assert "3 shapes (3 ready)" in repr(loaded)


def test_a_shape_without_a_schedule_runs_the_model_with_one_warning_that_names_the_shapes(model: TwoBranches, data: bytes) -> None:
    loaded = load(data, model)
    with pytest.warns(FallbackWarning, match=r"\[3, 8\].*3 shapes: \[1, 8\] float32.*\[8, 8\] float32") as caught:
        assert all(_agrees(loaded, model, 3) for _ in range(3))
    assert len(caught) == 1
    assert [count for _, count in loaded.report().stepped_aside] == [3]
    strict = load(data, model, strict=True)
    with pytest.raises(InputMismatch, match="There are schedules for 3 shapes"):
        _agrees(strict, model, 3)


def test_the_one_used_longest_ago_makes_room(model: TwoBranches, data: bytes) -> None:
    loaded = load(data, model, strict=True, max_shapes=2)

    def ready() -> list[bool]:
        return [shape.ready for shape in loaded.report().shapes]

    assert ready() == [True, True, False]
    assert _agrees(loaded, model, 1)
    assert _agrees(loaded, model, 8)
    assert ready() == [True, False, True]
    assert _agrees(loaded, model, 4)
    assert ready() == [False, True, True]
    assert _agrees(loaded, model, 1)
    report = loaded.report()
    assert report.ready == 2
    assert report.evictions == 3
    assert report.calls == 4


def test_eviction_closes_what_it_drops_but_never_under_a_running_call(model: TwoBranches, data: bytes) -> None:
    loaded = load(data, model, strict=True, max_shapes=1, prepare="first-use")
    assert _agrees(loaded, model, 4)
    assert loaded._table is not None
    slot = loaded._table.slots[1]
    prepared = slot.prepared
    assert prepared is not None
    inside, go, closed = threading.Event(), threading.Event(), threading.Event()
    real = prepared.runner

    class Slow:
        def __call__(self, tensors: Any) -> list[torch.Tensor]:
            inside.set()
            assert go.wait(20)
            assert not closed.is_set()
            return real(tensors)

        def close(self) -> None:
            closed.set()

    prepared.runner = Slow()
    right: list[bool] = []
    thread = threading.Thread(target=lambda: right.append(_agrees(loaded, model, 4)))
    thread.start()
    assert inside.wait(20)
    # Another shape runs meanwhile; for as long as both are in use, both are in memory.
    assert _agrees(loaded, model, 1)
    assert not closed.is_set()
    assert slot.prepared is prepared
    go.set()
    thread.join(20)
    assert right == [True]
    assert _agrees(loaded, model, 8)
    assert closed.is_set()
    assert loaded.report().ready == 1


def test_many_threads_and_shapes_with_room_for_one(model: TwoBranches, data: bytes) -> None:
    loaded = load(data, model, strict=True, max_shapes=1, prepare="first-use")
    wrong: list[int] = []
    kept: list[tuple[Any, Any]] = []

    def work(seed: int) -> None:
        for step in range(6):
            rows = (1, 4, 8)[(seed + step) % 3]
            args, kwargs = two_branches_inputs(seed * 100 + step, rows)
            with torch.no_grad():
                result, expected = loaded(*args, **kwargs), model(*args, **kwargs)
            kept.append((result, expected))
            if not compare(output_tensors(result), output_tensors(expected)).within_tolerance:
                wrong.append(seed)

    at_once(work, range(4))
    assert not wrong
    # Later calls did not write into earlier answers.
    assert all(compare(output_tensors(result), output_tensors(expected)).within_tolerance for result, expected in kept)
    report = loaded.report()
    assert report.calls == 24
    assert report.ready == 1


def _wrong(bundle: Bundle) -> Bundle:
    """Sound, but of another computation: its program says times three where the model says times two."""
    prologue = tuple(
        dataclasses.replace(call, args=(call.args[0], 3.0)) if call.target == "aten::mul.Tensor" else call
        for call in bundle.program.prologue
    )
    wrong = dataclasses.replace(bundle.program, prologue=prologue)
    return make_bundle(wrong, bundle.schedule, bundle.evidence, bundle.literals, cpu_device_key(), software_key())


def test_one_shape_that_fails_leaves_the_others(model: TwoBranches) -> None:
    shapes = shapes_of(model, 1, 4)
    data = encode_bundle(shapes[0], _wrong(shapes[1]))
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        load(data, model, strict=True)
    with pytest.warns(FallbackWarning, match="one of 2 shapes"):
        loaded = load(data, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert _agrees(loaded, model, 1)
        assert _agrees(loaded, model, 4)
    report = loaded.report()
    assert report.scheduled
    assert [shape.calls for shape in report.shapes] == [1, 0]
    assert "outputs differ" in report.shapes[1].refused
    lazy = load(data, model, prepare="first-use")
    with pytest.warns(FallbackWarning, match="outputs differ"):
        assert _agrees(lazy, model, 4)
    assert _agrees(lazy, model, 1)


def test_a_shape_that_is_given_up_makes_nobody_room(model: TwoBranches) -> None:
    shapes = shapes_of(model, 1, 4, 8)
    loaded = load(encode_bundle(shapes[0], _wrong(shapes[1]), shapes[2]), model, max_shapes=2, prepare="first-use")
    with pytest.warns(FallbackWarning, match="outputs differ"):
        assert all(_agrees(loaded, model, rows) for rows in (1, 8, 4, 1, 4, 8, 4, 1))
    report = loaded.report()
    assert [shape.calls for shape in report.shapes] == [3, 0, 2]
    # For the one attempt.
    assert (report.ready, report.evictions) == (2, 1)


@pytest.mark.parametrize("prepare", ["all", "first-use"])
def test_padding_gives_the_models_answer_for_every_size(model: TwoBranches, data: bytes, prepare: Any) -> None:
    loaded = load(data, model, strict=True, pad=True, prepare=prepare)
    for rows in range(1, 9):
        args, kwargs = two_branches_inputs(rows, rows)
        result = loaded(*args, **kwargs)
        assert _agrees(loaded, model, rows)
        assert result["sum"].shape == (rows, 8)
        assert result["parts"][0].is_contiguous()
        result["sum"].add_(1.0)
    report = loaded.report()
    assert report.padding == "on"
    assert [shape.calls for shape in report.shapes] == [2, 6, 8]
    with pytest.raises(InputMismatch, match="9 is larger than the largest size, 8"):
        _agrees(loaded, model, 9)


def test_padding_needs_two_shapes(model: TwoBranches) -> None:
    data = encode_bundle(*shapes_of(model, 4))
    with pytest.raises(IncompatibleArtifact, match="two or more"):
        load(data, model, strict=True, pad=True)
    with pytest.warns(FallbackWarning, match="two or more"):
        loaded = load(data, model, pad=True)
    assert _agrees(loaded, model, 4)


class _Centred(torch.nn.Module):
    """Subtracts the mean of the batch: every row depends on every other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def _centred_bundle(rows: int) -> Bundle:
    recorder = Recorder()
    x = recorder.input(torch.randn(rows, 5))
    out = recorder.run("aten::sub.Tensor", x, recorder.run("aten::mean.dim", x, Many((0,))))
    program = recorder.build([out], result=out)
    device = cpu_device_key()
    evidence = evidence_for(len(program.graph), device, program.graph.hash)
    return make_bundle(program, sequential(program.graph), evidence, {}, device, software_key())


def test_padding_is_refused_where_added_rows_change_the_others() -> None:
    data = encode_bundle(_centred_bundle(2), _centred_bundle(6))
    model = _Centred().eval()
    with pytest.raises(IncompatibleArtifact, match="rows that are added change the others"):
        load(data, model, strict=True, pad=True)
    with pytest.warns(FallbackWarning, match="rows that are added"):
        loaded = load(data, model, pad=True)
    x = torch.randn(4, 5)
    with pytest.warns(FallbackWarning, match="Padding does not help"):
        assert torch.equal(loaded(x), model(x))
    assert loaded(torch.randn(6, 5)).shape == (6, 5)
    report = loaded.report()
    assert report.calls == 1
    assert "rows that are added" in report.padding
    # Found out only at the call that needs it: that call, too, gets the model's answer.
    lazy = load(data, model, pad=True, prepare="first-use")
    with pytest.warns(FallbackWarning, match="rows that are added"):
        assert torch.equal(lazy(x), model(x))


def test_rows_with_nothing_to_see_are_no_reason_against_padding() -> None:
    # A random mask hides all there is from some row, of which one kernel makes NaN and another zero.
    model = Apply(lambda m, x, hidden: x.masked_fill(hidden, float("-inf")).softmax(-1)).eval()
    other = Apply(lambda m, x, hidden: x.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num()).eval()
    bundles: list[Bundle] = []
    for rows in (2, 6):
        captured = capture(other, (torch.randn(rows, 2), torch.tensor([[False, True]] * rows)))
        device = cpu_device_key()
        graph = captured.program.graph
        evidence = evidence_for(len(graph), device, graph.hash)
        literals = {item.name: captured.constants[item.value] for item in captured.program.bindings}
        bundles.append(make_bundle(captured.program, sequential(graph), evidence, literals, device, software_key()))
    loaded = load(encode_bundle(*bundles), model, strict=True, pad=True)
    x, hidden = torch.randn(4, 2), torch.tensor([[False, True]] * 4)
    assert torch.equal(loaded(x, hidden), model(x, hidden))
    assert loaded.report().padding == "on"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_shapes", 0),
        ("max_shapes", "3"),
        ("max_shapes", True),
        ("prepare", "never"),
        ("strict", "no"),
        ("pad", None),
        ("frozen", "false"),
        ("in_place", 0),
    ],
)
def test_options_that_are_something_else_are_usage_errors(model: TwoBranches, data: bytes, option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{option} is {value!r}; expected"):
        load(data, model, **{option: value})


def test_weights_are_followed_for_every_shape(data: bytes) -> None:
    model = TwoBranches().eval()
    loaded = load(data, model, strict=True)
    assert all(_agrees(loaded, model, rows) for rows in (1, 4, 8))
    model.load_state_dict(TwoBranches(seed=9).state_dict())
    assert all(_agrees(loaded, model, rows) for rows in (1, 4, 8))
    model.right.weight = torch.nn.Parameter(torch.randn(8, 8))
    assert all(_agrees(loaded, model, rows) for rows in (1, 4, 8))
    loaded.refresh()
    assert loaded.report().calls == 9


def test_changes_seen_after_the_launch_are_never_answered_stale(data: bytes) -> None:
    model = TwoBranches().eval()
    loaded = load(data, model)
    assert loaded._table is not None
    for slot in loaded._table.slots:
        assert slot.prepared is not None
        slot.prepared.late_watch = True  # as on a GPU
    assert _agrees(loaded, model, 4)
    with torch.no_grad():
        model.right.weight.mul_(3.0)  # folded ahead of time
    assert _agrees(loaded, model, 4)
    model.left.weight = torch.nn.Parameter(torch.randn(8, 8))
    assert _agrees(loaded, model, 4)
    model.offset.data = torch.randn(8)
    assert _agrees(loaded, model, 4)
    model.left.train()
    with pytest.warns(FallbackWarning, match=r"model\.eval"):
        assert _agrees(loaded, model, 4)
    model.eval()
    assert _agrees(loaded, model, 4)
    assert loaded.report().calls == 5
