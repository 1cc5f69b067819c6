"""What another device's model is worth on a new one: every way is judged on the same held-out rows, none of which it was fitted on."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosched.datasets.synthetic import synthetic_store
from experiments.costmodel import transfer


@pytest.fixture
def given(tmp_path: Path) -> transfer.Sides:
    places = [synthetic_store(tmp_path / name, kernels=6, pairs=20, seed=seed, device=name).folder for seed, name in enumerate(("a", "b"))]
    return transfer.sides(tmp_path / "both", *places)


def test_rows_are_told_apart_by_their_device(given: transfer.Sides) -> None:
    assert len(given.elsewhere) + len(given.here) == len(given.pairs)
    assert not set(given.elsewhere) & set(given.here)
    names = {given.pairs.query.devices[given.pairs.query.kernel_device[given.pairs.query.first[row]]].name for row in given.here}
    assert names == {"synthetic-b"}


def test_every_way_is_judged_at_every_size_on_the_same_rows(given: transfer.Sides) -> None:
    points = transfer.curve(given, "xgboost", [0, 15], draws=1, seed=0)
    found = {(point.model, point.pairs) for point in points}
    ways = {"of the other device, residual", "trained here", "trained on both"}
    assert found == {(name, size) for name in ("analytic", "of the other device") for size in (0, 15)} | {(name, 15) for name in ways}
    assert {point.metrics.rows for point in points} == {2 * len(given.here)}
    # What needs no runs of the new device is the same with them.
    same = {point.metrics.mean_abs_log for point in points if point.model == "of the other device"}
    assert len(same) == 1


def test_one_device_alone_is_refused(tmp_path: Path) -> None:
    place = synthetic_store(tmp_path / "a", kernels=6, pairs=20, seed=0).folder
    with pytest.raises(SystemExit, match="expected two devices"):
        transfer.sides(tmp_path / "both", place, place)
