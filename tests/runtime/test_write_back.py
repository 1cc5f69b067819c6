"""A loaded model that changes its buffers or inputs does, call by call, what the model itself does; on any doubt the model runs, once."""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example as case
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autosched
from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, InvalidGraph
from autosched.core.program import Binding, ConstantSource, Program, WriteBack
from autosched.core.schedule import sequential
from autosched.core.variants import Lowering
from autosched.export.bundle import encode_bundle, make_bundle
from autosched.runtime.bundle.program_check import check_program
from autosched.runtime.guard import FallbackWarning, LoadedModel
from autosched.runtime.load import load
from autosched.runtime.state import Kept, ask
from tests.conformance.stateful import (
    SIZE,
    STATEFUL,
    ChangesItsInput,
    KeyValueCache,
    ReadBeforeAndAfter,
    Recurrent,
    Remembers,
    ReturnsItsMemory,
    Stateful,
    assert_like_eager,
    bundle_bytes,
    bundled,
    example,
    made,
)


def calls(count: int = 5) -> list[tuple[torch.Tensor]]:
    return [(example(),) for _ in range(count)]


def sort_of_reset(model: Stateful, number: int) -> None:
    """State that the user sets between calls, in place and by another tensor."""
    if number == 3:
        model.reset()


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
@pytest.mark.parametrize("kind", STATEFUL)
def test_calls_in_a_row_are_those_of_the_model(kind: type[Stateful], lowering: Lowering) -> None:
    model = made(kind)
    before = copy.deepcopy(model.state_dict())
    loaded = load(bundle_bytes(model, (example(),), lowering), model, strict=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert_like_eager(loaded, model, calls(), sort_of_reset)
    assert loaded.report().calls == 5
    assert loaded.report().stepped_aside == ()


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.FUSED])
def test_what_a_buffer_was_before_it_was_replaced_is_returned_as_it_was(lowering: Lowering) -> None:
    # Of the model itself, not of a part: export writes those back by itself.
    class Previous(Remembers):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            memory = self.memory
            step, before, after = super().forward(x)
            return step, before, after, memory[1:].t()

    model = made(Previous)
    loaded = load(bundle_bytes(model, (example(),), lowering), model, strict=True)
    assert_like_eager(loaded, model, calls(), sort_of_reset)
    assert loaded.report().calls == 5


class ReturnsTwice(Stateful):
    """Returns what it changes as itself and as another tensor of the same memory."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        self.memory.add_(x)
        return x, x.detach(), self.memory.view_as(x), self.memory


def test_what_is_changed_may_be_returned_as_itself_and_as_another_tensor() -> None:
    model = made(ReturnsTwice)
    assert_like_eager(load(bundle_bytes(model, (example(),)), model, strict=True), model, calls())


class Copies(Stateful):
    """Copies other dtypes, fewer numbers and one number into the whole of its buffers, and reads what is then there."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.memory.copy_(x.double() / 3)
        self.hidden[:] = x[0]
        rows = self.hidden.view(-1) * 2
        self.hidden.copy_(7)
        self.count.copy_(x.sum() * 8)
        return self.memory * 2, rows, self.hidden, self.count + 1


@pytest.mark.parametrize("lowering", [Lowering.ATEN, Lowering.REWRITTEN, Lowering.FUSED])
def test_what_is_copied_into_a_whole_buffer_has_its_dtype_and_shape(lowering: Lowering) -> None:
    model = made(Copies)
    assert_like_eager(load(bundle_bytes(model, (example(),), lowering), model, strict=True), model, calls())


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_model_that_is_vouched_for_keeps_its_state_all_the_same(kind: type[Stateful]) -> None:
    model = made(kind)
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True, frozen=True)
    assert_like_eager(loaded, model, calls(), sort_of_reset)


@pytest.mark.parametrize("kind", [ReturnsItsMemory, Recurrent])
def test_calls_in_inference_mode(kind: type[Stateful]) -> None:
    model = made(kind)
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True)
    with torch.inference_mode():
        assert_like_eager(loaded, model, calls(), sort_of_reset)


@pytest.mark.parametrize("kind", [KeyValueCache, ReadBeforeAndAfter])
def test_what_a_call_in_inference_mode_has_bound_serves_calls_outside_of_it(kind: type[Stateful]) -> None:
    model = made(kind)
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True, prepare="first-use")

    def in_inference_mode(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            return loaded(x)

    def other_weights(changed: Stateful, number: int) -> None:
        with torch.no_grad():
            changed.layer.weight.mul_(0.5) if number == 1 else None

    in_inference_mode(example())
    assert_like_eager(loaded, model, calls(2))
    assert_like_eager(in_inference_mode, model, calls(2), other_weights)
    assert_like_eager(loaded, model, calls(2))


def test_its_own_writes_are_no_change_of_the_model_and_a_strangers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from autosched.runtime.prepared import Prepared

    rebound: list[bool] = []
    rebind = Prepared._rebind
    monkeypatch.setattr(Prepared, "_rebind", lambda self, *, verify: (rebound.append(verify), rebind(self, verify=verify))[1])
    model = made(ReadBeforeAndAfter)
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True)
    assert_like_eager(loaded, model, calls(3))
    assert rebound == []

    def other_weights(changed: Stateful, number: int) -> None:
        with torch.no_grad():
            changed.layer.weight.mul_(0.5) if number == 1 else None

    assert_like_eager(loaded, model, calls(3), other_weights)
    assert loaded.report().stepped_aside == ()


def test_a_module_with_another_state_is_read_anew() -> None:
    class Outer(Stateful):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Recurrent()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x)
            return result

    model = made(Outer)
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True)
    assert_like_eager(loaded, model, calls(2))
    model.inner = made(Recurrent, seed=7)  # type: ignore[assignment]
    assert_like_eager(loaded, model, calls(3))
    assert loaded.report().calls == 5


def test_a_state_that_no_longer_fits_runs_the_model_once_and_a_later_one_the_schedule() -> None:
    class AnyRows(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.hidden = self.hidden * 0.5 + x.sum()
            return self.hidden.sum() * self.count

    model = made(AnyRows)
    loaded = load(bundle_bytes(model, (example(),)), model)

    def other_rows(changed: Stateful, number: int) -> None:
        if number in (1, 2):
            changed.hidden = torch.zeros(2 if number == 1 else 4, SIZE)

    with pytest.warns(FallbackWarning, match=r"its 'hidden' is \[2, 8\] .* now; the schedule was made for \[4, 8\]"):
        assert_like_eager(loaded, model, calls(3), other_rows)
    assert loaded.report().calls == 2


def test_an_input_that_shares_memory_with_what_is_changed_runs_the_model() -> None:
    class Adds(Stateful):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * y

    model = made(Adds)
    loaded = load(bundle_bytes(model, (torch.randn(3), torch.randn(3))), model)
    x = torch.arange(6.0)
    assert loaded(x[:3], x[3:]).tolist() == [3.0, 8.0, 15.0]
    assert loaded.report().calls == 1
    with pytest.warns(FallbackWarning, match="shares memory with something else that it is given"):
        assert loaded(x[:3], x[:3]).tolist() == [4.0, 9.0, 16.0]
    assert x.tolist() == [2.0, 3.0, 4.0, 3.0, 4.0, 5.0]
    assert loaded.report().calls == 1


class ChangesTwoOfThree(Stateful):
    """Changes its second and third inputs, and reads the first."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y.add_(x.clone())  # PyTorch itself refuses parts that overlap
        z.mul_(2)
        return x + y * z


@pytest.fixture(scope="module")
def two_of_three() -> LoadedModel:
    model = made(ChangesTwoOfThree)
    loaded: LoadedModel = load(bundle_bytes(model, tuple(torch.randn(3) for _ in range(3))), model)
    return loaded


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6))
@case([(0, 3, 6), (9, 3, 6), (4, 3, 6), (0, 3, 6), (0, 3, 4), (0, 6, 3)])
def test_calls_on_parts_of_one_memory_give_what_the_model_gives(two_of_three: LoadedModel, calls: list[tuple[int, ...]]) -> None:
    mine = torch.arange(12.0)
    theirs = mine.clone()
    model = made(ChangesTwoOfThree)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for starts in calls:
            before = two_of_three.report().calls
            answer = two_of_three(*(mine[start : start + 3] for start in starts))
            assert torch.equal(answer, model(*(theirs[start : start + 3] for start in starts)))
            assert torch.equal(mine, theirs)
            x, y, z = starts
            assert (two_of_three.report().calls > before) == (min(abs(x - y), abs(x - z), abs(y - z)) >= 3)


def test_the_models_own_memory_as_an_input_runs_the_model() -> None:
    model = made(ReadBeforeAndAfter)
    loaded = load(bundle_bytes(model, (example(),)), model)
    eager = copy.deepcopy(model)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="shares memory"):
        torch.testing.assert_close(loaded(model.memory), eager(eager.memory))
    assert torch.equal(model.memory, eager.memory)
    assert loaded.report().calls == 0


class ChangesAllButItsSecond(Stateful):
    """Reads its second input when it has changed its first and a buffer."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        self.memory.mul_(2).add_(1)
        return y * 2


@pytest.mark.parametrize("prepare", ["all", "first-use"])
def test_memory_that_is_changed_is_not_hidden_by_a_copy_into_the_layout_of_tuning(prepare: Any) -> None:
    model = made(ChangesAllButItsSecond)
    eager = copy.deepcopy(model)
    loaded = load(bundle_bytes(model, (torch.randn(4, 4), torch.randn(4, 4))), model, prepare=prepare)
    mine = torch.randn(4, 4)
    theirs = mine.clone()
    with torch.no_grad():
        with pytest.warns(FallbackWarning, match="input 1 shares memory with what is changed in place and its memory layout"):
            answer = loaded(mine, mine.t())
        assert torch.equal(answer, eager(theirs, theirs.t()))
        assert torch.equal(loaded(mine, model.memory[:, 2:6]), eager(theirs, eager.memory[:, 2:6]))
        assert loaded.report().calls == 0
        # A copy of what nothing changes does no harm.
        assert torch.equal(loaded(mine, theirs.t()), eager(theirs.clone(), theirs.t()))
    assert loaded.report().calls == 1


def test_an_input_laid_out_otherwise_runs_the_model_on_the_callers_own_tensor() -> None:
    model = made(ChangesItsInput)
    loaded = load(bundle_bytes(model, (example(),)), model)
    eager = copy.deepcopy(model)
    mine = torch.randn(SIZE, 4).t()
    theirs = mine.clone(memory_format=torch.preserve_format)
    with torch.no_grad(), pytest.warns(FallbackWarning, match="memory layout"):
        torch.testing.assert_close(loaded(mine), eager(theirs))
    torch.testing.assert_close(mine, theirs)


def test_a_schedule_that_fails_has_changed_nothing_and_the_model_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(ReadBeforeAndAfter)
    loaded = load(bundle_bytes(model, (example(),)), model)
    prepared = loaded._table.slots[0].prepared  # type: ignore[union-attr]

    def fails(tensors: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(prepared, "runner", fails)
    with pytest.warns(FallbackWarning, match="an operator failed"):
        loaded(example())
    assert int(model.count) == 1


def test_calls_of_many_threads_are_each_counted_once() -> None:
    class Both(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.layer(x) * self.count

    model = made(Both)
    small, large = torch.randn(2, SIZE), torch.randn(3, SIZE)
    data = encode_bundle(bundled(model, (small,))[1], bundled(model, (large,))[1])
    loaded = load(data, model, strict=True)

    def serve(x: torch.Tensor) -> None:
        with torch.no_grad():
            for _ in range(50):
                loaded(x)

    threads = [threading.Thread(target=serve, args=(x,)) for x in (small, large, small, large)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(model.count) == 200
    assert loaded.report().calls == 200


def test_shapes_with_a_state_are_not_padded() -> None:
    class Counts(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.layer(x)

    model = made(Counts)
    data = encode_bundle(*(bundled(model, (torch.randn(rows, SIZE),))[1] for rows in (2, 4)))
    with pytest.raises(IncompatibleArtifact, match="the model changes a buffer or an input"):
        load(data, model, strict=True, pad=True)


def test_a_model_that_changes_another_buffer_than_the_bundle_says_is_refused() -> None:
    class Other(ReadBeforeAndAfter):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            answer = super().forward(x)
            self.count += 1
            return answer

    data = bundle_bytes(made(ReadBeforeAndAfter), (example(),))
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        load(data, made(Other), strict=True)


def test_a_model_that_changes_a_buffer_unseen_is_refused() -> None:
    class Seen(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

    class Unseen(Seen):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            answer = super().forward(x)
            self.memory.add_(1)
            return answer

    with pytest.raises(IncompatibleArtifact, match="changes its buffer memory at each call"):
        load(bundle_bytes(made(Seen), (example(),)), made(Unseen), strict=True)


def test_a_table_that_is_made_at_the_first_call_is_no_state() -> None:
    class Plain(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

    class Lazy(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not bool(self.memory.any()):
                self.memory.fill_(1)
            return super().forward(x)

    model = made(Lazy)
    loaded = load(bundle_bytes(made(Plain), (example(),)), model, strict=True)
    assert_like_eager(loaded, model, calls(2))


def test_what_a_part_keeps_of_its_input_is_a_copy() -> None:
    class Keeps(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            step = x - self.memory
            self.memory = x
            return step

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Keeps()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) * 2
            return result

    model = Outer().eval()
    loaded = load(bundle_bytes(model, (example(),)), model, strict=True)
    first, second = example(), example()
    torch.testing.assert_close(loaded(first), first * 2)
    kept = first.clone()
    first.zero_()
    torch.testing.assert_close(loaded(second), (second - kept) * 2)
    assert torch.equal(model.inner.memory, second)


def test_a_bundle_that_writes_to_what_the_model_leaves_alone_is_refused() -> None:
    class Doubles(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory.add_(x)
            return self.layer(x)

    class Pure(Doubles):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    model = made(Pure)
    with pytest.raises(IncompatibleArtifact, match="outputs differ from the model's"):
        load(bundle_bytes(made(Doubles), (example(),)), model, strict=True)
    assert not model.memory.any()


def forged(program: Program, **changes: Any) -> Program:
    return dataclasses.replace(program, **changes)


@pytest.mark.parametrize(
    ("forge", "says"),
    [
        (lambda p: forged(p, state=()), "does not fill exactly the graph's inputs"),
        (lambda p: forged(p, state=p.state[::-1]), "not the graph's last inputs"),
        (lambda p: forged(p, state=tuple(dataclasses.replace(b, name="memory") for b in p.state)), "read by another name"),
        (lambda p: forged(p, state=(*p.state[:-1], Binding(p.state[-1].value, ConstantSource.LITERAL, "x"))), "program's own"),
        (lambda p: forged(p, state=(*p.state[:-1], dataclasses.replace(p.state[-1], name="layer.bias"))), "read by another name"),
        (lambda p: forged(p, writes=p.writes[:1]), "that nothing changes"),
        (lambda p: forged(p, writes=(*p.writes, p.writes[0])), "written back twice"),
        (lambda p: forged(p, writes=(*p.writes[:-1], WriteBack(p.graph.outputs[0], p.writes[-1].value))), "is no input"),
        (lambda p: forged(p, writes=(*p.writes[:-1], WriteBack(p.writes[-1].target, p.given[0]))), "no output of the graph"),
        (lambda p: forged(p, writes=(*p.writes[:-1], WriteBack(p.writes[-1].target, 10**6))), "a write names value"),
        (
            lambda p: forged(p, writes=tuple(WriteBack(p.writes[i].target, p.writes[1 - i].value) for i in (0, 1))),
            "another shape or dtype",
        ),
    ],
)
def test_a_program_with_bad_write_backs_is_refused(forge: Any, says: str) -> None:
    program = bundled(made(ReadBeforeAndAfter), (example(),))[1].program
    check_program(program)
    assert len(program.state) == len(program.writes) == 2
    with pytest.raises(InvalidGraph, match=says):
        check_program(forge(program))


def test_a_bundle_with_bad_write_backs_is_corrupt() -> None:
    bundle = bundled(made(ReadBeforeAndAfter), (example(),))[1]
    program = forged(bundle.program, writes=bundle.program.writes[:1])
    with pytest.raises(ArtifactCorrupt, match="nothing changes"):
        autosched.load(
            encode_bundle(make_bundle(program, sequential(program.graph), bundle.evidence, {}, bundle.key.device, bundle.key.software)),
            made(ReadBeforeAndAfter),
            strict=True,
        )


def test_asking_a_model_leaves_no_trace() -> None:
    model = made(ReturnsItsMemory)
    program = bundled(model, (example(),))[1].program
    before, held = copy.deepcopy(model.state_dict()), model.hidden
    inputs = [torch.randn(4, SIZE) for _ in program.graph.inputs]
    copies = [tensor.clone() for tensor in inputs]
    answer, written, asked = ask(program, model, inputs)
    assert model.hidden is held
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, other) for tensor, other in zip(inputs, copies, strict=True))
    names = [binding.name for binding in program.state]
    assert asked.replaced == tuple(name == "hidden" for name in names)
    torch.testing.assert_close(answer["whole"], written[names.index("memory")])
    shares = dict(zip(answer, asked.shares, strict=True))
    assert shares["whole"] is not None
    assert shares["whole"].whole
    assert shares["row"] is not None
    assert (shares["row"].offset, shares["row"].size) == (SIZE, (SIZE,))
    assert [name for name, share in shares.items() if share is None] == ["old", "copy", "apart"]


def test_what_a_call_changes_can_be_given_back() -> None:
    model = made(KeyValueCache)
    x = example()
    kept = Kept.by(bundled(model, (x,))[1].program, model, (x,), None)
    before = copy.deepcopy(model.state_dict())
    assert not kept.changed()
    model(x)
    assert kept.changed()
    kept.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_nothing_is_said_of_a_model_whose_state_is_kept() -> None:
    model = made(Recurrent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(bundle_bytes(model, (example(),)), model)
        loaded(example())
    assert loaded.report().scheduled


class Listens(Recurrent):
    """Waits in the call that a thread of this name makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = super().forward(x)
        if threading.current_thread().name == "compares":
            self.inside.set()
            assert self.go.wait(60)
        return answer


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_a_call_that_runs_the_model_waits_while_another_thread_has_other_numbers_in_its_state() -> None:
    model = made(Listens)
    assert isinstance(model, Listens)
    data = bundle_bytes(model, (example(),))
    loaded, eager = load(data, model), made(Recurrent)
    newer = threading.Thread(target=load, args=(data, model), name="compares")
    answers: list[torch.Tensor] = []
    x = torch.randn(1, SIZE)  # of another shape than the schedule
    caller = threading.Thread(target=lambda: answers.append(loaded(x)))
    newer.start()
    assert model.inside.wait(60)
    caller.start()
    caller.join(0.5)
    model.go.set()
    for thread in (caller, newer):
        thread.join(60)
    torch.testing.assert_close(answers, [eager(x)])
    torch.testing.assert_close(model.hidden, eager.hidden)


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_a_call_that_runs_the_model_waits_for_no_newer_schedule_in_its_place() -> None:
    """Whoever is in that one may be waiting for the turn that the call has."""
    model = made(Recurrent)
    data = bundle_bytes(model, (example(),))
    older, newer = load(data, model), load(data, model)
    model.forward = newer  # type: ignore[method-assign]
    older(torch.randn(1, SIZE))
    assert [calls for _, calls in older.report().stepped_aside] == [1]
    assert not newer.report().stepped_aside
