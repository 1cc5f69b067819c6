"""Every schema version has a step to the next, and the steps do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autosched.datasets.migrations import STEPS, upgraded
from autosched.datasets.schema import SCHEMA

COMPAT = Path(__file__).parents[1] / "compat" / "costmodel"


def test_there_is_a_step_and_a_golden_folder_for_every_version() -> None:
    assert set(STEPS) == set(range(1, SCHEMA))
    for version in range(1, SCHEMA + 1):
        assert (COMPAT / f"schema-{version}" / "store").is_dir(), "run make_golden.py when the schema is raised"


def test_groups_of_schema_1_ran_once() -> None:
    cells = upgraded("groups", 1, 2, {"finish_us": "[5.0,9.0,7.0]", "count": 3})
    assert json.loads(cells["repeats"]) == [1, 1, 1]
    assert cells["together_us"] == 9.0


@pytest.mark.parametrize("table", ["scopes", "solo", "pairs"])
def test_other_tables_of_schema_1_are_as_they_were(table: str) -> None:
    assert upgraded(table, 1, 2, {"key": "x"}) == {"key": "x"}
