"""Where there is no memory for a schedule: what was made of it is given back before the model runs in its place."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

from autosched.core.errors import AutoschedError, DeviceError, IncompatibleArtifact, ShortOfMemory
from autosched.core.frames import empty_frames
from autosched.export.bundle import encode_bundle
from autosched.runtime import binding, comparison, slot
from autosched.runtime.load import FallbackWarning, load
from autosched.runtime.trees import output_tensors
from tests.conformance.bundles import shapes_of, two_branches_bundle
from tests.conformance.graphs import TwoBranches, two_branches_inputs


class Held:
    """Stands for memory that a schedule takes."""


class Noting(TwoBranches):
    """Notes, whenever it runs, how much of that there still is."""

    # Of the class: what an instance has in its attributes is compared at each call.
    made: ClassVar[list[weakref.ref[Held]]] = []
    seen: ClassVar[list[int]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``TwoBranches``."""
        self.seen.append(held_now())
        return super().forward(*args, **kwargs)


def held_now() -> int:
    """How much is still held."""
    return sum(one() is not None for one in Noting.made)


def held() -> Held:
    """Something that whoever asks holds from now on."""
    thing = Held()
    Noting.made.append(weakref.ref(thing))
    return thing


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    Noting.made.clear()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def no_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Refuse all schedules for want of memory; what is held when each one begins."""
    before: list[int] = []

    def no_room(*_: object) -> Callable[..., Any]:
        before.append(held_now())
        packed = held()  # noqa: F841
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise DeviceError(f"the schedule cannot be captured here: {error}") from error

    monkeypatch.setattr(binding.Binder, "_bind_trusting", no_room)
    return before


@pytest.mark.parametrize("prepare", ["all", "first-use"])
def test_the_model_runs_beside_nothing_of_a_schedule_that_had_no_memory(monkeypatch: pytest.MonkeyPatch, prepare: Any) -> None:
    model = Noting().eval()
    data = encode_bundle(two_branches_bundle(model))
    no_memory(monkeypatch)
    Noting.seen.clear()
    args, kwargs = two_branches_inputs(3)
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        loaded = load(data, model, prepare=prepare)
        loaded(*args, **kwargs)
    ((reason, calls),) = loaded.report().stepped_aside
    assert ("out of memory" in reason, calls) == (True, 1)
    assert (len(Noting.made), Noting.seen) == (1, [0])


def test_what_one_shape_held_is_gone_before_the_next_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Noting().eval()
    data = encode_bundle(*shapes_of(model, 1, 4, 8))
    before = no_memory(monkeypatch)
    with pytest.warns(FallbackWarning, match="out of memory"):
        load(data, model)
    assert before == [0, 0, 0]


def test_what_to_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoBranches().eval()
    data = encode_bundle(two_branches_bundle(model))

    def no_room(*_: object) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(binding, "random_inputs", no_room)
    monkeypatch.setattr(comparison, "telling_inputs", no_room)
    with pytest.raises(IncompatibleArtifact, match="out of memory") as caught:
        load(data, model, strict=True)
    assert str(caught.value).endswith("(max_shapes).")


def test_what_a_call_held_that_fails_is_gone_before_the_model_runs() -> None:
    model = Noting().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model, strict=True)

    def fails(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs = held()  # noqa: F841
        raise RuntimeError("CUDA error: no luck")

    assert loaded._table is not None
    prepared = loaded._table.slots[0].prepared
    assert prepared is not None
    prepared.runner = fails
    Noting.seen.clear()
    args, kwargs = two_branches_inputs(3)
    with pytest.raises(AutoschedError, match="no luck"):
        loaded(*args, **kwargs)
    assert (len(Noting.made), Noting.seen) == (1, [0])


def test_frames_are_emptied_and_their_lines_stay() -> None:
    def fails() -> None:
        thing = held()  # noqa: F841
        raise ValueError("no")

    def fails_because_of_it() -> None:
        thing = held()  # noqa: F841
        try:
            fails()
        except ValueError as error:
            raise AutoschedError("not at all") from error

    with pytest.raises(AutoschedError, match="not at all") as caught:
        fails_because_of_it()
    assert held_now() == 2
    empty_frames(caught.value)
    assert held_now() == 0
    assert caught.value.__traceback__ is not None
    assert caught.value.__cause__ is not None


def test_what_the_caller_is_handling_stays_as_it_is() -> None:
    def fails_before() -> None:
        thing = held()  # noqa: F841
        raise KeyError("of the caller's own")

    try:
        fails_before()
    except KeyError:
        with pytest.raises(ValueError, match="ours") as caught:
            raise ValueError("ours") from None
        assert caught.value.__context__ is not None
        empty_frames(caught.value)
        assert held_now() == 1


def test_generators_that_may_go_on_are_not_ended() -> None:
    def tries() -> Iterator[Exception]:
        try:
            raise ValueError("once")
        except ValueError as error:
            yield error
        yield ValueError("and again")

    attempts = tries()
    empty_frames(next(attempts))
    assert "again" in str(next(attempts))


def short_of_memory(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    raise torch.OutOfMemoryError("CUDA out of memory")


def more_than_there_is(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(1 << 50)]


def driver_has_none(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call")


@pytest.mark.parametrize("short_of_memory", [short_of_memory, more_than_there_is, driver_has_none])
def test_memory_that_is_short_for_a_moment_retires_nothing(short_of_memory: Callable[..., list[torch.Tensor]]) -> None:
    model = TwoBranches().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model)
    assert loaded._table is not None
    prepared = loaded._table.slots[0].prepared
    assert prepared is not None
    args, kwargs = two_branches_inputs(3)
    runner, prepared.runner = prepared.runner, short_of_memory
    with pytest.warns(FallbackWarning, match="memory"):
        loaded(*args, **kwargs)
    for _ in range(4):
        loaded(*args, **kwargs)
    prepared.runner = runner
    loaded(*args, **kwargs)
    report = loaded.report()
    assert (report.scheduled, report.calls, [calls for _, calls in report.stepped_aside]) == (True, 1, [5])


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_a_schedule_that_never_has_memory_is_given_up() -> None:
    model = TwoBranches().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model)
    assert loaded._table is not None
    slot = loaded._table.slots[0]
    assert slot.prepared is not None
    args, kwargs = two_branches_inputs(3)
    slot.prepared.runner = short_of_memory
    for _ in range(50):
        loaded(*args, **kwargs)
    assert slot.prepared is None
    assert "out of memory" in loaded.report().reason


class Room:
    """Lets schedules be bound while there is room, and counts the attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, raised: Callable[[], Exception]) -> None:
        self.there = True
        self.attempts = 0
        real = binding.Binder._bind_trusting

        def bind(*args: Any) -> Any:
            self.attempts += 1
            if not self.there:
                raise raised()
            return real(*args)

        monkeypatch.setattr(binding.Binder, "_bind_trusting", bind)


NO_ROOM: dict[str, Callable[[], Exception]] = {
    "PyTorch's allocator": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "C++'s": lambda: RuntimeError("std::bad_alloc"),
    "a CPU's": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    "a capture": lambda: ShortOfMemory("the schedule cannot be captured here: OutOfMemoryError: CUDA out of memory."),
}


@pytest.fixture(params=NO_ROOM)
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch, NO_ROOM[request.param])


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
@pytest.mark.parametrize("when", ["first-use", "evicted", "new weights", "refresh"])
def test_a_schedule_that_has_no_memory_when_it_is_made_ready_is_made_ready_later(room: Room, when: str) -> None:
    model = TwoBranches().eval()
    shapes = (4, 8) if when == "evicted" else (4,)
    loaded = load(encode_bundle(*shapes_of(model, *shapes)), model, max_shapes=1, prepare="first-use" if when == "first-use" else "all")
    args, kwargs = two_branches_inputs(3)
    if when == "evicted":
        others, named = two_branches_inputs(3, 8)
        loaded(*others, **named)
    elif when == "new weights":
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    room.there, room.attempts = False, 0
    if when == "refresh":
        loaded.refresh()
    for _ in range(10):
        torch.testing.assert_close(output_tensors(loaded(*args, **kwargs)), output_tensors(model(*args, **kwargs)))
    # Of the ten the first, second, fourth and eighth; or one of them less, where refresh() made one.
    assert room.attempts == 4
    assert loaded.report().scheduled
    room.there = True
    for _ in range(10):
        torch.testing.assert_close(output_tensors(loaded(*args, **kwargs)), output_tensors(model(*args, **kwargs)))
    assert loaded.report().calls >= 3
    assert room.attempts == 5


@pytest.mark.filterwarnings("ignore::autosched.FallbackWarning")
def test_one_that_never_has_memory_when_it_is_made_ready_is_given_up_until_refresh(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "MOST_SHORT", 3)
    model = TwoBranches().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model, prepare="first-use")
    args, kwargs = two_branches_inputs(3)
    room.there = False
    for _ in range(20):
        loaded(*args, **kwargs)
    assert (room.attempts, loaded.report().scheduled) == (4, False)
    assert "memory" in loaded.report().reason
    room.there = True
    loaded(*args, **kwargs)
    assert (room.attempts, loaded.report().calls) == (4, 0)
    loaded.refresh()
    loaded(*args, **kwargs)
    assert (loaded.report().scheduled, loaded.report().calls) == (True, 1)


def test_what_a_call_says_of_a_lack_of_memory_is_raised_where_the_caller_is_strict(room: Room) -> None:
    model = TwoBranches().eval()
    loaded = load(encode_bundle(two_branches_bundle(model)), model, prepare="first-use", strict=True)
    args, kwargs = two_branches_inputs(3)
    room.there = False
    for _ in range(2):
        with pytest.raises(AutoschedError, match="memory"):
            loaded(*args, **kwargs)
    room.there = True
    with pytest.raises(AutoschedError, match="memory"):
        loaded(*args, **kwargs)
    assert room.attempts == 2
    loaded(*args, **kwargs)
