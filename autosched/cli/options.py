"""Options and arguments that several commands share, with one wording."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from autosched.config import check_seed
from autosched.core.errors import UsageError
from autosched.core.variants import Lowering
from autosched.runtime.kept_memory import keep_memory


def _checked_seed(seed: int) -> int:
    check_seed(seed)
    return seed


QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but warnings and errors.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, auto (CUDA if there is a GPU), or replay:DIR for recorded runs.")]
ChosenDeviceOption = Annotated[str, typer.Option("--device", help="Such as cuda:1; auto is the first here that the file was tuned for.")]
EffortOption = Annotated[str, typer.Option(help="quick (60 s), balanced (150 s) or full (1200 s of measuring and searching).")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time for measuring and searching instead of --effort's, such as 60s or 5m; torch.compile, where measured, compiles besides.",
    ),
]
BatchOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Batch size of the example inputs.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.")]
CostModelOption = Annotated[
    Path | None,
    typer.Option("--cost-model", metavar="DIR", help="A folder of 'autosched train'; default: the one that 'autosched doctor' names."),
]
CustomOperatorsOption = Annotated[
    str | None,
    typer.Option("--custom-operators", metavar="NAMES", help="Namespaces of custom operators that may run, such as mylib or mylib,other."),
]
SeedOption = Annotated[int, typer.Option(callback=_checked_seed, help="Seed of every random choice.")]
KeepMemoryOption = Annotated[
    bool,
    typer.Option(
        "--keep-memory", help="Keep freed memory between calls (CPU, glibc), as a process that calls autosched.keep_memory() before 'load'."
    ),
]
RewriteOption = Annotated[
    bool, typer.Option("--rewrite/--no-rewrite", help="Fold, simplify and fuse operators first; --no-rewrite is --lowering aten.")
]
LoweringOption = Annotated[
    str | None,
    typer.Option("--lowering", help=f"What an operator is: {', '.join(Lowering)}; default auto: try them, keep the best."),
]
ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="torchvision:NAME, timm:NAME, transformers:NAME, autosched:NAME, module:function or FILE.pt2."),
]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A tuned schedule, written by 'autosched tune'.")]


def keep_memory_if(wanted: bool) -> None:
    """Do what ``--keep-memory`` asks for.

    Raises:
        UsageError: if this C library cannot.
    """
    if wanted and not keep_memory():
        raise UsageError("--keep-memory is for Linux with glibc, and this is another C library; leave it out")


def names_in(text: str | None) -> tuple[str, ...]:
    """The names of a comma-separated list; none of nothing.

    >>> names_in("mylib, other")
    ('mylib', 'other')
    """
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def check_spared(output: Path, *sources: str | Path) -> None:
    """Refuse, before anything is done, to put a result in the place of what it is made from.

    Args:
        sources: what the command reads; not all of it need be files.

    Raises:
        UsageError: if ``output`` is one of ``sources``, by whatever name.
    """
    for source in sources:
        try:
            same = os.path.samefile(output, source)
        except (OSError, ValueError):  # one of them is not there, or can be no file
            continue
        if same:
            raise UsageError(f"cannot write {output}: it is what this command reads, and would be lost; name another file")
