"""Which of Inductor's modes is taken apart: that of the fastest compiled baseline, its own defaults where they are as fast."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from autosched.core.records import Failure, FailureKind
from autosched.core.variants import WHOLE, Lowering
from autosched.device.cuda.baselines import MODES, BaselineKind, compile_options
from autosched.pipeline.adopting import MODE_OF, fastest_mode
from autosched.pipeline.judge import External
from autosched.runtime.inductor.modes import mode_options


def taking(name: str, *times_us: float | Failure) -> External:
    """A baseline that takes these times in turn."""
    turns = itertools.cycle(times_us)
    return External(name, lambda: next(turns))


LOST = Failure(FailureKind.CRASH, "it is gone")


@pytest.mark.parametrize(
    ("baselines", "lowerings"),
    [
        ([taking("compiled", 12e3), taking("max_autotune", 10e3), taking("max_autotune_combo", 11e3)], [Lowering.MAX_AUTOTUNE]),
        ([taking("compiled", 12e3), taking("max_autotune", 10e3), taking("max_autotune_combo", 9e3)], [Lowering.MAX_AUTOTUNE_COMBO]),
        ([taking("compiled", 9e3), taking("max_autotune", 10e3)], [Lowering.INDUCTOR]),
        ([taking("torch_compile", 12e3), taking("max_autotune", 10e3)], [Lowering.MAX_AUTOTUNE]),
        # Level: what compiles sooner.
        ([taking("compiled", 10e3), taking("max_autotune", 9950.0)], [Lowering.INDUCTOR]),
        # One slow round says nothing.
        ([taking("compiled", 12e3), taking("max_autotune", 10e3, 10e3, 90e3)], [Lowering.MAX_AUTOTUNE]),
        # What is not compiled is not asked, however fast.
        ([taking("eager", 1.0), taking("compiled", 12e3)], [Lowering.INDUCTOR]),
        ([taking("compiled", 12e3), taking("max_autotune", 5e3, LOST)], [Lowering.INDUCTOR]),
        ([taking("compiled", LOST)], [Lowering.INDUCTOR]),
        ([], [Lowering.INDUCTOR]),
        # A small model: its guards decide which is faster, so that one of each kind is taken apart.
        ([taking("torch_compile", 240.0), taking("max_autotune", 140.0)], [Lowering.MAX_AUTOTUNE, Lowering.INDUCTOR]),
        ([taking("torch_compile", 140.0), taking("max_autotune", 240.0)], [Lowering.INDUCTOR, Lowering.MAX_AUTOTUNE]),
        ([taking("torch_compile", 100.0), taking("max_autotune", LOST)], [Lowering.INDUCTOR]),
        ([taking("torch_compile", LOST), taking("max_autotune", 100.0)], [Lowering.MAX_AUTOTUNE]),
    ],
)
def test_the_fastest_baseline_names_the_modes(baselines: list[External], lowerings: list[Lowering]) -> None:
    assert list(fastest_mode(baselines, guarded=True).lowerings) == lowerings


@pytest.mark.parametrize(("time_us", "rounds"), [(1e3, 9), (400e3, 7), (2e6, 3), (60e6, 3)])
def test_slow_baselines_are_timed_in_fewer_rounds(time_us: float, rounds: int) -> None:
    asked: list[float] = []

    def call() -> float:
        asked.append(time_us)
        return time_us

    assert fastest_mode([External("compiled", call), taking("max_autotune", time_us / 1.01)], guarded=False).measured
    assert len(asked) == rounds


def test_without_guards_a_small_model_is_like_any_other() -> None:
    baselines = [taking("compiled", 140.0), taking("max_autotune", 240.0)]
    assert fastest_mode(baselines, guarded=False).lowerings == (Lowering.INDUCTOR,)


@pytest.mark.parametrize(
    ("baselines", "lowerings"),
    [
        ([taking("compiled", 1354.0), taking("max_autotune", 309.0)], [Lowering.MAX_AUTOTUNE, Lowering.INDUCTOR]),
        ([taking("compiled", 100.0), taking("max_autotune", 309.0)], [Lowering.INDUCTOR]),
        ([taking("compiled", LOST), taking("max_autotune", 309.0)], [Lowering.MAX_AUTOTUNE]),
    ],
)
def test_slow_products_do_not_hide_the_defaults(baselines: list[External], lowerings: list[Lowering]) -> None:
    assert list(fastest_mode(baselines, guarded=False, products=True).lowerings) == lowerings


def test_the_sentence_has_every_time() -> None:
    said = fastest_mode([taking("compiled", 1200.0), taking("max_autotune", 100.0)], guarded=False).why
    assert said == "max_autotune is the fastest of torch.compile's ways here: 100 us; compiled 1,200 us"


def test_every_mode_has_a_baseline_with_its_options() -> None:
    assert set(MODES.values()) == set(WHOLE) == set(MODE_OF.values())
    options: Callable[[BaselineKind], dict[str, object]] = compile_options
    for kind, lowering in MODES.items():
        assert {name: value for name, value in options(kind).items() if name not in ("freezing", "triton.cudagraphs")} == mode_options(
            lowering
        )
