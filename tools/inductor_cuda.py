"""What Inductor writes for an H200, without one: the texts that the lowerings ``fused`` and ``inductor`` would compile there.

    python -P tools/inductor_cuda.py autosched:deepfm torchvision:googlenet -o DIR          # one text for each model
    python -P tools/inductor_cuda.py autosched:deepfm --lowering fused -o DIR               # one text for each distinct region
    python -P tools/inductor_cuda.py timm:nasnetalarge --lowering fused --cubins --jobs 2   # and every Triton kernel, built for sm_90

Needs a CUDA build of PyTorch with Triton, and no GPU: Inductor gets fake tensors and the properties of an H200, choices between
templates are made by their names instead of by measuring, and nothing is launched. Which attention is chosen is asked of the device in
C++, so a model with attention needs one, real or emulated (``python tools/cuda_emulator/run.py -- python -P tools/inductor_cuda.py ...``).
What is private in PyTorch here was so in 2.11, 2.13 and 2.15. The configuration is the package's own; so is the code that asks Inductor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# Nothing is launched, so nothing is built unless asked for; a pool of compilers would be started for nothing.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

from autosched import zoo
from autosched.capture import rewrite
from autosched.capture.export import capture
from autosched.core.graph import TensorSpec
from autosched.core.in_place import chains_of
from autosched.core.program import Program
from autosched.core.specs import spec_of
from autosched.core.variants import WHOLE, Lowering, Variant
from autosched.runtime.inductor import compile as inductor_compile
from autosched.runtime.inductor import kept as inductor_kept
from autosched.runtime.inductor.common import Refused
from autosched.runtime.inductor.modes import Mode
from autosched.runtime.kernels import BoundProgram, bind, random_inputs
from autosched.runtime.regions import compile as region_compile
from autosched.runtime.regions.pieces import piece_digest, pieces_of, variants_of

# https://docs.nvidia.com/cuda/cuda-c-programming-guide, table of compute capability 9.0; 132 processors and the memory are the H200's.
_H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024,
    warp_size=32,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    total_memory=141 * 2**30,
    L2_cache_size=60 * 2**20,
    gcnArchName="",
)
_DEVICE = torch.device("cuda", 0)
_COMMENT = re.compile(r"^#.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """One generated module: what of, and the text."""

    title: str
    source: str


class _Kernel:
    """Stands for a Triton kernel that is not built."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def run(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self.name} is a text; there is no GPU to launch it on")


class _Driver:
    """What Triton asks of a driver while it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def pretend_h200() -> Iterator[None]:
    """Compile for a GPU, believing in one if there is none; whatever would launch or measure is left out."""
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph, pad_mm, post_grad
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.select_algorithm import AlgorithmSelectorCache
    from torch._subclasses import fake_tensor

    absent: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "_exchange_device", lambda device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda device: 0),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "get_device_properties", lambda device=None: _H200),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda state, device="cuda": None),
        (torch.cuda, "synchronize", lambda device=None: None),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (CudaInterface, "device_count", staticmethod(lambda: 1)),
        (CudaInterface, "get_device_properties", staticmethod(lambda device=None: _H200)),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
    ]
    answers: list[tuple[Any, str, Any]] = [
        (AsyncCompile, "triton", lambda self, name, source, device_str="cuda": _Kernel(name, source)),
        # A block of code that launches every kernel once, for Triton's own choices.
        (PythonWrapperCodegen, "generate_and_run_autotune_block", lambda self: None),
        (AlgorithmSelectorCache, "lookup", _choose),
        (AlgorithmSelectorCache, "make_precompile_fn", lambda self, *given, **options: lambda: {}),
        (Scheduler, "benchmark_codegened_module", lambda self, module, device: (1.0, "")),
        (Scheduler, "benchmark_fused_nodes", lambda self, nodes: (1.0, "")),
        (Scheduler, "speedup_by_combo_kernel", lambda self, nodes: True),
        (pad_mm, "_should_pad", lambda *given, **options: False),
        # Nothing of this is kept among what really was compiled here.
        (inductor_kept, "key_of", lambda *given, **options: ""),
    ]
    # Patterns are traced with small tensors of the device; any device gives the same patterns.
    for passes in (joint_graph, post_grad):
        answers.append((passes, "lazy_init", lambda device=None, known=passes.lazy_init: known(torch.device("cpu"))))
    if not torch.cuda.is_available():
        answers += absent
        triton.runtime.driver.set_active(_Driver())
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        yield


def _choose(self: Any, choices: Sequence[Any], *given: object, **options: object) -> dict[Any, float]:
    """Times of choices, made up: Triton's templates first."""
    return {choice: float(place + (0 if "triton" in choice.name else len(choices))) for place, choice in enumerate(choices)}


def _fake(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device=_DEVICE)


def whole_text(name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Mode) -> Text:
    """The module of a model compiled as a whole in ``mode``, which must not be frozen: fake constants cannot be folded."""
    from torch._subclasses import FakeTensorMode

    captured = capture(model, args, kwargs, target="cuda")
    here = bind(captured.program, captured.constants, "cpu")
    with pretend_h200():
        with FakeTensorMode():
            constants = [_fake(spec_of(tensor)) if tensor is not None else None for tensor in here.constants]
            inputs = [_fake(spec_of(tensor)) for tensor in random_inputs(captured.program, 0)]
        writes = [here.program.writes[chain.write] for chain in chains_of(here.program)]
        compiled = inductor_compile.compile_whole(BoundProgram(here.program, _DEVICE, (), constants), inputs, mode, writes)
    if isinstance(compiled, Refused):
        raise SystemExit(f"{name}: {compiled.reason}")
    title = _plain(name) if mode.lowering is Lowering.INDUCTOR else f"{_plain(name)}_{mode.lowering}"
    return Text(title, _without_comments(compiled.source))


def region_texts(
    name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], variant: Variant
) -> tuple[list[Text], list[str]]:
    """The modules of a program of the lowering ``fused``, one for each distinct region; and what could not be compiled."""
    captured = capture(model, args, kwargs, target="cuda", lowering=Lowering.FUSED)
    texts: list[Text] = []
    refused: list[str] = []
    for title, piece in distinct_regions(captured.program, variant).items():
        with pretend_h200():
            found = _region_text(piece, captured.program, variant)
        if isinstance(found, Refused):
            refused.append(f"{title}: {found.reason}")
        else:
            texts.append(Text(f"{_plain(name)}_{title}_{variant.name.lower()}", _without_comments(found)))
    return texts, refused


def distinct_regions(program: Program, variant: Variant) -> dict[str, Any]:
    """Pieces of the operators that have this variant, by name and digest; equal ones once."""
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for operator in program.graph.operators:
        if variant not in variants_of(operator, program.graph, "cuda"):
            continue
        for piece in pieces_of(operator, program.graph):
            digest = piece_digest(piece, program.graph)
            if piece.compiled and digest not in seen:
                seen.add(digest)
                found[f"{_plain(operator.name)[:40]}_{digest[:6]}"] = piece
    return found


def _region_text(piece: Any, program: Program, variant: Variant) -> str | Refused:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        examples = [_fake(program.graph.values[value].spec) for value in piece.reads]
    seen: list[types.ModuleType] = []
    module = region_compile._graph_module(piece, _DEVICE)
    try:
        region_compile._compile(module, examples, seen, "cuda", 1, variant)
    except Exception as error:
        return Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if len(seen) != 1:
        return Refused(f"Inductor wrote {len(seen)} modules; expected one")
    return Path(str(seen[0].__file__)).read_text()


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name.rpartition(":")[2])


def _without_comments(source: str) -> str:
    """Without paths of this machine, among others; kernels have no comment that begins a line."""
    return _COMMENT.sub("", source)


def triton_kernels(texts: Sequence[Text]) -> dict[str, str]:
    """Sources of all Triton kernels, equal ones once, by a name of their own."""
    from autosched.runtime.inductor.source import Kind, read_module

    found: dict[str, str] = {}
    for text in texts:
        for name, kernel in read_module(text.source).kernels.items():
            if kernel.kind is Kind.TRITON and kernel.source not in found.values():
                found[f"{name}.{len(found)}"] = kernel.source
    return found


def build(name: str, source: str) -> int:
    """Compile one Triton kernel for sm_90 in all its configurations; their number."""
    from torch._inductor.async_compile import _load_triton_kernel_from_source

    with pretend_h200():
        kernel = _load_triton_kernel_from_source(name.partition(".")[0], source)
        kernel.precompile(warm_cache_only=True)
    return len(kernel.compile_results)


def build_all(kernels: Mapping[str, str], jobs: int) -> dict[str, int]:
    """Configurations of each kernel, by name."""
    if jobs <= 1:
        return {name: build(name, source) for name, source in kernels.items()}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return dict(zip(kernels, pool.map(build, kernels, kernels.values()), strict=True))


def main() -> int:
    """Write the texts and say what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--lowering", choices=[*WHOLE, "fused"], default="inductor")
    parser.add_argument("--variant", choices=[item.name.lower() for item in Variant if item is not Variant.CALLS], default="compiled")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--cubins", action="store_true", help="build every Triton kernel for sm_90")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--row-major", action="store_true", help="of the program as it is before its layouts are chosen")
    given = parser.parse_args()
    if given.row_major:
        rewrite.PASSES = tuple(item for item in rewrite.PASSES if item.name != "channels_last")
    for name in given.models:
        made = zoo.load(name, batch=given.batch, dtype=given.dtype)
        refused: list[str] = []
        if given.lowering in WHOLE:
            texts = [whole_text(name, made.model, made.args, made.kwargs, Mode(Lowering(given.lowering), frozen=False))]
        else:
            texts, refused = region_texts(name, made.model, made.args, made.kwargs, Variant[given.variant.upper()])
        report: dict[str, object] = {"model": name, "texts": len(texts), "refused": refused, "kernels": len(triton_kernels(texts))}
        if given.output is not None:
            given.output.mkdir(parents=True, exist_ok=True)
            for text in texts:
                (given.output / f"{text.title}.torch{torch.__version__}.py.txt").write_text(text.source)
        if given.cubins:
            begin = time.monotonic()
            built = build_all(triton_kernels(texts), given.jobs)
            report |= {"configurations": sum(built.values()), "build_s": round(time.monotonic() - begin, 1)}
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
