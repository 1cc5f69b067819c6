"""Words of a model or of a failure are printed as they are: square brackets are no markup."""

from __future__ import annotations

import dataclasses

import pytest

from autosched.cli.printing import show_report
from autosched.core.records import Failure, FailureKind
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


def test_brackets_in_names_details_and_notes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    report = two_branches_bundle(TwoBranches()).evidence.report
    failed = dataclasses.replace(report.strategies[-1], failure=Failure(FailureKind.CRASH, "bad [/shape] in [red]aten[/red]"))
    notes = ("pip install 'autosched[cuda]'",)
    shown = dataclasses.replace(report, model="m[/b]", strategies=(*report.strategies[:-1], failed), notes=notes, verdict="kept [/x]")
    show_report(shown, as_json=False)
    printed = capsys.readouterr().out
    for words in ("m[/b]", "bad [/shape] in [red]aten[/red]", "pip install 'autosched[cuda]'", "kept [/x]"):
        assert words in printed
