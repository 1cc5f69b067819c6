"""The command line. Results go to stdout, everything else to stderr; with ``--json`` stdout holds one JSON object and nothing else.

Exit codes: 0 ok, 2 usage, 3 unstable measurement, 4 incompatible or corrupt artifact, 5 device missing or faulty, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from autosched.cli import bundles, cache, costmodel, machine, tuning
from autosched.cli.printing import complain, emit
from autosched.core.errors import AutoschedError

_INTERRUPTED = 130  # 128 + SIGINT, as a shell would say it

_HELP = """Decide when and where each operator of a PyTorch model runs: measure, search, verify, export, load.

To begin: autosched doctor, then autosched tune torchvision:googlenet --effort quick -o googlenet.autosched
"""
_EPILOG = (
    "Exit codes: 0 ok, 2 a mistake in the command, 3 the machine was too restless for any statement, 4 an incompatible or corrupt file, "
    "5 a missing or faulty device, 130 interrupted."
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
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("autosched: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    as_json = "--json" in (arguments if arguments is not None else sys.argv[1:])
    try:
        code = app(args=arguments, standalone_mode=False)
    except AutoschedError as error:
        _fail(error, as_json)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except SystemExit as stopped:
        # typer turns Ctrl-C into an exit of its own, without a word.
        code = stopped.code
    except Exception as error:
        code = _typer_exit(error, as_json)
    finally:
        if "torch._inductor.async_compile" in sys.modules:
            from autosched.runtime.inductor_pools import end_pools

            end_pools()
    if code == _INTERRUPTED:
        complain("autosched: interrupted; finished measurements are kept, the same command goes on from them")
    raise SystemExit(code if isinstance(code, int) else 0)


class _ToStderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at the moment, so that a line does not cut a progress bar in two."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _typer_exit(error: Exception, as_json: bool) -> int:
    """The exit code of click's own errors (bad options, aborts); anything else is a bug and is raised again."""
    if type(error).__name__ == "Abort":
        return _INTERRUPTED
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        raise error
    if as_json:
        emit({"error": {"type": "UsageError", "message": str(getattr(error, "message", error)), "exit_code": code}})
    show()
    return int(code)


def _fail(error: AutoschedError, as_json: bool) -> None:
    if as_json:
        emit({"error": {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}})
    complain(f"autosched: {error}")
