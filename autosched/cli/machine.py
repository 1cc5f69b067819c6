"""Commands about what is here: ``models`` and ``doctor``."""

from __future__ import annotations

import typer

from autosched.cli.options import JsonOption
from autosched.cli.printing import emit


def list_models(json: JsonOption = False) -> None:
    """List the models that can be tuned by name."""
    from autosched import zoo

    entries = zoo.names()
    if json:
        emit({"models": entries})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="models that can be named; any other torchvision, timm or transformers name works too")
    for heading in ("name", "what it is", "needs"):
        table.add_column(heading)
    for entry in entries:
        table.add_row(entry.name, entry.description, entry.package)
    Console().print(table)


def doctor(json: JsonOption = False) -> None:
    """Say what this machine can do, and what is missing."""
    from autosched.doctor import examine

    findings = examine()
    if json:
        emit({"findings": findings})
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="autosched doctor")
    for heading in ("what", "state", "detail", "what to do"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "problem": "red"}
    for finding in findings:
        # Plain text: in rich's markup the extra in autosched[cuda] would be a style, and vanish.
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(Text(finding.what), state, Text(finding.detail), Text(finding.advice))
    Console().print(table)


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command("models")(list_models)
    app.command()(doctor)
