"""``autosched cache``: what is listed and removed is said, nothing is removed unasked, and JSON is JSON."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from autosched import config
from autosched.cli.cache import age_text
from autosched.export.cache import keep
from autosched.runtime.regions.store import RegionStore
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.command import run
from tests.conformance.graphs import TwoBranches

_BUNDLE = two_branches_bundle(TwoBranches())
_MODEL = _BUNDLE.evidence.report.model


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one tuned schedule and one compiled region."""
    monkeypatch.setenv("AUTOSCHED_CACHE", str(tmp_path / "cache"))
    RegionStore(config.regions_dir()).put("region", "code")
    kept = keep(config.schedules_dir(), _BUNDLE)
    assert kept is not None
    return kept


class Terminal(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


def test_the_list_says_what_is_there_and_whether_it_is_found(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache") == 0
    printed = capsys.readouterr().out
    for words in (_MODEL, "found", entry.name[:8], "schedules", "regions", str(config.cache_dir())):
        assert words in printed


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_terminal_cuts_nothing_off(
    entry: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    assert run("cache") == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table, _, last = plain.rstrip().rpartition("\n")
    assert max(map(len, table.splitlines())) <= width
    assert last.endswith(str(config.cache_dir()))  # a path is not broken
    words = "".join(re.sub(r"[^\w:]", "", line) for line in table.splitlines())
    assert entry.name[:8] in words
    assert "…" not in table


def test_json_has_every_field(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    (schedule,) = said["schedules"]
    assert (schedule["model"], schedule["file"], schedule["here"]) == (_MODEL, entry.name, "found")
    assert schedule["size_bytes"] == entry.stat().st_size
    assert {row["kind"]: row["files"] for row in said["kinds"]} == {"schedules": 1, "regions": 1}
    assert said["size_bytes"] == sum(row["size_bytes"] for row in said["kinds"])


def test_an_empty_cache_says_so(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "clear", "--yes") == 0
    assert "removed schedules: 1 file" in capsys.readouterr().out
    assert not entry.exists()
    assert run("cache") == 0
    assert "nothing in" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("cache", "clear"), ("cache", "clear", _MODEL, "--json"), ("cache", "--json", "clear")])
def test_nothing_is_removed_where_nobody_can_be_asked(
    arguments: tuple[str, ...], entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("y\n") if "--json" in arguments else io.StringIO("y\n"))
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert "--yes" in printed.err
    assert bool(printed.out) == ("--json" in arguments)
    assert entry.exists()


@pytest.mark.parametrize(("answer", "gone"), [("n", False), ("", False), ("y", True)])
def test_who_is_asked_is_told_what_it_is_about(
    answer: str, gone: bool, entry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    assert run("cache", "clear", "schedules") == 0
    printed = capsys.readouterr()
    assert "1 file" in printed.err
    assert entry.exists() is not gone
    assert ("removed" in printed.out) is gone
    assert RegionStore(config.regions_dir()).get("region") == "code"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("nothing:here",), _MODEL), (("--older-than", "soon"), "30d"), (("--older-than", "-1d"), "--older-than")],
)
def test_a_mistake_removes_nothing(arguments: tuple[str, ...], words: str, entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "clear", "--yes", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert entry.exists()


def test_what_is_young_stays(entry: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cache", "clear", "--older-than", "30d", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == []
    assert run("cache", "clear", "--older-than", "30d") == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert entry.exists()


@pytest.mark.parametrize("age_s", [3.0, 300.0, 7300.0, 3e6])
def test_an_age_is_shown_in_a_unit_that_can_be_asked_for(age_s: float) -> None:
    assert config.parse_seconds(age_text(age_s).replace(" ", ""), "--older-than") == pytest.approx(age_s, rel=0.05)
