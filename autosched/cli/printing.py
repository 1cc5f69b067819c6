"""What the commands print: one JSON object, a report as a table, a progress bar on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from autosched.cli.endings import drop_output

if TYPE_CHECKING:
    from rich.console import Console

    from autosched.core.report import TuneReport
    from autosched.progress import LiveProgress


_LOADED = ("cpu", "cuda")
"""Kinds of devices that ``autosched.load`` runs schedules on."""

_WHOLE = re.compile(r"(?<!\w)'[^'\n]{1,60}'(?!\w)|(?<!\S)--?\w[\w-]* [^\s;]+")
"""What is copied from a sentence: a quoted command, and an option with its value."""


_for_json: BinaryIO | None = None
"""Where :func:`emit` writes within :func:`json_alone`."""


@contextlib.contextmanager
def json_alone() -> Iterator[None]:
    """Within, only :func:`emit` writes to stdout. What a user's model prints, and what processes print that it starts, goes to stderr."""
    global _for_json
    usual = sys.stdout
    try:
        number = usual.fileno()
    except (AttributeError, OSError):  # there is none, or it is Python's alone
        with open(os.devnull, "wb") as nowhere:
            _for_json, sys.stdout = getattr(usual, "buffer", nowhere), sys.stderr
            try:
                yield
            finally:
                _for_json, sys.stdout = None, usual
        return
    usual.flush()
    # Before the copy is made, which would else be number 2 where that is free.
    others = os.dup(2) if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY)
    kept = _for_json = open(os.dup(number), "wb")  # noqa: SIM115
    os.dup2(others, number)
    try:
        yield
    finally:
        _for_json = None
        with contextlib.suppress(OSError):
            usual.flush()
        os.dup2(kept.fileno(), number)
        os.close(others)
        # Whoever read it may have left, which was said when it was written to.
        with contextlib.suppress(OSError):
            kept.close()


def emit(value: Any) -> None:
    """Write ``value`` (anything msgspec can encode) to stdout as one JSON object, in UTF-8 whatever the terminal's encoding.

    A file's name may hold bytes that are no UTF-8; they are spelt out, as on stderr.
    """
    import msgspec

    stdout = _for_json if _for_json is not None else getattr(sys.stdout, "buffer", None)
    # None where the process was started without one.
    if stdout is None:
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(_spelt_out(msgspec.to_builtins(value)))
    # Where nobody reads it, the command goes on to its exit code.
    with contextlib.suppress(BrokenPipeError):
        stdout.write(msgspec.json.format(encoded, indent=2) + b"\n")
        stdout.flush()


def _spelt_out(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_spelt_out(key): _spelt_out(item) for key, item in value.items()}
    return [_spelt_out(item) for item in value] if isinstance(value, list | tuple) else value


def spell_out_what_has_no_letter() -> None:
    """From now on stdout writes characters that its encoding lacks as escapes, as stderr does; a model's name must not end a job.

    Where the locale is C, Python has stdout write the bytes of names that are no text, which in UTF-8 is all that it cannot encode.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and (sys.stdout.errors == "strict" or sys.stdout.encoding.lower() != "utf-8"):
        sys.stdout.reconfigure(errors="backslashreplace")


def results_console() -> Console:
    """Where tables go: stdout, and in a file or a pipe they keep all their columns."""
    from rich.console import Console

    class Stdout(Console):
        def on_broken_pipe(self) -> None:
            # What nobody reads, the exit code still says; rich would end the command here.
            drop_output()

    # A path between two colons is no emoji.
    console = Stdout(emoji=False)
    return console if console.is_terminal else Stdout(width=150, emoji=False)


def folded(text: str, width: int) -> str:
    """``text`` in lines of at most ``width``, which end between words; a path, a name and what is copied from a sentence stay whole.

    What goes on in another line is indented as its first one is.

    >>> print(folded("the analytic prior alone ('autosched train' makes a model)", 40))
    the analytic prior alone
    ('autosched train' makes a model)
    """
    lines = (_WHOLE.sub(lambda found: found[0].replace(" ", "\0"), line) for line in text.splitlines())
    return "\n".join(_folded(line, max(width, 40)) for line in lines).replace("\0", " ")


def _folded(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def say(console: Console, sentence: str, *, style: str = "") -> None:
    """Print a sentence: in a file or a pipe one line, on a terminal as many as it takes."""
    text = folded(sentence, console.width) if console.is_terminal else sentence
    console.print(text, highlight=False, markup=False, soft_wrap=True, style=style or None)


def tell(text: str) -> None:
    """Print the sentences of a result, each in a line of its own, as :func:`say` does."""
    console = results_console()
    for sentence in text.splitlines():
        say(console, sentence)


def complain(message: str) -> None:
    """Write ``message`` to stderr; on a terminal lines end between words."""
    # None where the process was started without one, and print would take stdout instead.
    if sys.stderr is None:
        return
    if sys.stderr.isatty():
        message = folded(message, shutil.get_terminal_size().columns)
    # Nobody reads it, or its terminal or disk takes no more: there is no other place to say so.
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr)


def tell_what_compiles_besides(device: str, effort: str, budget_s: float | None, leave_out: str) -> None:
    """Say, before the minutes that it takes, that compiling baselines is in no budget; ``leave_out`` is the option that does without."""
    from autosched.pipeline.budget import budget_for

    if device.startswith("replay:"):
        return
    total_s = budget_for(effort, budget_s).total_s
    complain(
        f"autosched: torch.compile is measured, too; compiling for it is not in the budget of {total_s:g} s and can take minutes more; "
        f"{leave_out} leaves it out"
    )


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Within, warnings of autosched's own are complaints: a line of its source says nothing to whoever typed a command."""
    usual = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if category.__module__.partition(".")[0] == "autosched":
            complain(str(message))
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


def live_progress(*, quiet: bool = False) -> LiveProgress:
    """A progress bar on stderr, to be used with ``with``; where nobody reads that any more, or wants to, the job goes on without a word.

    So it does where its terminal is gone without a signal (``disown``, ``setsid``), or there is no room for more of it.
    """
    from rich.console import Console

    from autosched.progress import LiveProgress

    class Stderr(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

        def _check_buffer(self) -> None:
            try:
                super()._check_buffer()
            except OSError:
                self.on_broken_pipe()

    return LiveProgress(Stderr(stderr=True, quiet=quiet))


def show_report(report: TuneReport, as_json: bool, *, with_steps: bool = True, namespaces: Sequence[str] = ()) -> None:
    """Print a report.

    Args:
        namespaces: custom operators that were trusted.
        with_steps: whether to say where the schedule is and how to use it; not for one of several that are in one file.

    Raises:
        typer.Exit: with code 3 if the machine was too restless for any statement.
    """
    if as_json:
        emit(report)
    else:
        steps = next_steps(report.bundle, report.cached, report.device.kind, report.model, namespaces) if with_steps else ()
        _print_report(report, steps)
    if report.unstable:
        from autosched.core.report import RESTLESS

        complain(f"autosched: {RESTLESS}")
        raise typer.Exit(3)


def _print_report(report: TuneReport, last: tuple[str, ...]) -> None:
    from autosched.cli.strategy_table import strategy_table
    from autosched.core.report import where_time_went

    console = results_console()
    table, dropped = strategy_table(report, console)
    console.print(table)
    if dropped:
        wider = f"not shown for want of width: {', '.join(dropped)}; widen the terminal, pipe into a file, or use --json"
        say(console, wider, style="dim")
    for failed in report.strategies:
        if failed.failure is not None:
            say(console, f"{failed.name} failed, {failed.failure.kind}: {failed.failure.detail}")
    for several in report.found_by_several():
        say(console, several)
    say(console, report.verdict)
    for tried in report.lowerings:
        say(console, f"lowering {tried.sentence()}")
    for note in report.notes:
        say(console, f"note: {note}")
    counted = f"{report.measurements} measurements, {report.failures} failures, {report.search_s:.1f} s"
    say(console, f"{counted}, noise floor {report.noise_floor_pct:.1f} %, seed {report.seed}")
    if spent := where_time_went(report.stages):
        say(console, f"where the time went: {spent}")
    for line in last:
        # Commands: nothing but the terminal breaks them.
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def next_steps(bundle: str | None, cached: str | None, kind: str, model: str, namespaces: Sequence[str] = ()) -> tuple[str, ...]:
    """Where a schedule for a device of ``kind`` went and how to use it; nothing for a comparison, which keeps none.

    Args:
        model: its name, which commands are told unless a library has it.
        namespaces: custom operators that were trusted.
    """
    from autosched.zoo import of_library

    named = "" if of_library(model) else f" {shlex.quote(model)}"
    trusted = f" --custom-operators {shlex.quote(','.join(namespaces))}" if namespaces else ""
    keyword = f", custom_operators={list(namespaces)!r}" if namespaces else ""
    if bundle:
        return (
            f"written to {bundle}",
            f"measure it again: autosched bench {shlex.quote(bundle)}{named}{trusted}",
            f"run it: autosched.load({bundle!r}, model{keyword})" if kind in _LOADED else f"nothing here loads what was made for {kind!r}",
        )
    if cached:
        option = f', options={{"custom_operators": {list(namespaces)!r}}}' if namespaces else ""
        found_by = f'torch.compile(model, backend="autosched"{option}) or autosched.compile(model, inputs{keyword})'
        return (
            f"kept in the cache: {cached}",
            f"measure it again: autosched bench {shlex.quote(cached)}{named}{trusted}",
            f"run it: {found_by} finds it on this machine",
            "to take it along or to load it by name: -o FILE",
        )
    return ()
