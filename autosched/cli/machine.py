"""Commands about what is here: ``models`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from autosched.cli.options import JsonOption
from autosched.cli.printing import emit, results_console, say

if TYPE_CHECKING:
    from autosched.doctor import Finding

_OTHER_FORMS = (
    "Any other model of torchvision or timm, by its name there: timm:resnet18",
    "Your own: module:function, where the function returns (model, example_inputs) or (model, example_inputs, example_kwargs)",
    "An exported program: FILE.pt2, written by torch.export.save",
)


def list_models(json: JsonOption = False) -> None:
    """List the built-in models, and the other ways to name a model."""
    from autosched.zoo_models import suite

    entries = suite.names()
    if json:
        emit({"models": entries})
        return
    from rich.table import Table

    table = Table(title="built-in models")
    for heading in ("name", "what it is", "needs"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        table.add_row(entry.name, entry.description, entry.package)
    console = results_console()
    console.print(table)
    for line in _OTHER_FORMS:
        say(console, line)


def doctor(json: JsonOption = False) -> None:
    """Say what this machine can do, and what is missing; problem is something needed, missing something optional.

    Exit code 5 if anything is a problem, else 3 if other processes keep the cores busy, else 0.
    """
    from autosched.doctor import examine

    findings = examine()
    if json:
        emit({"findings": findings})
    else:
        _print_findings(findings)
    raise typer.Exit(max((finding.state.exit_code for finding in findings), default=0))


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="autosched doctor")
    for heading in ("what", "state", "detail", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "busy": "red", "problem": "red"}
    for finding in findings:
        # Plain text: in rich's markup the extra in autosched[cuda] would be a style, and vanish.
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(Text(finding.what), state, Text(finding.detail), Text(finding.advice))
    results_console().print(table)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command("models")(list_models)
    app.command()(doctor)
