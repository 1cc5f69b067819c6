"""Which cost model a job uses, what it says about it, and what it leaves to the next training."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pyarrow
import pytest

from autosched.config import measurements_dir
from autosched.core.graph import OpGraph
from autosched.core.records import Contamination, DeviceKey, PairRecord, Samples, SoftwareKey, SoloRecord
from autosched.datasets.facts import DeviceFacts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import ScopeRow
from autosched.datasets.store import Store
from autosched.device.base import Limits
from autosched.pipeline.memory import Measured, open_journal, remember_runs
from tests.conformance.programs import branches_program

KEY = DeviceKey("cuda", "a device", (("sm_count", "32"),))
LIMITS = Limits(2, (1,), (0,), True, 1.0, 5.0, 10.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))


def samples(time_us: float) -> Samples:
    return Samples(time_us, time_us, time_us, time_us, time_us, 9)


def test_only_undisturbed_runs_of_this_graph_are_left_for_training() -> None:
    graph = branches_program(branches=2, depth=1)[0].graph
    facts = DeviceFacts("a processor", "cpu", 2)
    key, software = DeviceKey("cpu", "a processor", (("cores", "2"),)), SoftwareKey(())
    scope = ScopeRow(Scope(key, software).digest, key, software, facts)
    loads = [0.0, 0.9, 0.0, 0.0, 0.0]
    solo = [[SoloRecord(operator.signature, 1, samples(10.0), Contamination(loads[operator.index]))] for operator in graph.operators]
    names = [graph.operators[0].signature, graph.operators[1].signature]
    good = PairRecord(names[0], 1, names[1], 1, 10.0, 10.0, 12.0, 1.1, 1.3, 0.6, 1, 1, 9, Contamination(0.0))
    pairs = [good, dataclasses.replace(good, last="of another model"), dataclasses.replace(good, first=names[1], last=names[0])]
    pairs[2] = dataclasses.replace(pairs[2], contamination=Contamination(0.9))
    folder = remember_runs(scope, graph, "zoo:net1", LIMITS, Measured(solo, pairs, {}), [])
    assert folder is not None
    store = Store.open(folder)
    assert [row.record for row in store.pairs()] == [good]
    assert {row.kernel.solo_us for row in store.solo()} == {10.0}
    assert all(row.contamination.foreign_load == 0.0 for row in store.solo())
    assert [row.graph for row in store.limits()] == [graph.hash]
    assert remember_runs(scope, graph, "zoo:net1", LIMITS, Measured(solo, pairs, {}), []) == folder
    assert len(Store.open(folder).pairs()) == 1


def test_a_cache_that_cannot_be_written_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "file"))
    assert remember_nothing() is None
    assert "not kept" in caplog.text


@pytest.mark.parametrize(
    ("error", "said"), [(pyarrow.ArrowMemoryError("malloc of size 192 failed"), "malloc of size 192 failed"), (MemoryError(), "no memory")]
)
def test_want_of_memory_to_write_with_is_a_warning(
    error: MemoryError, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(Store, "append", refuse)
    assert remember_nothing() is None
    assert said in caplog.text


def test_a_journal_of_a_newer_autosched_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    scope = Scope(KEY, SoftwareKey(()))
    path = measurements_dir() / f"{scope.digest}.jsonl"
    path.parent.mkdir(parents=True)
    body = b'{"schema":99,"something":"new"}'
    newer = b'{"check":"%s","entry":%s}\n' % (hashlib.sha256(body).hexdigest()[:16].encode(), body)
    path.write_bytes(newer)
    record = SoloRecord("a", 1, samples(10.0), Contamination(0.0))
    with open_journal(scope, private=False) as journal:
        journal.add(record)
    assert journal.solo("a", 1) == record
    assert path.read_bytes() == newer
    assert str(path) in caplog.text
    assert "schema: 99" in caplog.text
    assert "newer autosched" in caplog.text


def remember_nothing() -> Path | None:
    key = DeviceKey("cpu", "a processor", ())
    scope = ScopeRow("x", key, SoftwareKey(()), DeviceFacts("a processor", "cpu", 2))
    return remember_runs(scope, OpGraph((), (), (), ()), "zoo:net1", LIMITS, Measured([], [], {}), [])
