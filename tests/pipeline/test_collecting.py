"""What a collection does with its time. The clock is the test's; nothing is measured."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosched.core.errors import UsageError
from autosched.datasets.collect import Collected
from autosched.pipeline import collecting
from autosched.pipeline.collecting import Subject, collect
from autosched.runtime.host_key import cpu_device_key, software_key
from tests.conformance.graphs import TwoBranches, two_branches_program
from tests.conformance.session_double import SessionDouble

PROGRAM = two_branches_program(TwoBranches())[0]


class Device:
    key, software = cpu_device_key(), software_key()

    def open(self, *_: object, **__: object) -> SessionDouble:
        return SessionDouble(lambda schedule: 1.0)


def test_a_folder_that_cannot_be_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UsageError, match=r"cannot write runs to .*file"):
            collect([Subject("a", TwoBranches(), (), {})], folder, device="cpu")


@pytest.mark.parametrize(("each_s", "begun", "unfinished"), [(90.0, 1, 2), (40.0, 2, 1), (15.0, 3, 0)])
def test_a_model_whose_turn_comes_when_the_time_is_up_is_not_begun_but_named(
    each_s: float, begun: int, unfinished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    asked: list[str] = []

    def collect_graph(*_: object, name: str, **__: object) -> Collected:
        nonlocal now_s
        now_s += each_s
        asked.append(name)
        return Collected(1, 1, 0, 0, 0, each_s, finished=True)

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(collecting, "collect_graph", collect_graph)
    monkeypatch.setattr(collecting, "device_named", lambda name: Device())
    monkeypatch.setattr(collecting, "capture", lambda *_, **__: SimpleNamespace(program=PROGRAM, constants={}))
    subjects = [Subject(name, TwoBranches(), (), {}) for name in ("a", "b", "c")]
    found = collect(subjects, tmp_path / "runs", device="cpu", budget_s=60.0)
    assert asked == ["a", "b", "c"][:begun]
    assert found.unfinished == ("a", "b", "c")[begun:]
    assert len(found.unfinished) == unfinished
    assert ("run the command again to continue" in found.summary()) == bool(unfinished)
