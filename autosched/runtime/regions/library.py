"""The variants of a program's operators as callables: compiled when first asked for, once for all operators that are alike.

A region that cannot be compiled runs call by call, with the reason in :meth:`RegionLibrary.refusals`; the rest goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from autosched.config import regions_dir
from autosched.core.forks import RenewedLock
from autosched.core.graph import Operator
from autosched.core.program import Program
from autosched.core.program_json import encode_program
from autosched.core.records import DeviceKey, SoftwareKey
from autosched.core.variants import WHOLE, Lowering, Variant
from autosched.runtime.calls import Kernel, compile_call
from autosched.runtime.cpu_kernels.steps import Weights, own_kernel, without_replaced
from autosched.runtime.cpu_kernels.ways import WAYS
from autosched.runtime.cuda import blas_lt, cudnn_fused, sm_share
from autosched.runtime.host_key import numerics_key
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.hung import CompilerHung, compilers_limited
from autosched.runtime.inductor.settings import settings_digest
from autosched.runtime.kernels import BoundProgram, joined
from autosched.runtime.plan import Plan
from autosched.runtime.regions.beside import Beside
from autosched.runtime.regions.callers import caller, caller_on_cpu
from autosched.runtime.regions.compile import Code, aligned, compile_piece, load_source, missing_compiler
from autosched.runtime.regions.compilers import end_ahead
from autosched.runtime.regions.order import Wanted, gain_bytes, most_gain_first
from autosched.runtime.regions.pieces import (
    UNCOMPILED,
    WITH_VARIANTS,
    Piece,
    offered_variants,
    operator_digest,
    piece_digest,
    pieces_of,
    variants_of,
)
from autosched.runtime.regions.pool import Made, compile_apart, worker_count
from autosched.runtime.regions.store import RegionStore
from autosched.runtime.regions.worker import Job, Opening

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegionRefusal:
    """An operator's variant that cannot run here."""

    operator: int
    width: int
    variant: Variant
    reason: str


class RegionLibrary:
    """Compiled regions of one program on one device.

    Args:
        program: any; only the lowerings of ``regions.pieces.WITH_VARIANTS`` have variants.
        device: where it runs.
        scope: what compiled code depends on beside the region: the keys of the machine, ``region_scope`` makes them.
        store: where compiled regions are kept between processes; ``None`` for nowhere.
        bound: the operators' own kernels, where they are launches of code for the whole model: those are compiled when a program is bound.
    """

    def __init__(
        self, program: Program, device: torch.device, scope: str, store: RegionStore | None = None, bound: Sequence[Kernel] = ()
    ) -> None:
        self._program = program
        self._bound = tuple(bound)
        self._device = device
        self._scope = scope
        self._store = store
        self._codes: dict[str, Code | Refused] = {}
        self._pieces: dict[int, tuple[tuple[Piece, str], ...]] = {}
        self._kernels: dict[tuple[int, int, int], Kernel | Refused] = {}
        self._weights: Weights = {}  # of kernels of our own
        self._tried: dict[str, str] = {}  # what is wrong with cuDNN's fused kernels, by the operator's digest
        self._settings: str | None = None
        self._refusals: dict[tuple[int, int, Variant], RegionRefusal] = {}
        self._lock = RenewedLock()
        self.compiled = 0
        self.reused = 0
        self.processes = 1
        self._missing: str | None = None
        self._stopped = ""
        self._beside: Beside | None = None

    def stop_compiling(self, reason: str) -> None:
        """Refuse from now on, for ``reason``, whatever is neither compiled yet nor kept by an earlier process."""
        self._stopped = reason

    @property
    def refusals(self) -> tuple[RegionRefusal, ...]:
        """What was asked for and could not be had, in the order of operators."""
        return tuple(self._refusals[key] for key in sorted(self._refusals))

    def variants(self, operator: int) -> tuple[Variant, ...]:
        """The variants worth trying, whether or not they can be compiled."""
        program = self._program
        return variants_of(program.graph.operators[operator], program.graph, self._device.type, program.lowering)

    def kernel(self, operator: int, width: int, variant: int, bound: BoundProgram | None = None) -> Kernel | Refused:
        """The callable of an operator in a variant other than ``CALLS``, compiled if need be.

        Args:
            bound: the program as it is bound on a CPU for that width; some variants have weights of their own, made once of what that
                holds, so that a program that is bound to other weights has a library of its own.
        """
        asked = operator, width, variant
        with self._lock.lock:
            if asked not in self._kernels:
                self._kernels[asked] = self._kernel_in_time(*asked, bound)
            found = self._kernels[asked]
        if isinstance(found, Refused):
            refusal = RegionRefusal(operator, width, Variant(variant), found.reason)
            if (operator, width, Variant(variant)) not in self._refusals:
                _log.info("operator %s runs call by call: %s", self._program.graph.operators[operator].name, found.reason)
            self._refusals[operator, width, Variant(variant)] = refusal
        return found

    def apply(self, bound: BoundProgram, plan: Plan) -> BoundProgram:
        """``bound`` with the kernel of each step's variant; a variant that cannot be had is the operator's calls."""
        if all(step.variant == Variant.CALLS for step in plan.steps):
            return bound
        kernels = list(bound.kernels)
        self.prepare([(step.operator, step.width, step.variant) for step in plan.steps])
        replaced: dict[int, int] = {}
        for step in plan.steps:
            if step.variant != Variant.CALLS:
                made = self.kernel(step.operator, step.width, step.variant, bound)
                if not isinstance(made, Refused):
                    kernels[step.operator] = made
                    if step.variant in WAYS:
                        replaced[step.operator] = step.variant
        return dataclasses.replace(bound, kernels=tuple(kernels), constants=without_replaced(bound, replaced))

    def prepare(
        self,
        wanted: Sequence[tuple[int, int, int]],
        beat: Callable[[], None] = lambda: None,
        *,
        limit_s: float | None = None,
        workers: int | None = None,
    ) -> None:
        """Compile, several at a time where that pays, the regions behind ``wanted`` that are not at hand. What fails is a refusal later.

        Args:
            wanted: operators, widths and variants, as for :meth:`kernel`; those that do not exist are passed over.
            beat: called several times a second while other processes compile.
            limit_s: seconds from now after which they are ended; what they have not compiled by then is as if it had not been asked for.
            workers: how many of them; by default as many as ``regions.pool.worker_count`` says. 1: none, and nothing is done.
        """
        end_s = math.inf if limit_s is None else time.monotonic() + limit_s
        with self._lock.lock:
            if self._beside is not None:
                beside, self._beside = self._beside, None
                for key, made in beside.found(beat):
                    self._take(key, made)
                return
            for key, made in self._made(wanted, end_s, workers, beat):
                self._take(key, made)

    def begin(self, wanted: Sequence[tuple[int, int, int]], *, limit_s: float | None = None, workers: int | None = None) -> None:
        """As :meth:`prepare`, which is to be called then and waits for what is begun here: other processes compile from now on."""
        end_s = math.inf if limit_s is None else time.monotonic() + limit_s
        with self._lock.lock:
            self._beside = Beside(self._made(wanted, end_s, workers))

    def _made(
        self, wanted: Sequence[tuple[int, int, int]], end_s: float, workers: int | None, beat: Callable[[], None] = lambda: None
    ) -> Iterable[tuple[str, Made]]:
        """What other processes make of the regions behind ``wanted``, by key; nothing if they are not worth it, or there is no time.

        Each is kept as it comes: this process may be lost to what it does meanwhile.
        """
        new = [item for item in dict.fromkeys(wanted) if item[2] not in UNCOMPILED and item not in self._kernels]
        if not new or self._stopped or self._compiler_missing() or not self._settings_digest():
            end_ahead()
            return ()
        jobs = self._jobs(new)
        count = worker_count(len(jobs), _free_device_bytes(self._device)) if workers is None else workers
        # Finding out what the compiler can do may have taken seconds, too.
        left_s = end_s - time.monotonic()
        if not jobs or count < 2 or left_s <= 0.0:
            end_ahead()
            return ()
        self.processes = max(self.processes, count)
        keys = list(jobs)
        found = compile_apart(self._opening, list(jobs.values()), count, beat, total_s=left_s)

        def kept() -> Iterator[tuple[str, Made]]:
            for made in found:
                key = keys[made.job.number]
                if made.source and self._store is not None:
                    self._store.put(key, made.source)
                yield key, made

        return kept()

    def _jobs(self, wanted: Sequence[tuple[int, int, int]]) -> dict[str, Job]:
        """The distinct regions that are neither here nor in the store, by key, most worth first; equal ones of operators are one."""
        missing: dict[str, bool] = {}
        found: list[Wanted] = []
        for operator, width, variant in wanted:
            if variant in UNCOMPILED or variant not in self.variants(operator):
                continue
            for place, (piece, digest) in enumerate(self._pieces_of(operator)):
                if not piece.compiled:
                    continue
                key = self._key(digest, width, variant)
                if key not in missing:
                    missing[key] = key not in self._codes and (self._store is None or self._store.get(key) is None)
                if missing[key]:
                    found.append(Wanted(key, operator, place, width, variant, gain_bytes(piece, self._program.graph)))
        ordered = enumerate(most_gain_first(found))
        return {item.key: Job(number, item.operator, item.place, item.width, item.variant) for number, item in ordered}

    def _take(self, key: str, made: Made) -> None:
        if made.refused:
            self._codes[key] = Refused(made.refused)
        elif made.source:
            self.compiled += 1
            loaded = load_source(made.source, key[:16])
            if not isinstance(loaded, Refused):
                self._codes[key] = loaded

    def _opening(self, lock: Path) -> Opening:
        program = encode_program(self._program).decode()
        return Opening(program, str(self._device), self._settings_digest(), numerics_key(self._device.type), os.fsencode(lock))

    def _compiler_missing(self) -> str:
        if self._missing is None:
            self._missing = missing_compiler(self._device.type)
            if not self._missing:
                try:
                    self._settings_digest()
                except CompilerHung as hung:
                    self._missing = str(hung)
        return self._missing

    def _settings_digest(self) -> str:
        if self._settings is None:
            self._settings = settings_digest(self._device.type)
        return self._settings

    def _pieces_of(self, operator: int) -> tuple[tuple[Piece, str], ...]:
        if operator not in self._pieces:
            graph = self._program.graph
            found = pieces_of(graph.operators[operator], graph)
            self._pieces[operator] = tuple((piece, piece_digest(piece, graph)) for piece in found)
        return self._pieces[operator]

    def _key(self, digest: str, width: int, variant: int) -> str:
        # Inductor writes the index into its code.
        home = f"{self._device.type}{self._device.index or ''}"
        return f"{digest}-{int(variant)}-{width}-{home}-{self._scope}-{self._settings_digest()}"

    def _kernel_in_time(self, index: int, width: int, variant: int, bound: BoundProgram | None) -> Kernel | Refused:
        if variant in WAYS:
            return self._by_own(index, width, variant, bound)
        try:
            with compilers_limited():
                return self._kernel(index, width, variant)
        except CompilerHung as hung:
            # It would hang at the next one, too.
            self._missing = str(hung)
            return Refused(self._missing)

    def _kernel(self, index: int, width: int, variant: int) -> Kernel | Refused:
        if variant == Variant.HALF_SMS:
            return self._on_half(index)
        if variant == Variant.CUDNN_FUSED:
            return self._in_cudnn(index)
        if variant == Variant.CUBLASLT:
            return self._through_lt(index)
        if missing := self._compiler_missing():
            return Refused(missing)
        if variant not in self.variants(index):
            return Refused(f"variant {variant} does not exist for this operator on {self._device.type}")
        operator = self._program.graph.operators[index]
        steps: list[Kernel] = []
        for piece, digest in self._pieces_of(index):
            if not piece.compiled:
                steps += [compile_call(call, self._device) for call in piece.calls]
                continue
            code = self._code(piece, digest, width, Variant(variant))
            if isinstance(code, Refused):
                return code
            steps.append(caller_on_cpu(code, piece, operator.name) if self._device.type == "cpu" else caller(aligned(code.entry), piece))
        return joined(steps, operator)

    def _by_own(self, index: int, width: int, variant: int, bound: BoundProgram | None) -> Kernel | Refused:
        if bound is None or self._device.type != "cpu":
            return Refused("kernels of our own are for a CPU")
        return own_kernel(self._program.graph.operators[index], bound, width, variant, self._weights)

    def _on_half(self, index: int) -> Kernel | Refused:
        operator = self._program.graph.operators[index]
        if self._device.type != "cuda" or not sm_share.is_product(operator, self._program.graph):
            return Refused("only matrix products in half precision on a GPU run on half of the multiprocessors")
        if why := sm_share.refusal(self._device):
            return Refused(why)
        return sm_share.on_half(self._calls(operator), self._device)

    def _through_lt(self, index: int) -> Kernel | Refused:
        operator = self._program.graph.operators[index]
        if why := blas_lt.refusal(self._device):
            return Refused(why)
        if not blas_lt.is_product(operator, self._program.graph):
            return Refused("only matrix products without a bias are cuBLAS's, and cuBLASLt's by choice")
        return blas_lt.through_lt(self._calls(operator))

    def _calls(self, operator: Operator) -> Kernel:
        if self._program.lowering in WHOLE:
            return self._bound[operator.index]
        return joined([compile_call(call, self._device) for call in operator.calls], operator)

    def _in_cudnn(self, index: int) -> Kernel | Refused:
        operator, graph = self._program.graph.operators[index], self._program.graph
        if why := cudnn_fused.refusal(self._device):
            return Refused(why)
        if not cudnn_fused.fusions_of(operator, graph):
            return Refused("it has no convolution that relu follows, with nobody else reading what is between")
        digest = operator_digest(operator, graph)
        if digest not in self._tried:
            self._tried[digest] = cudnn_fused.difference(operator, graph, self._device)
        if why := self._tried[digest]:
            return Refused(why)
        return joined(cudnn_fused.fused_steps(operator, graph, self._device), operator)

    def _code(self, piece: Piece, digest: str, width: int, variant: Variant) -> Code | Refused:
        key = self._key(digest, width, variant)
        if key in self._codes:
            return self._codes[key]
        # Without a digest of the settings nobody knows what was compiled under others.
        store = self._store if self._settings_digest() else None
        kept = store.get(key) if store is not None else None
        if kept is not None:
            loaded = load_source(kept, key[:16])
            if not isinstance(loaded, Refused):
                self.reused += 1
                self._codes[key] = loaded
                return loaded
            _log.info("%s; it is compiled again", loaded.reason)
        if self._stopped:
            return Refused(self._stopped)
        made = compile_piece(piece, self._program.graph, self._device, width=width, variant=variant)
        if isinstance(made, Code):
            self.compiled += 1
            if store is not None and made.source:
                store.put(key, made.source)
        self._codes[key] = made
        return self._codes[key]


def region_library(
    program: Program, device: torch.device, key: DeviceKey, software: SoftwareKey, bound: Sequence[Kernel] = ()
) -> RegionLibrary | None:
    """The library of a program on this machine, kept in autosched's cache folder; ``None`` for a program without variants.

    Args:
        bound: as for :class:`RegionLibrary`; needed on a GPU.
    """
    if program.lowering not in WITH_VARIANTS:
        return None
    # Of a region it is the compiler that decides; elsewhere on a CPU only what kernels of our own compute has a choice.
    compiled = program.lowering == Lowering.FUSED or device.type == "cuda"
    if not compiled and all(len(row) == 1 for row in offered_variants(program, device.type)):
        return None
    return RegionLibrary(program, device, region_scope(key, software), RegionStore(regions_dir()), bound)


def region_scope(device: DeviceKey, software: SoftwareKey) -> str:
    """Digest of what compiled code depends on beside its region: processor or GPU, and versions."""
    return hashlib.sha256(msgspec.json.encode((device, software), order="sorted")).hexdigest()[:16]


def _free_device_bytes(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None
