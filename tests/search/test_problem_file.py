from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from autosched.core.errors import UsageError
from autosched.search import synthetic
from autosched.search.problem_file import load_problem, save_problem
from autosched.search.simulate import makespan_us
from autosched.search.strategy import STRATEGIES, SearchContext
from tests.search.test_fluid_twins import with_variants


def test_a_problem_read_back_is_searched_to_the_same_schedules(tmp_path: Path) -> None:
    problem = synthetic.random_problem(4, 60, widths=(1, 2), shape="cells")
    save_problem(problem, tmp_path / "sub" / "p.npz", provenance="made up for a test")
    read = load_problem(tmp_path / "sub" / "p.npz")
    again = read.problem
    assert read.provenance == "made up for a test"
    assert (again.pred_idx == problem.pred_idx).all()
    assert again.latency_us.tolist() == problem.latency_us.tolist()
    for name in ("opara", "critical_path", "list_policies"):
        old = STRATEGIES.get(name).propose(problem, SearchContext(np.random.default_rng(0)))[0]
        new = STRATEGIES.get(name).propose(again, SearchContext(np.random.default_rng(0)))[0]
        assert makespan_us(again, new) == pytest.approx(makespan_us(problem, old), rel=0.01)
    assert (again.demand == problem.demand.astype(np.float32)).all()
    assert (again.memory_bound == problem.memory_bound).all()


def test_a_problem_of_a_thousand_operators_is_a_small_file(tmp_path: Path) -> None:
    problem = synthetic.random_problem(1, 1264, shape="cells")
    save_problem(problem, tmp_path / "p.npz", provenance="")
    assert (tmp_path / "p.npz").stat().st_size < 1_000_000  # 421 different kernels, random costs: the worst case
    assert load_problem(tmp_path / "p.npz").problem.count == 1264


def test_room_is_kept_and_a_file_from_before_there_was_room_says_nothing_of_it(tmp_path: Path) -> None:
    problem = synthetic.random_problem(5, 20)
    room = np.linspace(0.0, 1.0, len(problem.solo_us))
    roomy = synthetic.Problem.make(problem.graph, dataclasses.replace(problem.costs, room=room))
    save_problem(roomy, tmp_path / "p.npz", provenance="")
    used = np.unique(problem.kernel)
    assert load_problem(tmp_path / "p.npz").problem.room.tolist() == room[used].tolist()
    with np.load(tmp_path / "p.npz") as data:
        older = {name: data[name] for name in data.files if name != "room"}
    np.savez_compressed(tmp_path / "old.npz", **older)
    assert load_problem(tmp_path / "old.npz").problem.costs.room is None


def test_what_polls_and_spins_is_kept_and_a_file_from_before_says_nothing_of_it(tmp_path: Path) -> None:
    problem = synthetic.random_problem(5, 20)
    costs = dataclasses.replace(problem.costs, polling_us=280.0, team_spin_us=8000.0, one_team=True)
    save_problem(synthetic.Problem.make(problem.graph, costs), tmp_path / "p.npz", provenance="")
    read = load_problem(tmp_path / "p.npz").problem.costs
    assert (read.polling_us, read.team_spin_us, read.one_team) == (280.0, 8000.0, True)
    with np.load(tmp_path / "p.npz") as data:
        older = {name: data[name][:6] if name == "constants" else data[name] for name in data.files}
    np.savez(tmp_path / "old.npz", **older)
    read = load_problem(tmp_path / "old.npz").problem.costs
    assert (read.polling_us, read.team_spin_us, read.concurrent_gap_us) == (0.0, 0.0, problem.costs.concurrent_gap_us)
    assert not read.one_team


def test_other_variants_are_kept_and_a_file_without_them_has_none(tmp_path: Path) -> None:
    problem = with_variants(synthetic.random_problem(4, 60, widths=(1, 2)), 4)
    save_problem(problem, tmp_path / "p.npz", provenance="")
    again = load_problem(tmp_path / "p.npz").problem
    assert again.solo_us[again.kernel].tolist() == problem.solo_us[problem.kernel].tolist()
    schedules = [item.schedule(range(60), [0] * 60, width_index=[2] * 60) for item in (problem, again)]
    assert schedules[0].variant == schedules[1].variant
    assert max(schedules[0].variant) == 1
    plain = synthetic.random_problem(4, 60)
    save_problem(plain, tmp_path / "plain.npz", provenance="")
    assert load_problem(tmp_path / "plain.npz").problem.costs.other_kernel is None


def test_kernels_nobody_uses_are_left_out(tmp_path: Path) -> None:
    problem = synthetic.random_problem(2, 3)
    wasteful = synthetic.Problem.make(
        problem.graph, synthetic.random_costs(np.random.default_rng(0), 3, kernels=50)
    )  # fmt: skip
    save_problem(wasteful, tmp_path / "p.npz", provenance="")
    assert len(load_problem(tmp_path / "p.npz").problem.solo_us) <= 3


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 torn"])
def test_what_is_no_problem_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(UsageError, match="holds no problem"):
        load_problem(tmp_path / "p.npz")
    with pytest.raises(UsageError, match="holds no problem"):
        load_problem(tmp_path / "missing.npz")


def test_a_file_that_a_disk_has_damaged_is_refused(tmp_path: Path) -> None:
    save_problem(synthetic.random_problem(0, 30), tmp_path / "p.npz", provenance="")
    whole = (tmp_path / "p.npz").read_bytes()
    for place in range(60, len(whole), 97):
        (tmp_path / "p.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        # A date in it says nothing of a problem.
        with contextlib.suppress(UsageError):
            load_problem(tmp_path / "p.npz")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pred_idx", np.array([5, 5, 5], dtype=np.int32), "legal problem"),  # waits for a later operator
        ("solo_us", np.array([np.nan]), "legal problem"),
        ("kernel", np.array([[0], [7], [0], [0]], dtype=np.int32), "rows outside"),
        ("schema", np.array(99), "newer autosched"),
        ("provenance", np.array([object()], dtype=object), "holds no problem"),  # would need pickle
        ("provenance", np.array([0xF8], dtype=np.uint8), "legal problem"),
        ("schema", np.ones(2), "holds no problem"),
        ("constants", np.array(1.0), "legal problem"),
        ("constants", np.ones(2), "legal problem"),
        ("pred_ptr", np.ones((2, 2)), "legal problem"),
        ("demand", np.array(["much"]), "legal problem"),
        ("demand", np.ones(3, np.float32), r"demand has shape \(3,\); expected \[4\]"),
        ("memory_bound", np.zeros((4, 1), bool), r"memory_bound has shape \(4, 1\)"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, name: str, value: np.ndarray, words: str) -> None:
    arrays = {
        "schema": np.array(1), "provenance": np.zeros(0, np.uint8), "pred_ptr": np.array([0, 0, 1, 2, 3], dtype=np.int32),
        "pred_idx": np.array([0, 1, 2], dtype=np.int32), "widths": np.array([1]), "kernel": np.zeros((4, 1), dtype=np.int32),
        "solo_us": np.array([5.0]), "slowdown_first": np.ones((1, 1), np.float32), "slowdown_last": np.ones((1, 1), np.float32),
        "constants": np.array([0.0, 1.0, 2.0, 2.0, 0.0, 0.0]), "demand": np.ones(4, np.float32), "memory_bound": np.zeros(4, bool),
    }  # fmt: skip
    np.savez(tmp_path / "good.npz", **arrays)
    assert load_problem(tmp_path / "good.npz").problem.count == 4
    np.savez(tmp_path / "p.npz", **{**arrays, name: value})
    with pytest.raises(UsageError, match=words):
        load_problem(tmp_path / "p.npz")
