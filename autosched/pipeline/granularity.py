"""How coarse operators are: which lowerings a job considers, and the note that points to them where one was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from autosched.core.errors import UsageError
from autosched.core.graph import Operator
from autosched.core.program import Program
from autosched.core.report import LoweringOutcome, LoweringRow, TuneReport
from autosched.core.variants import WHOLE, Lowering, lowering_named
from autosched.runtime.regions.compile import missing_compiler
from autosched.runtime.regions.row_products import has_row_product

AUTO = "auto"
"""Try every lowering that can be compiled here, tune the one or two that can win, and keep the best; see ``contest``."""

REPLAY = "replay"
"""The kind of a recording: it holds the operators of one lowering, and compiles nothing."""

COMPILED = (Lowering.FUSED, *WHOLE)
"""The lowerings in which a compiler has a part."""

_PRODUCTS = ("linear", "mm", "matmul")
# A product with r rows does r / 2 operations for each byte of its float32 weights. Steps of decoding, with one row, were 1.5 times as fast
# in templates as packed for oneDNN (experiments/serve/generate.py, before the fused lowering compiled products of one row).
_FEW_ROWS_FLOPS_A_BYTE = 2.0
_MOSTLY = 0.5

_COMPILED_FOR = ("cpu", "cuda")
"""Kinds of devices that it compiles for; a plugin's device runs PyTorch's own operators."""


@dataclass(frozen=True, slots=True)
class Considered:
    """What a job may choose among.

    Args:
        lowerings: to try, the device's plain default first.
        skipped: those that cannot be had here, with the reason.
        chosen: whether the job chooses; else one lowering was asked for, and ``lowerings`` is that.
    """

    lowerings: tuple[Lowering, ...]
    skipped: tuple[LoweringRow, ...]
    chosen: bool


def considered(asked: str | None, *, rewrite: bool, kind: str) -> Considered:
    """The lowerings of a job.

    On a CPU with a C++ compiler those are rewritten, fused and inductor; on a GPU with Triton and the C compiler that it needs fused,
    inductor and rewritten; without a compiler, and on a device that a plugin brings, rewritten alone. Where compiled baselines are
    measured, inductor gives way to the mode of the fastest of them (see ``adopting``). The first is what there is without a choice.
    ``fused`` comes before ``inductor``: it is worth something whenever its compiler is stopped, and leaves the rest of the time to a
    compilation that is worth nothing until it is finished.

    Args:
        asked: a lowering's name, ``auto``, or ``None`` for ``auto``.
        rewrite: the older way to ask: ``False`` without a name is ``aten``.
        kind: of the device, or ``replay``.

    Raises:
        UsageError: for a name that there is not, or that a device of this kind cannot run; or for two that differ.
    """
    if not rewrite and asked not in (None, Lowering.ATEN):
        raise UsageError(
            f"--no-rewrite (rewrite=False) asks for the lowering {Lowering.ATEN}, and --lowering for {asked}; leave one of the two out"
        )
    if asked not in (None, AUTO):
        lowering = lowering_named(str(asked))
        if lowering in COMPILED and kind not in (*_COMPILED_FOR, REPLAY):
            raise UsageError(
                f"lowering {lowering} is compiled for {' or '.join(_COMPILED_FOR)} alone; on {kind!r} ask for rewritten or aten"
            )
        return Considered((lowering,), (), chosen=False)
    if asked is None and not rewrite:
        return Considered((Lowering.ATEN,), (), chosen=False)
    if kind not in _COMPILED_FOR:
        return Considered((Lowering.REWRITTEN,), (), chosen=False)
    if why := missing_compiler(kind):
        rows = tuple(LoweringRow(lowering, LoweringOutcome.SKIPPED, why) for lowering in (Lowering.FUSED, Lowering.INDUCTOR))
        return Considered((Lowering.REWRITTEN,), rows, chosen=True)
    if kind == "cuda":
        return Considered((Lowering.FUSED, Lowering.INDUCTOR, Lowering.REWRITTEN), (), chosen=True)
    return Considered((Lowering.REWRITTEN, Lowering.FUSED, Lowering.INDUCTOR), (), chosen=True)


def coarser_note(report: TuneReport) -> str:
    """What to try where a compiler's fused code won against operators that are called one by one; empty if nothing."""
    compiled = report.best_baseline.startswith(("torch_compile", "compiled", "max_autotune"))
    if not compiled or report.lowering in COMPILED:
        return ""
    return f"{report.best_baseline} fuses what lowering {report.lowering} calls one by one; --lowering auto tries compiled code too"


def templates_note(program: Program) -> str:
    """What a job on a CPU that timed no mode of ``torch.compile`` may have missed: templates for products of few rows; empty if nothing.

    Products of one row are compiled in the lowering ``fused``, and no slower than templates.
    """
    graph, compiled = program.graph, program.lowering == Lowering.FUSED
    read = sum(operator.bytes_read for operator in graph.operators)
    missed = [item for item in graph.operators if _of_few_rows(item) and not (compiled and has_row_product(item, graph))]
    few = sum(operator.bytes_read for operator in missed)
    if few <= _MOSTLY * read:
        return ""
    return (
        f"{few / read:.0%} of what a run reads are factors of products with few rows, as in a step of decoding. Kernels chosen by timing "
        "may read them twice as fast: --effort balanced tries them (lowering max_autotune), which takes minutes of compiling"
    )


UNCOMPARED = " torch.compile was not measured, nor its code, and may be faster."
"""What a verdict says where no figure tells how what is kept compares with a compiler's code for the whole model."""


def uncompared_note(report: TuneReport) -> str:
    """What to do about it where a job timed neither ``torch.compile`` nor, in the lowering ``inductor``, what it makes; empty if it did.

    Args:
        report: of a job that chose among lowerings and had no compiled baseline.
    """
    row = next((item for item in report.lowerings if item.lowering == Lowering.INDUCTOR), None)
    if row is None or row.sequential_us is not None or row.tuned_us is not None:
        return ""
    # A skipped one was short of time, or there is no compiler.
    again = "what was compiled by now is kept, so that the same command gets further; " if row.outcome is LoweringOutcome.SKIPPED else ""
    why = f" ({row.why})" if row.why else ""
    return (
        f"neither torch.compile nor its code for the whole model, lowering inductor, was measured{why}: either may be faster than what is "
        f"kept here; {again}--effort balanced measures torch.compile, however long it compiles"
    )


def has_product(operator: Operator) -> bool:
    """Whether a matrix product is among its calls: on a CPU the only ones that Inductor has templates for."""
    return any(word in call.target for call in operator.calls for word in _PRODUCTS)


def share_of_products(program: Program) -> float:
    """Operators that have one, of all."""
    operators = program.graph.operators
    return sum(map(has_product, operators)) / max(len(operators), 1)


def _of_few_rows(operator: Operator) -> bool:
    return has_product(operator) and 0 < operator.flops <= _FEW_ROWS_FLOPS_A_BYTE * operator.bytes_read
