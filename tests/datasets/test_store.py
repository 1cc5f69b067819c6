"""The Parquet store passes the suite, and survives damage, parallel writers, and files of other versions."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autosched.core.errors import ArtifactCorrupt, IncompatibleArtifact, UsageError
from autosched.datasets import store as store_module
from autosched.datasets.schema import COLUMNS, SCHEMA, arrow_schema
from autosched.datasets.store import Store, union
from tests.conformance.store_suite import StoreSuite, example_rows


class TestParquetStore(StoreSuite):
    def make(self, folder: Path) -> Store:
        return Store.create(folder)

    def reopen(self, folder: Path) -> Store:
        return Store.open(folder)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "s")
    made.append(example_rows())
    return made


def test_pandas_alone_reads_a_table(store: Store) -> None:
    frame = pd.read_parquet(store.folder / "pairs")
    assert list(frame.columns) == list(COLUMNS["pairs"])
    assert frame["slowdown_last"].tolist() == [1.2, 1.2]


def test_pandas_reads_a_table_of_which_a_part_was_put_aside(store: Store) -> None:
    store.append(example_rows("xy"))
    part = sorted((store.folder / "pairs").glob("part-*.parquet"))[0]
    part.write_bytes(part.read_bytes()[:100])
    assert len(store.pairs()) == 2
    assert len(pd.read_parquet(store.folder / "pairs")) == 2


def test_units_travel_with_the_file(store: Store) -> None:
    (part,) = (store.folder / "solo").glob("part-*.parquet")
    schema = pq.read_schema(part)
    assert schema.field("solo_us").metadata == {b"unit": b"us"}
    assert schema.metadata[b"autosched.schema"] == str(SCHEMA).encode()


def test_every_flipped_byte_is_noticed_and_the_other_parts_stay(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.append(example_rows("xy"))
    part = sorted((store.folder / "solo").glob("part-*.parquet"))[0]
    sound = part.read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 40)):
        damaged = bytearray(sound)
        damaged[place] ^= 0x10
        part.write_bytes(bytes(damaged))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(Store.open(store.folder).solo()) == 2
        assert len(caplog.records) == 1
        (aside,) = (store.folder / "solo").glob("*.corrupt-*")
        aside.unlink()
    part.write_bytes(sound)
    assert len(Store.open(store.folder).solo()) == 4


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_a_truncated_or_foreign_part_is_put_aside(store: Store, content: bytes) -> None:
    part = next((store.folder / "pairs").glob("part-*.parquet"))
    part.write_bytes(content)
    again = Store.open(store.folder)
    assert again.pairs() == []
    assert again.keys("pairs") == set()
    # What was lost may be measured again.
    assert again.append(example_rows()) == 2


@pytest.mark.parametrize(("where", "refused"), [(store_module, "read_regular"), (Path, "rename")])
def test_a_part_that_may_not_be_read_or_put_aside_stays_and_the_others_are_read(
    where: object, refused: str, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.append(example_rows("xy"))
    part = sorted((store.folder / "solo").glob("part-*.parquet"))[0]
    part.write_bytes(b"damaged")
    usual = getattr(where, refused)

    def refuse(path: Path, *given: Path) -> object:
        if path == part:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *given)

    monkeypatch.setattr(where, refused, refuse)
    assert len(Store.open(store.folder).solo()) == 2
    assert "stays where it is" in caplog.text
    assert part.exists()


def foreign_part(folder: Path, table: pa.Table) -> None:
    import hashlib
    import io

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    (folder / f"part-{hashlib.sha256(buffer.getvalue()).hexdigest()}.parquet").write_bytes(buffer.getvalue())


@pytest.mark.parametrize("lack", [pa.ArrowException("Unknown error: Failed to launch worker thread"), MemoryError()])
def test_a_part_that_this_process_cannot_read_stays(
    store: Store, lack: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise lack

    before = sorted(store.folder.rglob("*.parquet*"))
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(pq, "ParquetFile", refuse)
        assert Store.open(store.folder).solo() == []
    assert "stays where it is" in caplog.text
    assert sorted(store.folder.rglob("*.parquet*")) == before
    assert len(Store.open(store.folder).solo()) > 0


@pytest.mark.parametrize("link", [True, False])
def test_what_lies_in_the_place_of_a_part_is_put_aside_when_the_part_is_written(
    link: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Store.create(tmp_path).append(example_rows())
    (part,) = (tmp_path / "solo").iterdir()
    part.unlink()
    if link:
        part.symlink_to(tmp_path / "nowhere" / "nothing")
    else:
        (part / "inside").mkdir(parents=True)
    store = Store.open(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.solo() == []
        assert store.solo() == []
        # It is read again and again in one job, and said once.
        assert caplog.text.count("cannot be read now") == 1
        store.append(example_rows())
    assert "it is no file" in caplog.text
    assert part.is_file()
    assert store.solo() == Store.open(tmp_path).solo() != []


def test_a_newer_schema_is_refused_by_name(store: Store) -> None:
    schema = arrow_schema("pairs").with_metadata({"autosched.table": "pairs", "autosched.schema": "99"})
    foreign_part(store.folder / "pairs", schema.empty_table())
    with pytest.raises(IncompatibleArtifact, match="schema: 99"):
        store.pairs()


def test_a_part_that_cannot_be_written_is_an_error_of_the_user_and_says_where(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    (tmp_path / "solo").rmdir()
    (tmp_path / "solo").write_text("not a folder")
    with pytest.raises(UsageError, match=r"cannot write runs to .*solo: "):
        store.append(example_rows())


def test_a_part_of_another_table_is_put_aside(store: Store) -> None:
    foreign_part(store.folder / "pairs", arrow_schema("solo").empty_table())
    assert len(store.pairs()) == 2
    assert list((store.folder / "pairs").glob("*.corrupt-*"))


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactCorrupt, match="autosched collect"):
        Store.open(tmp_path)
    with pytest.raises(UsageError, match="autosched collect"):
        Store.open(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="autosched collect"):
        Store.open(tmp_path / ("x" * 300))
    (tmp_path / "pairs").mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="permissions"):
        Store.open(tmp_path)


def test_a_store_from_before_some_tables_is_opened(tmp_path: Path) -> None:
    written = Store.create(tmp_path)
    written.append(example_rows())
    for table in ("groups", "limits"):
        shutil.rmtree(tmp_path / table)
    opened = Store.open(tmp_path)
    assert opened.pairs() == written.pairs()
    assert opened.groups() == opened.limits() == []


WRITER = """
import sys
from pathlib import Path
from autosched.datasets.store import Store
sys.path.insert(0, sys.argv[3])
from tests.conformance.store_suite import example_rows
store = Store.create(Path(sys.argv[1]))
for index in range(8):
    store.append(example_rows((f"{sys.argv[2]}{index}", f"{sys.argv[2]}{index}'")))
"""


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    root = str(Path(__file__).parents[2])
    writers = [subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(folder), name, root]) for name in ("x", "y")]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    store = Store.open(folder)
    assert len(store.solo()) == 32
    assert len(store.pairs()) == 32
    assert not list(folder.rglob("*.new"))


READER = """
import os, sys
from pathlib import Path
import pyarrow.parquet
from autosched.datasets.store import Store
store = Store.open(Path(sys.argv[1]))
before = os.listdir("/proc/self/task")
assert store.pairs() and store.solo()
print(len(os.listdir("/proc/self/task")) - len(before))
"""


def test_reading_starts_no_thread(store: Store) -> None:
    reader = [sys.executable, "-P", "-c", READER, str(store.folder)]
    assert subprocess.run(reader, check=True, capture_output=True, text=True, timeout=300).stdout.strip() == "0"


def test_union_of_several(tmp_path: Path) -> None:
    for name, letters in (("one", "ab"), ("two", "ac")):
        Store.create(tmp_path / name).append(example_rows(letters))
    joined = union([tmp_path / "one", tmp_path / "two"], tmp_path / "all")
    assert {row.kernel.signature for row in joined.solo()} == {"a", "b", "c"}


def test_of_two_measurements_of_one_thing_the_larger_counts(tmp_path: Path) -> None:
    import dataclasses

    from autosched.datasets.schema import SoloRow

    one, two = Store.create(tmp_path / "one"), Store.create(tmp_path / "two")
    one.append(example_rows())
    better = [
        dataclasses.replace(row, samples=dataclasses.replace(row.samples, count=99)) for row in example_rows() if isinstance(row, SoloRow)
    ]
    two.append(better)
    for part in (two.folder / "solo").glob("part-*.parquet"):
        (one.folder / "solo" / part.name).write_bytes(part.read_bytes())
    assert {row.samples.count for row in one.solo()} == {99}


@pytest.mark.parametrize(("loads", "kept"), [((-1.0, 0.0), 0.0), ((0.02, 0.0), 0.0), ((0.6, -1.0), -1.0), ((0.02, 0.6), 0.02)])
def test_of_two_measurements_of_one_size_the_one_known_to_be_quiet_counts(tmp_path: Path, loads: tuple[float, ...], kept: float) -> None:
    import dataclasses

    from autosched.core.records import Contamination
    from autosched.datasets.schema import SoloRow

    target = Store.create(tmp_path / "all")
    for place, load in enumerate(loads):
        other = Store.create(tmp_path / f"{place}")
        other.append([dataclasses.replace(row, contamination=Contamination(load)) for row in example_rows() if isinstance(row, SoloRow)])
        for part in (other.folder / "solo").glob("part-*.parquet"):
            (target.folder / "solo" / part.name).write_bytes(part.read_bytes())
    assert {row.contamination.foreign_load for row in target.solo()} == {kept}
