"""What lies in the cache folder is listed by kind; clearing takes that, nothing else, and nothing that a running job holds."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import pytest

from autosched import cache_folder, config
from autosched.cache_folder import Here, Kind
from autosched.core.atomic_write import half_written_name
from autosched.core.errors import UsageError
from autosched.core.records import DeviceKey
from autosched.datasets.journal import Journal, Scope
from autosched.datasets.schema import TABLES
from autosched.datasets.store import Store
from autosched.export.cache import keep
from autosched.pipeline.diary import Diary
from autosched.runtime.cache import find, key_of
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.regions.store import WHOLE, RegionStore
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches

_GOLDEN = Path(__file__).resolve().parent / "compat" / "costmodel" / "schema-2"
_DIGEST = "0123456789abcdef01234567"
_BUNDLE = two_branches_bundle(TwoBranches())
_KEY = _BUNDLE.key
_ELSEWHERE = DeviceKey("cpu", "another processor", _KEY.device.details)


def elsewhere() -> object:
    fields = {name: getattr(_KEY, name) for name in _KEY.__struct_fields__}
    return dataclasses.replace(_BUNDLE, key=type(_KEY)(**{**fields, "device": _ELSEWHERE}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with something of every kind, in the ways autosched itself writes it, and with files that are not its own."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    keep(config.schedules_dir(), _BUNDLE)
    keep(config.schedules_dir(), elsewhere())  # type: ignore[arg-type]
    with Journal.open(config.measurements_dir() / f"{_DIGEST}.jsonl", Scope(cpu_device_key(), software_key())) as journal:
        journal.flush()
    (config.measurements_dir() / f"{_DIGEST}.jsonl").write_bytes(b"")
    with Diary(config.loops_dir() / f"{_DIGEST}.jsonl", "question"):
        pass
    shutil.copytree(_GOLDEN / "store", config.runs_dir() / _DIGEST)
    shutil.copytree(_GOLDEN / "model-analytic", config.cost_models_dir() / _DIGEST)
    store = RegionStore(config.regions_dir())
    assert store.put("region", "code")
    assert store.put(f"{WHOLE}1", "more code")
    config.native_dir().mkdir()
    (config.native_dir() / f"lanes-{'0' * 24}-{'1' * 16}.so").write_bytes(b"native")
    config.studies_path().parent.mkdir()
    config.studies_path().write_bytes(b"studies")
    for name in ("notes.txt", "schedules/readme.md", "runs/mine/part-1.parquet", "studies/mine.sqlite3", "regions/keep.json"):
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not of autosched")
    return tmp_path / "cache"


def left(folder: Path) -> set[str]:
    """Files that are there, but for locks, of which those of journals stay."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(folder).as_posix() for path in found}


FOREIGN = {"notes.txt", "schedules/readme.md", "runs/mine/part-1.parquet", "studies/mine.sqlite3", "regions/keep.json"}


def test_every_kind_is_listed_with_its_size(folder: Path) -> None:
    found = cache_folder.listing()
    assert {row.kind for row in found.kinds} == set(Kind)
    sizes = {row.kind: row.size_bytes for row in found.kinds}
    assert sizes[Kind.NATIVE] == len(b"native")
    assert sizes[Kind.STUDIES] == len(b"studies")
    ours = [folder / name for name in left(folder) - FOREIGN]
    assert found.size_bytes == sum(sizes.values()) == sum(path.stat().st_size for path in ours)
    assert sum(row.files for row in found.kinds) == len(ours)


def test_a_schedule_is_found_here_exactly_if_it_is_looked_up_here(folder: Path) -> None:
    here, other = sorted(cache_folder.listing().schedules, key=lambda entry: entry.here is Here.OTHER)
    assert (here.here, here.differences) == (Here.FOUND, ())
    assert find(config.schedules_dir(), key_of(_BUNDLE)) is not None
    assert here.file == key_of(_BUNDLE).filename
    assert (here.model, here.device, here.device_kind) == (_BUNDLE.evidence.report.model, _KEY.device.name, "cpu")
    assert other.here is Here.OTHER
    assert any("another processor" in line for line in other.differences)


def test_a_damaged_schedule_is_listed_as_such_and_left_where_it_is(folder: Path) -> None:
    path = config.schedules_dir() / key_of(_BUNDLE).filename
    path.write_bytes(path.read_bytes()[:100])
    (damaged,) = (entry for entry in cache_folder.listing().schedules if entry.here is Here.DAMAGED)
    assert damaged.file == path.name
    assert damaged.differences[0]
    assert path.exists()


def test_an_empty_cache_is_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "never made"))
    found = cache_folder.listing()
    assert (found.schedules, found.kinds, found.size_bytes) == ((), (), 0)
    assert cache_folder.clear(cache_folder.select(())).removed == ()


def test_clearing_everything_leaves_what_is_not_ours(folder: Path) -> None:
    size = cache_folder.listing().size_bytes
    cleared = cache_folder.clear(cache_folder.select(()))
    assert left(folder) == FOREIGN
    assert (cleared.size_bytes, cleared.stayed) == (size, ())
    assert {row.kind for row in cleared.removed} == set(Kind)
    assert cache_folder.items() == []


@pytest.mark.parametrize("kind", list(Kind))
def test_one_kind_is_cleared_and_the_others_stay(folder: Path, kind: Kind) -> None:
    before = {item.path for item in cache_folder.items() if item.kind is not kind}
    cleared = cache_folder.clear(cache_folder.select([kind]))
    assert {row.kind for row in cleared.removed} == {kind}
    assert {item.path for item in cache_folder.items()} == before


def test_a_model_a_pattern_or_a_file_names_schedules(folder: Path) -> None:
    model = _BUNDLE.evidence.report.model
    both = {item.path for item in cache_folder.items() if item.kind is Kind.SCHEDULES}
    assert {item.path for item in cache_folder.select([model])} == both
    assert {item.path for item in cache_folder.select([f"{model[:2]}*"])} == both
    mine = key_of(_BUNDLE).filename
    assert [item.path.name for item in cache_folder.select([mine])] == [mine]
    assert {item.path for item in cache_folder.select([mine[:8]])} == both  # they begin alike: the same model elsewhere


@pytest.mark.parametrize("name", ["torchvision:nothing", "schedule", "0", ""])
def test_a_name_that_nothing_answers_to_is_answered_with_those_there_are(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="schedules, measurements, loops"):
        cache_folder.select([name])


def test_only_what_is_old_is_chosen(folder: Path) -> None:
    old = config.schedules_dir() / key_of(_BUNDLE).filename
    long_ago = time.time() - 40 * 86400
    os.utime(old, (long_ago, long_ago))
    assert [item.path for item in cache_folder.select((), 30 * 86400.0)] == [old]
    assert cache_folder.select(["regions"], 30 * 86400.0) == []


def test_what_was_damaged_and_put_aside_is_cleared_without_a_trace(folder: Path) -> None:
    shutil.rmtree(config.measurements_dir())
    journal = config.measurements_dir() / f"{_DIGEST}.jsonl"
    journal.parent.mkdir()
    aside = (f"{journal.name}.corrupt-{time.time_ns()}", half_written_name(journal).name)
    for name in aside:
        (journal.parent / name).touch()
    for part in (config.runs_dir() / _DIGEST).glob("*/part-*.parquet"):
        part.write_bytes(b"")
    store = Store.open(config.runs_dir() / _DIGEST)
    assert [store.rows(table) for table in TABLES] == [[]] * len(TABLES)
    cleared = cache_folder.clear(cache_folder.select(["measurements", "runs"]))
    assert {row.kind for row in cleared.removed} == {Kind.MEASUREMENTS, Kind.RUNS}
    assert list(journal.parent.iterdir()) == []
    assert not (config.runs_dir() / _DIGEST).exists()


def test_what_a_running_job_holds_stays(folder: Path) -> None:
    path = config.loops_dir() / f"{_DIGEST}.jsonl"
    with Diary(path, "question"):
        cleared = cache_folder.clear(cache_folder.select(["loops", "studies"]))
        assert {item.path for item in cleared.stayed} == {str(path), str(config.studies_path())}
        assert path.exists()
    (config.loops_dir() / f"{'a' * 24}.jsonl.lock").touch()  # of a job that ended long ago
    assert cache_folder.clear(cache_folder.select(["loops", "studies"])).stayed == ()
    assert list(config.loops_dir().iterdir()) == []
    assert not path.exists()


def test_an_interrupted_removal_is_finished_by_the_next(folder: Path) -> None:
    half = (config.runs_dir() / _DIGEST).rename(config.runs_dir() / f".{_DIGEST}.removed-1")
    assert [item.path for item in cache_folder.select(["runs"])] == [half]
    cache_folder.clear(cache_folder.select(["runs"]))
    assert not half.exists()


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = shutil.copytree(_GOLDEN / "store", tmp_path / "outside")
    (config.runs_dir() / ("f" * 24)).symlink_to(outside)
    cache_folder.clear(cache_folder.select(()))
    assert left(outside) == left(_GOLDEN / "store")
