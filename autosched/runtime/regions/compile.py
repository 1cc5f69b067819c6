"""Compile a few calls with the local Inductor, and get hold of the Python module it writes. With ``inductor.common``, all that knows how.

The interfaces are private and were the same in PyTorch 2.11 to 2.15: ``torch._inductor.standalone_compile``, and
``PyCodeCache.load_by_key_path``, through which every generated module is loaded. The module's ``call`` is what runs: the wrapper that
``standalone_compile`` returns does the same around gradients and aliases that a region does not have, and costs as much as a small
operator. What is absent here, or comes out otherwise than the calls themselves, is a ``Refused`` with a reason, never an exception.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.graph import OpGraph
from autosched.core.variants import Variant
from autosched.runtime.calls import compile_call
from autosched.runtime.examples import example_of, same_strides
from autosched.runtime.float32 import rounded_as
from autosched.runtime.inductor.common import Refused, add_calls, first_line, known_options, modules_into, unusable
from autosched.runtime.inductor.cpp_kernels import kernels_release_gil
from autosched.runtime.inductor.hung import CompilerHung, asking_compilers
from autosched.runtime.inductor.unfinished import worth_another_try
from autosched.runtime.numerics import compare
from autosched.runtime.regions.pieces import TEMPLATED, Piece
from autosched.runtime.regions.row_products import add_row_product, is_row_product
from autosched.runtime.regions.triton_needs import lacking_for_triton
from autosched.runtime.rounding import coarsest_among

Entry = Callable[[list[Any]], Sequence[torch.Tensor]]
"""Takes the piece's reads in a list, which it empties; returns its writes."""

_ALIGNMENT_BYTES = 16
# The error's class, which Inductor wraps in another: asked for templates alone, it finds none for some shapes (a product with one column).
_NO_TEMPLATE = "NoValidChoicesError"

# What would make a launch something else than a launch: graphs within graphs, choices made while running, weights baked in.
_FORCED: Mapping[str, object] = {
    "graph_partition": False,
    "cpp_wrapper": False,
    "freezing": False,
    "combo_kernels": False,
    "benchmark_combo_kernel": False,
    "memory_planning": False,
    "profile_bandwidth": False,
    "keep_output_stride": True,
    # Shapes come from a file: code that indexes memory by them checks them first.
    "size_asserts": True,
    "assert_indirect_indexing": True,
    "fallback_random": True,
    "triton.cudagraphs": False,
    "triton.multi_kernel": 0,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
}
_OF_VARIANT: Mapping[Variant, Mapping[str, object]] = {
    Variant.COMPILED: {},
    Variant.TUNED_TEMPLATES: {
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,TRITON",
        "max_autotune_conv_backends": "ATEN,TRITON",
    },
    Variant.TEMPLATES: {"max_autotune": True, "max_autotune_gemm_backends": "TRITON", "max_autotune_conv_backends": "TRITON"},
}


@dataclass(frozen=True, slots=True)
class Code:
    """What Inductor wrote.

    Args:
        source: the text of a Python module; empty if it holds tensors that are not in the text, and so cannot be kept.
        entry: its ``call``.
    """

    source: str
    entry: Entry


def missing_compiler(kind: str) -> str:
    """Why nothing can be compiled for a kind of device here; empty if it can."""
    if getattr(torch._inductor, "standalone_compile", None) is None:
        return f"torch {torch.__version__} has no torch._inductor.standalone_compile"
    if why := unusable():
        return why
    if kind == "cuda":
        try:
            import triton  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        lacking = lacking_for_triton()
        return "" if not lacking or _triton_is_built() else f"Triton compiles nothing here: {lacking}"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        with asking_compilers():
            compiler = get_cpp_compiler()
    except CompilerHung as hung:
        return str(hung)
    except Exception as error:
        let_through(error)
        return f"PyTorch finds no C++ compiler ({type(error).__name__}); install g++, or name another in CXX"
    return "" if shutil.which(compiler) else f"the C++ compiler {compiler} does not exist; install g++, or name another in CXX"


def _triton_is_built() -> bool:
    """Whether its cache has what every launch needs, so that it may do without what that was compiled with."""
    try:
        from triton.backends.nvidia.driver import CudaUtils  # type: ignore[import-not-found,unused-ignore]

        CudaUtils()
    except Exception as error:
        let_through(error)
        return False
    return True


def compile_piece(
    piece: Piece,
    graph: OpGraph,
    device: torch.device,
    *,
    width: int,
    variant: Variant,
    turn: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Code | Refused:
    """Compile ``piece`` for ``device``, run it once on made-up inputs, and compare with its calls.

    Args:
        width: threads of the code on a CPU: Inductor writes their number into it.
        variant: how; not ``CALLS``.
        turn: entered while this runs something on the device, where other processes time kernels on it.
    """
    made = _compiled(piece, graph, device, width, variant, turn)
    if isinstance(made, Refused) and worth_another_try(made.reason):
        # It may have come upon what a compiler left that was killed.
        made = _compiled(piece, graph, device, width, variant, turn)
    return made


def _compiled(
    piece: Piece, graph: OpGraph, device: torch.device, width: int, variant: Variant, turn: Callable[[], AbstractContextManager[object]]
) -> Code | Refused:
    specs = [graph.values[value].spec for value in piece.reads]
    seen: list[ModuleType] = []
    try:
        examples = [example_of(spec, device, place) for place, spec in enumerate(specs)]
        module = _graph_module(piece, graph, device)
        _compile(module, examples, seen, device.type, width, variant)
    except Exception as error:
        let_through(error)
        if _NO_TEMPLATE in f"{error}":
            return Refused("Inductor has no template for it")
        return Refused(f"Inductor could not compile it: {first_line(error)}")
    if len(seen) != 1:
        return Refused(f"Inductor wrote {len(seen)} modules; expected one")
    source = "" if any(isinstance(item, torch.Tensor) for item in vars(seen[0]).values()) else _source_of(seen[0])
    entry: Entry = seen[0].call
    try:
        with turn():
            problem = _difference(piece, graph, device, examples, entry)
    except Exception as error:
        let_through(error)
        return Refused(f"the compiled code does not run: {first_line(error)}")
    return Refused(problem) if problem else Code(source, entry)


def aligned(entry: Entry) -> Entry:
    """``entry``, given copies of tensors that do not begin at a multiple of 16 bytes.

    Kernels for a GPU load 16 bytes at once where they know of no reason not to. Memory is handed out in larger steps, so this is for
    weights that are windows of a larger tensor. The wrapper that is left out here does the same.
    """

    def run(given: list[Any]) -> Sequence[torch.Tensor]:
        for place, tensor in enumerate(given):
            if tensor.data_ptr() % _ALIGNMENT_BYTES:
                given[place] = _moved(tensor)
        return entry(given)

    return run


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    window = tensor.as_strided((reach,), (1,)).clone()
    return window.as_strided(tensor.shape, tensor.stride(), 0)


def load_source(source: str, name: str) -> Code | Refused:
    """A module whose text was kept from an earlier :func:`compile_piece`; kernels not built yet are built."""
    module = ModuleType(f"autosched_region_{name}")
    try:
        with kernels_release_gil():
            exec(compile(source, f"<region {name}>", "exec", dont_inherit=True), module.__dict__)
        entry: Entry = module.__dict__["call"]
    except Exception as error:
        let_through(error)
        return Refused(f"the kept code cannot be loaded: {first_line(error)}")
    return Code(source, entry)


def _graph_module(piece: Piece, values: OpGraph, device: torch.device) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes = {value: graph.placeholder(f"arg{place}") for place, value in enumerate(piece.reads)}
    for call in piece.calls:
        if device.type == "cpu" and is_row_product(call, values):
            nodes[call.outputs[0]] = add_row_product(graph, nodes, call, values)
        else:
            add_calls(graph, nodes, [call], device)
    graph.output(tuple(nodes[value] for value in piece.writes))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _compile(
    module: torch.fx.GraphModule, examples: list[torch.Tensor], seen: list[ModuleType], kind: str, width: int, variant: Variant
) -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    wanted = {**_FORCED, **_OF_VARIANT[variant], "cpp.threads": width if kind == "cpu" else -1}
    patches = known_options(inductor_config, wanted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        # Graph caches would be hit by code of another configuration (threads, bindings), and what they keep is pickled. The libraries that
        # the C++ compiler builds stay cached: they are named after everything that went into them.
        if hasattr(functorch_config, "enable_autograd_cache"):
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        stack.enter_context(kernels_release_gil())
        stack.enter_context(modules_into(seen))
        compile_region: Any = torch._inductor.standalone_compile  # type: ignore[attr-defined,unused-ignore]
        compile_region(module, examples, dynamic_shapes="from_example_inputs", options={"config_patches": patches})


def _difference(piece: Piece, graph: OpGraph, device: torch.device, examples: Sequence[torch.Tensor], entry: Entry) -> str:
    """What the compiled code does otherwise than the calls; empty if nothing."""
    with torch.inference_mode():
        slots: list[Any] = [None] * len(graph.values)
        for value, tensor in zip(piece.reads, examples, strict=True):
            slots[value] = tensor
        for call in piece.calls:
            compile_call(call, device)(slots)
        wanted = [slots[value] for value in piece.writes]
        got = list(entry(list(examples)))
    if len(got) != len(wanted):
        return f"the compiled code returns {len(got)} tensors; expected {len(wanted)}"
    given = {tensor.untyped_storage().data_ptr() for tensor in examples}
    homes = [tensor.untyped_storage().data_ptr() for tensor in got if tensor.numel()]
    if given & set(homes) or len(set(homes)) != len(homes):
        return "the compiled code returns memory that it was given, or the same memory twice"
    for tensor, value in zip(got, piece.writes, strict=True):
        spec = graph.values[value].spec
        if tuple(tensor.shape) != spec.shape or not same_strides(tensor, spec.strides):
            return f"the compiled code returns strides {tuple(tensor.stride())} for {spec.strides}"
    # Where float32 may be rounded, libraries and templates round each in their own way, and compiled code has it baked in.
    coarsest = coarsest_among(piece.calls, graph.values, piece.writes)
    agreement = compare(got, wanted, rounded=rounding_of(piece, device), coarsest=coarsest)
    return "" if agreement.within_tolerance else f"the compiled code computes something else: {agreement.reason}"


def rounding_of(piece: Piece, device: torch.device) -> torch.dtype | None:
    """As ``float32.rounded_as``, of ``piece``: only factors of products, convolutions and attention are rounded."""
    factors = any(word in call.target for call in piece.calls for word in (*TEMPLATED, "dot_product"))
    return rounded_as(device.type) if factors else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # One at a time in a process (``compilers_limited``): of two threads that put aside what is said, and put back what they found, the
    # later one would put back that nothing is said.
    # It warns that nothing can be saved, which is not wanted here.
    noisy = logging.getLogger("torch._inductor.standalone_compile")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        noisy.setLevel(level)


def _source_of(module: ModuleType) -> str:
    try:
        with open(str(getattr(module, "__file__", "")), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
