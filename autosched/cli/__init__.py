"""The command line. Results go to stdout, everything else to stderr; with ``--json`` stdout holds one JSON object and nothing else.

Exit codes: 0 ok, 2 usage, 3 unstable measurement, 4 incompatible or corrupt artifact, 5 device missing or faulty, or a problem
that doctor found, 129 its terminal was closed (SIGHUP), 130 interrupted, 143 asked to stop by SIGTERM.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import logging
import sys
from typing import Annotated

import typer

from autosched.cli import bundles, cache, costmodel, machine, tuning
from autosched.cli.endings import INTERRUPTED, drop_output, flush_output, how_to_go_on, reader_left, stoppable, sudden_ends
from autosched.cli.printing import complain, emit, json_alone, plain_warnings, spell_out_what_has_no_letter
from autosched.core.errors import AutoschedError

_HELP = """Decide when and where each operator of a PyTorch model runs: measure, search, verify, export, load.

To begin: autosched doctor, then autosched tune torchvision:googlenet --effort quick -o googlenet.autosched
"""
_EPILOG = (
    "Exit codes: 0 ok, 2 a mistake in the command, 3 the machine was too noisy for any conclusion, 4 an incompatible or corrupt file, "
    "5 a missing or faulty device, or a problem that doctor found, 129 stopped by SIGHUP, 130 interrupted, 143 stopped by SIGTERM."
)

app = typer.Typer(
    name="autosched",
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from autosched import __version__

        print(f"autosched {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    pass


for commands in (tuning, bundles, cache, costmodel, machine):
    commands.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    # The interpreter looks through all that there is several times as it ends, for seconds where PyTorch has captured a model.
    atexit.register(gc.freeze)
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("autosched: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    spell_out_what_has_no_letter()
    given = arguments if arguments is not None else sys.argv[1:]
    # Help is for whoever reads it, whatever else was asked for.
    alone = "--json" in given and not {"-h", "--help", "--version"} & set(given)
    with stoppable() as stop, plain_warnings(), json_alone() if alone else contextlib.nullcontext():
        with sudden_ends(lambda status: _ended_from_within(status, "--json" in given)):
            code = _run(given)
        if code == INTERRUPTED:
            code = _say("Interrupted", how_to_go_on(given), stop.exit_code, "--json" in given)
    raise SystemExit(code)


def _run(arguments: list[str]) -> int:
    """The exit code; ``INTERRUPTED`` for whatever interrupted it."""
    as_json = "--json" in arguments
    code: object
    try:
        code = app(args=arguments, standalone_mode=False)
        flush_output()
    except AutoschedError as error:
        code = _fail(error, as_json)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as stopped:
        code = 0 if reader_left(stopped) else _stopped_from_within(stopped, as_json)
    except OSError as error:
        code = 0 if reader_left(error) else _no_room(error, as_json)
    except Exception as error:
        code = _typer_exit(error, as_json)
    finally:
        if "torch._inductor.async_compile" in sys.modules:
            from autosched.runtime.inductor.pools import end_pools

            end_pools()
    return code if isinstance(code, int) else 0


class _ToStderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at the moment, so that a line does not cut a progress bar in two."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(self.format(record))


def _typer_exit(error: Exception, as_json: bool) -> int:
    """The exit code of click's own errors (bad options, aborts); anything else is a bug and is raised again."""
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        _tell_of_a_bug(error, as_json)
        raise error
    if as_json:
        # The attribute "message" is empty where an argument is missing.
        _emit_error("UsageError", getattr(error, "format_message", error.__str__)(), code)
    show()
    return int(code)


def _no_room(error: OSError, as_json: bool) -> int:
    """The exit code where a disk is full, or a file as large as it may be, and a word on it; all else is a bug and is raised again."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _tell_of_a_bug(error, as_json)
        raise error
    where = error.filename or "where the output goes, or in the folder for temporary files"
    code = _say("NoRoom", f"{error.strerror}: {where}", 2, as_json)
    # What could not be written must not be tried again at the end of the interpreter.
    drop_output()
    return code


def _stopped_from_within(stopped: SystemExit, as_json: bool) -> int:
    """No command ends so by itself; a user's code that it called does, and what was asked for has not been done."""
    said = f": {stopped.code}" if isinstance(stopped.code, str) else f" with sys.exit({'' if stopped.code is None else stopped.code})"
    return _say("SystemExit", f"code that the command called ended it{said}. Look for sys.exit in the model's code.", 2, as_json)


def _ended_from_within(status: int, as_json: bool) -> int:
    said = f"code that the command called ended it with os._exit({status}). Look for os._exit in the model's code."
    code = _say("SystemExit", said, 2, as_json)
    with contextlib.suppress(OSError):
        flush_output()
    return code


def _fail(error: AutoschedError, as_json: bool) -> int:
    return _say(type(error).__name__, str(error), error.exit_code, as_json)


def _say(kind: str, message: str, code: int, as_json: bool) -> int:
    """Tell how a command ended, on stderr, and on stdout where JSON was asked for; ``code`` again."""
    complain(f"autosched: {message}")
    if as_json:
        _emit_error(kind, message, code)
    return code


def _tell_of_a_bug(error: Exception, as_json: bool) -> None:
    """Whoever reads JSON gets an object even then; the traceback, which Python writes, is for people."""
    if as_json:
        _emit_error(type(error).__name__, str(error), 1)


def _emit_error(kind: str, message: str, code: int) -> None:
    try:
        emit({"error": {"type": kind, "message": message, "exit_code": code}})
    except OSError:  # nobody reads it, or there is no room for it: the exit code remains
        drop_output()
