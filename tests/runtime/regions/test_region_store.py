"""What is kept of compiled regions is run as code: any doubt about who wrote it is a miss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autosched.runtime.regions import store as region_store
from autosched.runtime.regions.store import RegionStore

SOURCE = "def call(args):\n    return args\n"


@pytest.fixture
def store(tmp_path: Path) -> RegionStore:
    return RegionStore(tmp_path / "regions")


def only_file(store: RegionStore) -> Path:
    (path,) = store._folder.iterdir()
    return path


def test_what_was_put_is_got_under_its_key_alone(store: RegionStore) -> None:
    assert store.get("a") is None
    assert store.put("a", SOURCE)
    assert store.get("a") == SOURCE
    assert store.get("b") is None
    assert store._folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"return args", b"return None"),
        lambda data: data.replace(b'"schema":1', b'"schema":2'),
        lambda data: data.replace(b'"key":"a"', b'"key":"b"'),
        lambda data: b"",
        lambda data: b"\x80\x04",
        lambda data: data.replace(b"return args", b"return \xffrgs"),
    ],
    ids=["cut", "changed", "schema", "key", "empty", "binary", "no text"],
)
def test_a_damaged_entry_is_a_miss_and_can_be_written_again(store: RegionStore, damage) -> None:  # type: ignore[no-untyped-def]
    store.put("a", SOURCE)
    path = only_file(store)
    path.write_bytes(damage(path.read_bytes()))
    assert store.get("a") is None
    assert store.put("a", SOURCE)
    assert store.get("a") == SOURCE


def test_a_pipe_in_place_of_an_entry_does_not_hang(store: RegionStore) -> None:
    store.put("a", SOURCE)
    path = only_file(store)
    path.unlink()
    os.mkfifo(path)
    assert store.get("a") is None
    assert store.put("a", SOURCE)
    assert store.get("a") == SOURCE


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o666])
def test_a_file_that_others_may_write_is_a_miss(store: RegionStore, mode: int) -> None:
    store.put("a", SOURCE)
    only_file(store).chmod(mode)
    assert store.get("a") is None


def test_a_folder_that_others_may_write_is_neither_read_nor_written(store: RegionStore) -> None:
    store.put("a", SOURCE)
    store._folder.chmod(0o777)
    assert store.get("a") is None
    assert not store.put("b", SOURCE)


def test_a_link_is_not_followed(store: RegionStore, tmp_path: Path) -> None:
    store.put("a", SOURCE)
    path = only_file(store)
    elsewhere = tmp_path / "elsewhere"
    os.rename(path, elsewhere)
    path.symlink_to(elsewhere)
    assert store.get("a") is None


def test_a_file_of_somebody_else_is_a_miss(store: RegionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", SOURCE)
    monkeypatch.setattr(os, "getuid", lambda: 12_345_678)
    monkeypatch.setattr(region_store, "_ROOT", 12_345_679)
    assert store.get("a") is None


def test_what_root_has_put_into_an_image_is_read_by_whoever_serves_from_it(store: RegionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", SOURCE)
    monkeypatch.setattr(region_store, "_ROOT", os.getuid())
    monkeypatch.setattr(os, "getuid", lambda: 12_345_678)
    assert store.get("a") == SOURCE
    only_file(store).chmod(0o664)
    assert store.get("a") is None


def test_a_folder_that_cannot_be_made_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = RegionStore(blocked / "regions")
    assert not store.put("a", SOURCE)
    assert store.get("a") is None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    roomy = RegionStore(tmp_path / "regions")
    for place, key in enumerate("abcd"):
        assert roomy.put(key, SOURCE)
        os.utime(roomy._path(key), (place, place))
    size = roomy._path("a").stat().st_size
    assert roomy.get("a") == SOURCE  # used again, so "b" is the oldest
    narrow = RegionStore(tmp_path / "regions", most_bytes=4 * size)
    assert narrow.put("e", SOURCE)
    left = [key for key in "abcde" if narrow.get(key) is not None]
    assert left == ["a", "d", "e"]
    assert sum(path.stat().st_size for path in (tmp_path / "regions").iterdir()) <= 4 * size


def test_files_of_the_user_in_a_folder_of_this_name_stay(tmp_path: Path) -> None:
    folder = tmp_path / "regions"
    folder.mkdir(mode=0o700)
    maps = folder / "europe.json"
    maps.write_bytes(bytes(10_000))
    os.utime(maps, (0, 0))
    store = RegionStore(folder, most_bytes=5_000)
    assert store.put("a", SOURCE)
    assert maps.exists()
    assert store.get("a") == SOURCE
