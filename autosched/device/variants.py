"""Variants of operators on a device: what a session that has them answers, and what its measuring process does about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from autosched.core.records import Failure, SoloRecord
from autosched.device.worker_messages import PrepareRegionsRequest, RegionAnswer, RegionsPrepared, RegionsRequest, SoloRequest
from autosched.runtime.inductor.common import Refused
from autosched.runtime.kernels import BoundProgram
from autosched.runtime.regions.library import RegionLibrary
from autosched.runtime.thread_count import torch_threads

_PAIR = 2

NO_TIME = "there was no time left to compile it"
"""The reason for what could be had with more time."""


@runtime_checkable
class VariantSession(Protocol):
    """A session whose operators may have more variants than their calls."""

    def offered(self) -> tuple[tuple[int, ...], ...]:
        """The variants worth trying of each operator, its calls first."""

    def prepare_variants(self, columns: Sequence[tuple[int, int]], limit_s: float | None = None) -> tuple[int, int]:
        """Compile what is missing of these widths and variants, several regions at a time where that pays, for at most ``limit_s`` seconds.

        Returns:
            Distinct regions compiled, and processes that did so; (0, 1) where nothing was gained, and :meth:`compile_variant` does it all;
            (0, 0) where nothing is ever compiled.
        """

    def compile_variant(self, width: int, variant: int, limit_s: float | None = None) -> dict[int, str]:
        """Compile a variant of every operator that has it: by operator why it cannot be had, empty if it can.

        Operators without that variant are left out; -1 stands for a reason that all of them share. What is not begun within ``limit_s``
        seconds cannot be had from then on, unless it was kept by an earlier process.
        """

    def solo_variants(self, columns: Sequence[tuple[int, int]], *, repeats: int) -> list[list[SoloRecord | Failure]]:
        """Time every operator alone: ``[n_operators][len(columns)]``, a column being a width and a variant.

        The signature of a record is ``core.variants.variant_signature``; an operator without a column's variant is ``UNAVAILABLE``.
        """


@runtime_checkable
class CompilesBeside(Protocol):
    """A :class:`VariantSession` that can do something else while its regions are compiled."""

    def begin_variants(self, columns: Sequence[tuple[int, int]], limit_s: float | None = None) -> None:
        """As ``prepare_variants``, which is to be called later and waits for what is begun here; ``limit_s`` counts from now."""


def columns_of(request: SoloRequest) -> list[tuple[int, int]]:
    """Width and variant of each column of a request."""
    return list(zip(request.widths, request.variants or (0,) * len(request.widths), strict=True))


def prepare_regions(
    regions: RegionLibrary | None, operators: int, request: PrepareRegionsRequest, beat: Callable[[int], None]
) -> Iterator[RegionsPrepared]:
    """Answer a request in the measuring process."""
    if regions is None:
        return
    wanted = [(operator, width, variant) for width, variant in request.columns for operator in range(operators)]
    if request.begin:
        regions.begin(wanted, limit_s=request.limit_s)
        return
    before = regions.compiled
    regions.prepare(wanted, lambda: beat(-1), limit_s=request.limit_s)
    yield RegionsPrepared(regions.compiled - before, regions.processes)


def compile_regions(
    regions: RegionLibrary | None,
    operators: int,
    request: RegionsRequest,
    beat: Callable[[int], None],
    bound_at: Callable[[int], BoundProgram] | None = None,
) -> Iterator[RegionAnswer]:
    """Answer a request in the measuring process.

    Args:
        bound_at: on a CPU, the program as it is bound for a width.
    """
    if regions is None:
        return
    deadline = math.inf if request.limit_s is None else time.monotonic() + request.limit_s
    for operator in range(operators):
        if operator in request.skip or request.variant not in regions.variants(operator):
            continue
        if time.monotonic() >= deadline:
            regions.stop_compiling(NO_TIME)
        beat(operator)
        if bound_at is None:
            made = regions.kernel(operator, request.width, request.variant)
        else:
            bound = bound_at(request.width)
            # What is tried here is small: beside other processes a team waits longer for the last of its threads than it works, and two
            # threads save half at the most.
            with torch_threads(request.width if request.width > _PAIR else 1):
                made = regions.kernel(operator, request.width, request.variant, bound)
        yield RegionAnswer(operator, made.reason if isinstance(made, Refused) else "")
