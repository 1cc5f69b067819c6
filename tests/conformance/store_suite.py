"""What every store of runs must do: inherit :class:`StoreSuite` and say how to make and open one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autosched.core.errors import UsageError
from autosched.core.records import Contamination, DeviceKey, GroupRecord, PairRecord, Samples, ScheduleRecord, SoftwareKey
from autosched.core.schedule import canonical_key, make_schedule
from autosched.datasets.facts import DeviceFacts, KernelFacts, LaunchFacts
from autosched.datasets.journal import Scope
from autosched.datasets.schema import TABLES, GraphRow, GroupRow, LimitsRow, PairRow, Row, ScheduleRow, ScopeRow, SoloRow
from autosched.datasets.store import Store
from autosched.search.synthetic import make_graph

DEVICE = DeviceKey("cpu", "suite", (("cores", "2"),))
SOFTWARE = SoftwareKey((("torch", "2.13"),))
SCOPE = Scope(DEVICE, SOFTWARE).digest


def example_rows(names: str = "ab") -> list[Row]:
    """A scope, two kernels alone (one with launch facts), a pair with a repeat, and a group."""
    clean = Contamination(0.01, 2400.0)
    rows: list[Row] = [ScopeRow(SCOPE, DEVICE, SOFTWARE, DeviceFacts("suite", "cpu", 2, 100.0, 20.0, 1 << 20))]
    for name, launch in zip(names, (None, LaunchFacts(12, 256, 32, 1024, 4, 2)), strict=True):
        facts = KernelFacts(name, 1, "aten::relu", 10, 400, 400, 100, 5.5, 1, launch)
        rows.append(SoloRow(SCOPE, "fam", "zoo:fam1", facts, Samples(5.5, 5.0, 6.0, 7.0, 4.5, 11), clean))
    record = PairRecord(names[0], 1, names[1], 1, 5.5, 5.5, 6.5, 1.05, 1.2, 0.59, 3, 3, 11, clean)
    rows += [PairRow(SCOPE, "fam", "zoo:fam1", record), PairRow(SCOPE, "fam", "zoo:fam1", dataclasses.replace(record, together_us=6.6), 1)]
    three = (names[0], names[1], names[0])
    rows.append(
        GroupRow(SCOPE, "fam", "zoo:fam1", GroupRecord(three, (1, 1, 1), (5.5, 5.5, 5.5), (1, 2, 1), (6.0, 7.0, 8.0), 8.5, 5, clean))
    )
    rows += schedule_rows(names, clean)
    return rows


def schedule_rows(names: str, clean: Contamination) -> list[Row]:
    """A graph of one operator for each name, a schedule of it, and what schedules of it may use."""
    graph = make_graph([[] for _ in names], [sum(name.encode()) for name in names])
    bare = dataclasses.replace(graph, operators=tuple(dataclasses.replace(item, source="") for item in graph.operators))
    chosen = make_schedule(bare, range(len(bare)), [index % 2 for index in range(len(bare))])
    record = ScheduleRecord(canonical_key(bare, chosen, lanes_matter=True), Samples(9.0, 8.5, 9.5, 10.0, 8.0, 24), 4096, clean)
    return [
        GraphRow("fam", "zoo:fam1", bare),
        ScheduleRow(SCOPE, "fam", "zoo:fam1", bare.hash, "beam", False, chosen, 8.75, "analytic", record),
        LimitsRow(SCOPE, "fam", "zoo:fam1", bare.hash, 2, (1, 2), (0,), True, 1.5, 20.0, 12.0),
    ]


class StoreSuite:
    """Abstract: ``make`` returns an empty store at a folder, ``reopen`` opens it again."""

    def make(self, folder: Path) -> Store:
        raise NotImplementedError

    def reopen(self, folder: Path) -> Store:
        raise NotImplementedError

    def test_rows_come_back_as_they_went_in(self, tmp_path: Path) -> None:
        rows = example_rows()
        assert self.make(tmp_path / "s").append(rows) == len(rows)
        store = self.reopen(tmp_path / "s")
        back = [row for table in TABLES for row in store.rows(table)]
        assert len(back) == len(rows)
        assert all(row in back for row in rows)

    def test_nothing_is_stored_twice(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "s")
        store.append(example_rows())
        assert store.append(example_rows()) == 0
        assert self.reopen(tmp_path / "s").append(example_rows()) == 0
        assert len(store.pairs()) == 2

    def test_keys_are_of_the_question_not_the_answer(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "s")
        store.append(example_rows())
        for pair in store.pairs():
            slower = dataclasses.replace(pair, record=dataclasses.replace(pair.record, together_us=99.0))
            assert slower.key in store.keys("pairs")

    def test_merging_adds_what_is_new(self, tmp_path: Path) -> None:
        one, two = self.make(tmp_path / "one"), self.make(tmp_path / "two")
        one.append(example_rows("ab"))
        two.append(example_rows("ac"))
        assert one.merge(two) > 0
        assert {row.kernel.signature for row in one.solo()} == {"a", "b", "c"}
        assert one.merge(two) == 0

    def test_a_number_that_is_not_finite_is_refused(self, tmp_path: Path) -> None:
        store = self.make(tmp_path / "s")
        pair = next(row for row in example_rows() if isinstance(row, PairRow))
        bad = dataclasses.replace(pair, record=dataclasses.replace(pair.record, slowdown_last=float("nan")))
        with pytest.raises(UsageError, match="slowdown_last"):
            store.append([bad])
        assert not store.pairs()
