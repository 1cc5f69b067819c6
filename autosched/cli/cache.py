"""What tuning left in the cache folder: ``autosched cache`` lists it, ``autosched cache clear`` removes it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from autosched.cli.options import JsonOption
from autosched.cli.printing import complain, emit, results_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from autosched.cache_folder import CacheListing, Cleared, Entry, Item, KindSize

commands = typer.Typer(
    help="List what tuning left in the cache folder, and which tuned schedules are found on this machine.",
    invoke_without_command=True,
    epilog="Example: autosched cache clear --older-than 30d",
)


@commands.callback()
def show(context: typer.Context, json: JsonOption = False) -> None:
    """List what tuning left in the cache folder, and which tuned schedules are found on this machine."""
    context.obj = json
    if context.invoked_subcommand is not None:
        return
    from autosched.cache_folder import listing

    found = listing()
    if json:
        emit(found)
    else:
        _print_listing(found)


@commands.command()
def clear(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Kinds (schedules, regions, ...), models (torchvision:*) or file names, as 'autosched cache' lists them; default: all.",
        ),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Only what was not written for so long, such as 30d or 12h.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove what is in the cache, after asking; only files that autosched wrote, and none that a running job holds.

    Compiled code counts as old when it was not used for so long.

    Example: autosched cache clear --older-than 30d
    Example: autosched cache clear torchvision:googlenet regions
    """
    from autosched import cache_folder, config
    from autosched.core.errors import UsageError

    as_json = json or bool(context.obj)
    age_s = config.parse_seconds(older_than, "--older-than") if older_than is not None else None
    chosen = cache_folder.select(names or (), age_s)
    if not chosen and not as_json:
        print(f"nothing to remove in {config.cache_dir()}")
        return
    if chosen and not yes:
        if as_json or sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"nothing was removed; add --yes to remove {_what(chosen)}: with --json, or no terminal, nobody is asked")
        for line in _lines(cache_folder.sizes(chosen)):
            complain(line)
        if not typer.confirm(f"Remove {_what(chosen)} from {config.cache_dir()}?", err=True):
            complain("nothing was removed")
            return
    cleared = cache_folder.clear(chosen)
    if as_json:
        emit(cleared)
    else:
        _print_cleared(cleared)


def _print_listing(found: CacheListing) -> None:
    console = results_console()
    if not found.kinds:
        console.print(f"nothing in {found.folder}", highlight=False, markup=False, soft_wrap=True)
        return
    if found.schedules:
        console.print(_schedules(found.schedules))
    console.print(_kinds(found))
    console.print(f"{size_text(found.size_bytes)} in {found.folder}", highlight=False, markup=False, soft_wrap=True)


def _schedules(entries: Sequence[Entry]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="tuned schedules", box=box.SIMPLE_HEAD)
    for heading in ("model", "made for", "age", "size", "file", "on this machine"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("age", "size", "file"))
    for entry in entries:
        # Plain text: a model's name or a difference may look like markup.
        cells = (
            "\n".join(filter(None, (entry.model, entry.inputs))),
            ", ".join(filter(None, (entry.device, entry.lowering))),
            age_text(entry.age_s),
            size_text(entry.size_bytes),
            entry.file[:8],
            _state(entry),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _state(entry: Entry) -> str:
    if not entry.differences:
        return str(entry.here)
    more = f" (and {len(entry.differences) - 1} more)" if len(entry.differences) > 1 else ""
    return f"{entry.here}: {entry.differences[0]}{more}"


def _kinds(found: CacheListing) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="by kind", box=box.SIMPLE_HEAD)
    for heading, justify in (("kind", "left"), ("files", "right"), ("size", "right"), ("what it is", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold", no_wrap=heading != "what it is")
    for row in found.kinds:
        table.add_row(row.kind, str(row.files), size_text(row.size_bytes), row.about)
    return table


def _print_cleared(cleared: Cleared) -> None:
    for line in _lines(cleared.removed):
        print(f"removed {line}")
    for item in cleared.stayed:
        print(f"left {item.path}: {item.why}")
    print(f"{size_text(cleared.size_bytes)} removed from {cleared.folder}")


def _lines(sizes: Sequence[KindSize]) -> list[str]:
    return [f"{row.kind}: {_counted(row.files)}, {size_text(row.size_bytes)}" for row in sizes]


def _what(chosen: Sequence[Item]) -> str:
    return f"{_counted(sum(item.files for item in chosen))}, {size_text(sum(item.size_bytes for item in chosen))}"


def _counted(files: int) -> str:
    return f"{files} file" if files == 1 else f"{files} files"


def size_text(size_bytes: int) -> str:
    """Bytes for people.

    >>> size_text(2_500_000)
    '2.4 MiB'
    """
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = size_bytes / 1024
    for unit in ("KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def age_text(age_s: float) -> str:
    """Seconds for people, in a unit that ``--older-than`` takes.

    >>> age_text(7300)
    '2 h'
    """
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def register(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.add_typer(commands, name="cache")
