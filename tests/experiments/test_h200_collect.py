"""The data set's calls: which models come first, and that what was shipped or gathered before is never lost."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosched.core.records import DeviceKey
from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store
from autosched.device.base import Limits
from autosched.device.registry import device_named
from autosched.pipeline.collecting import Aims, Subject
from autosched.pipeline.memory import Measured, remember_runs
from experiments.calls import LEFT
from experiments.costmodel import add_runs as adding
from experiments.costmodel import collect as gathering
from experiments.costmodel import shipping
from experiments.costmodel.add_runs import main as add_runs
from experiments.costmodel.shipping import folder_of, resume, ship
from experiments.devices import folder_name
from experiments.h200 import collect as calls
from experiments.h200.collect import done_before, open_first
from tests.conformance.graphs import TwoBranches, two_branches_program


def keys(folder: Path) -> set[str]:
    return Store.open(folder).keys("pairs")


def test_what_is_shipped_and_what_is_gathered_are_both_kept(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "data"
    one, other = synthetic_store(tmp_path / "one", kernels=6, pairs=10), synthetic_store(work, kernels=8, pairs=10, seed=1)
    gathered = keys(other.folder)
    ship(one.folder, target, device_named("cpu"), unfinished=[], models=[])
    shipped = keys(target)
    assert shipped == keys(one.folder)
    assert not shipped <= gathered
    # Something had gathered when the last call was stopped; the shipped rows are of another one.
    resume(work, target)
    ship(work, target, device_named("cpu"), unfinished=["b"], models=["a", "b"])
    assert keys(target) == shipped | gathered
    assert json.loads((target / "about.json").read_text())["unfinished"] == ["b"]
    assert not list(target.glob(".*"))


def test_runs_of_comparisons_are_added_without_their_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, one = tmp_path / "data", synthetic_store(tmp_path / "one", kernels=6, pairs=10)
    more = synthetic_store(tmp_path / "more", kernels=8, pairs=10, seed=1)
    ship(one.folder, target, device_named("cpu"), models=["a"])
    said = json.loads((target / "about.json").read_text())
    add_runs([str(more.folder), str(one.folder), "--to", str(target)])
    assert keys(target) == keys(one.folder) | keys(more.folder)
    assert len(list((target / "pairs").glob("part-*"))) == 1
    now = json.loads((target / "about.json").read_text())
    assert now["rows"]["pairs"] == len(keys(target)) > said["rows"]["pairs"]
    unchanged = ("device", "software", "commit", "cores", "models")
    assert {name: now[name] for name in unchanged} == {name: said[name] for name in unchanged}
    assert f"{len(keys(target))} pairs" in capsys.readouterr().out


def test_the_command_that_is_written_down_finds_what_jobs_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It named the folder of all devices, which is no store."""
    target, one = tmp_path / "data", synthetic_store(tmp_path / "one", kernels=6, pairs=10)
    ship(one.folder, target, device_named("cpu"))
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "gpu-session" / "h200" / "cache" / "685cf4059"))
    graph, limits = two_branches_program(TwoBranches())[0].graph, Limits(2, (1,), (0,), True, 0.1, 0.1, 1.0)
    assert remember_runs(one.scopes()[0], graph, "autosched:toy", limits, Measured([[] for _ in graph.operators], (), {}), ())
    command = re.search(r"add_runs\.py (\S+) --to", adding.__doc__ or "")
    assert command is not None
    add_runs([*map(str, tmp_path.glob(command[1])), "--to", str(target)])
    assert Store.open(target).keys("graphs")


def test_runs_of_another_device_are_not_added(tmp_path: Path) -> None:
    target, one = tmp_path / "data", synthetic_store(tmp_path / "one", kernels=6, pairs=10)
    with pytest.raises(SystemExit, match=r"no about\.json"):
        add_runs([str(one.folder), "--to", str(target)])
    ship(one.folder, target, device_named("cpu"))
    before = keys(target)
    with pytest.raises(SystemExit, match="has runs of synthetic-b; those in"):
        add_runs([str(synthetic_store(tmp_path / "other", kernels=6, pairs=10, device="synthetic-b").folder), "--to", str(target)])
    assert keys(target) == before


def test_shipping_that_is_stopped_leaves_the_old_rows_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, more = tmp_path / "data", synthetic_store(tmp_path / "more", kernels=8, pairs=20, seed=1)
    ship(synthetic_store(tmp_path / "one", kernels=6, pairs=10).folder, target, device_named("cpu"))
    before = {table: Store.open(target).keys(table) for table in ("solo", "pairs")}

    def killed(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shipping.shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            ship(more.folder, target, device_named("cpu"))
    assert {table: Store.open(target).keys(table) for table in ("solo", "pairs")} == before
    ship(more.folder, target, device_named("cpu"))
    assert keys(target) == keys(more.folder)


def test_models_that_are_open_come_first_and_those_that_are_done_last(tmp_path: Path) -> None:
    store = synthetic_store(tmp_path / "work", kernels=6, pairs=10)
    counts: dict[str, int] = {}
    for row in store.pairs():
        counts[row.model] = counts.get(row.model, 0) + 1
    model = max(counts, key=lambda name: counts[name])
    assert open_first([model, "new"], store.folder, set()) == ["new", model]
    assert open_first([model, "new"], store.folder, {"new"}) == [model, "new"]
    assert open_first([model, "new"], tmp_path / "nothing", set()) == [model, "new"]


def test_done_is_what_the_last_call_did_not_leave(tmp_path: Path) -> None:
    assert done_before(tmp_path, ["a", "b"]) == set()
    (tmp_path / "about.json").write_text(json.dumps({"models": ["a", "b"], "unfinished": ["b"]}))
    assert done_before(tmp_path, ["a", "b", "c"]) == {"a"}


@pytest.mark.parametrize(("each_s", "turns", "open_ones"), [(10.0, "ab cd", ""), (30.0, "ab c", "d"), (50.0, "ab", "cd")])
def test_time_that_models_leave_goes_to_those_that_would_have_waited(
    each_s: float, turns: str, open_ones: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call ended after a tenth of its time, and a GPU was given back with most models not begun."""
    clock, said = [0.0], list[str]()

    def measure(models: list[str], *_: object, budget_s: float, **__: object) -> tuple[list[str], SimpleNamespace]:
        assert budget_s == 100.0 - clock[0]
        clock[0] += each_s * len(models)
        said.append("".join(models))
        return [], SimpleNamespace()

    def report(*given: object, **_: object) -> None:
        said.append(f"open: {''.join(given[4])}")  # type: ignore[arg-type]

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(calls, "device_named", lambda name: None)
    monkeypatch.setattr(calls, "measure", measure)
    monkeypatch.setattr(calls, "report", report)
    folders = ("--work", str(tmp_path / "work"), "--out", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "argv", ["collect.py", *"abcd", "--deadline", "120", *folders])
    assert calls.main() == (LEFT if open_ones else 0)
    assert said == [*turns.split(), f"open: {open_ones}"]


def test_a_model_that_fails_is_open_and_keeps_no_other_from_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(unfinished=[], summary=lambda: "all")

    def collect(subjects: list[Subject], *_: object, **__: object) -> SimpleNamespace:
        if subjects[0].name == "autosched:toy":
            raise RuntimeError("an illegal memory access")
        return made

    monkeypatch.setattr(gathering, "collect", collect)
    models = ["autosched:toy", "autosched:deepfm"]
    found = gathering.measure(models, tmp_path, device="cpu", budget_s=100.0, aims=Aims(1, 1, 1), seed=0)
    assert found == (["autosched:toy"], made)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "cuda_nvidia_h100_pcie"),
        ("NVIDIA GH200 480GB", "cuda_nvidia_gh200_480gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cuda_nvidia_h100_80gb_hbm3_mig_1g_10gb"),
        ("Emulated H100, no kernels run", "cuda_emulated_h100_no_kernels_run"),
    ],
)
def test_each_device_has_a_folder_of_its_own(name: str, folder: str) -> None:
    assert folder_name(DeviceKey("cuda", name, (("sm_count", "132"),))) == folder


def test_a_cpu_has_one_too() -> None:
    assert folder_of(device_named("cpu")).name.startswith("cpu_")
