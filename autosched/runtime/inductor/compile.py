"""Compile a program as a whole with the local Inductor, and get hold of the Python module it writes.

With ``inductor.common``, all that touches Inductor's compiler for this lowering. The interfaces are private, as they are in
PyTorch 2.13: ``compile_fx`` with an ``inner_compile`` of one's own, which sees the graph that Inductor is given; and
``PyCodeCache.load_by_key_path``, through which every generated module is loaded, fresh or from the cache on disk. What is absent or
behaves otherwise is a :class:`Refused` with a reason, never an exception.

The configuration forced here makes one launch one unit: no buffer is used twice and none is written over but what the model itself
changes (so that the frees of a schedule stay ours and no false dependency arises), no CUDA graph, no partition, no kernels chosen while
running, static shapes; none combined, unless the mode does (``inductor.modes``). Threads are set explicitly, because they are part of the
code of a CPU kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autosched.core.from_outside import let_through
from autosched.core.program import Program, WriteBack
from autosched.runtime.inductor import kept as inductor_kept
from autosched.runtime.inductor.choices import Answers, choices_into
from autosched.runtime.inductor.common import (
    Compiled,
    Refused,
    add_calls,
    first_line,
    globals_of,
    known_options,
    modules_into,
    scalars_in_cache_keys,
    unusable,
)
from autosched.runtime.inductor.cpp_kernels import kernels_release_gil
from autosched.runtime.inductor.hung import CompilerHung, compilers_limited
from autosched.runtime.inductor.modes import PLAIN, Mode, mode_options
from autosched.runtime.inductor.packed import packing_into
from autosched.runtime.inductor.unfinished import worth_another_try
from autosched.runtime.inductor.weight_views import weight_views
from autosched.runtime.kernels import BoundProgram

_FORCED: Mapping[str, object] = {
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "graph_partition": False,
    "cpp_wrapper": False,
    "combo_kernels": False,
    "benchmark_combo_kernel": False,
    "memory_planning": False,
    "size_asserts": True,
    "nan_asserts": False,
    "profile_bandwidth": False,
    "profiler_mark_wrapper_call": False,
    "triton.cudagraphs": False,
    "triton.multi_kernel": 0,
    "triton.autotune_at_compile_time": None,
    "freezing_discard_parameters": False,
    "fallback_random": True,
    "autotune_num_choices_displayed": 0,
}
# Code found in Inductor's own cache tells nothing of what was chosen on the way to it, nor heeds what is to be chosen.
_AUTOTUNED: Mapping[str, object] = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@dataclass
class _Seen:
    """What the compilation showed on its way."""

    modules: list[ModuleType] = field(default_factory=list)
    inner_inputs: list[int] = field(default_factory=list)  # number of placeholders of each graph compiled
    inner_outputs: list[int] = field(default_factory=list)
    folds: inductor_kept.Folds = field(default_factory=inductor_kept.Folds)
    answers: Answers = field(default_factory=Answers)


def compile_whole(
    bound: BoundProgram, inputs: Sequence[torch.Tensor], mode: Mode = PLAIN, overwriting: Sequence[WriteBack] = ()
) -> Compiled | Refused:
    """Compile all operators of ``bound`` as one graph, for as many threads as torch now uses, unless that was done here before.

    Args:
        bound: the source program with its constants, prologue evaluated.
        inputs: example inputs in the order of ``program.graph.inputs``; only their shapes, strides and dtypes matter.
        mode: how. Where it has choices by timing and none are given, this takes minutes, and nothing else should run on the device.
        overwriting: of ``program.writes``, those that the code does itself: what they write is not among what it returns.
    """
    try:
        with compilers_limited():
            made = _compiled(bound, inputs, mode, overwriting)
            # It may have come upon what a compiler left that was killed.
            return _compiled(bound, inputs, mode, overwriting) if isinstance(made, Refused) and worth_another_try(made.reason) else made
    except CompilerHung as hung:
        return Refused(str(hung))


def _compiled(bound: BoundProgram, inputs: Sequence[torch.Tensor], mode: Mode, overwriting: Sequence[WriteBack]) -> Compiled | Refused:
    if why := unusable():
        return Refused(why)
    freeze = mode.frozen
    graph = bound.program.graph
    read = {value for operator in graph.operators for call in operator.calls for value in call.reads()} | set(graph.outputs)
    constants = [value.index for value in graph.values if value.index in read and bound.constants[value.index] is not None]
    if freeze and any(not _plain(bound.constants[value]) for value in constants):
        return Refused("a constant has an opaque layout, which Inductor cannot freeze")
    overwritten = [item.target for item in overwriting]
    key = inductor_kept.key_of(bound, constants, inputs, _options(mode), mode, overwritten)
    if (found := inductor_kept.find(key, bound)) is not None:
        return found
    try:
        module, arguments = _graph_module(bound, constants, overwriting, freeze=freeze)
    except Exception as error:
        let_through(error)
        return Refused(f"the program cannot be written as one graph: {first_line(error)}")
    example = [bound.constants[value] for value in arguments if value in set(constants)] + list(inputs)
    seen = _Seen(answers=Answers(mode.choices))
    leaves = {value: getattr(module, f"constant{value}") for value in constants} if freeze else {}
    try:
        _compile(module, example, seen, mode)
    except Exception as error:
        let_through(error)
        return Refused(f"Inductor could not compile the program: {first_line(error)}")
    if len(seen.inner_inputs) != 1 or len(seen.modules) == 0:
        return Refused(f"Inductor compiled {len(seen.inner_inputs)} graphs into {len(seen.modules)} modules; expected one of each")
    returned = len(returned_of(bound.program, overwriting))
    if seen.inner_inputs[0] != len(arguments) or seen.inner_outputs[0] != returned:
        return Refused(
            f"Inductor's graph takes {seen.inner_inputs[0]} tensors and returns {seen.inner_outputs[0]}; "
            f"expected {len(arguments)} and {returned}"
        )
    made = _described(seen.modules[-1], arguments, seen.answers)
    if isinstance(made, Compiled):
        keys = [key]
        if made.choices and not mode.choices:
            # Whoever binds the program asks for what was chosen here.
            chosen = dataclasses.replace(mode, choices=made.choices)
            keys.append(inductor_kept.key_of(bound, constants, inputs, _options(mode), chosen, overwritten))
        inductor_kept.keep(keys, bound, made, leaves, seen.folds)
    return made


def _options(mode: Mode) -> dict[str, object]:
    """Inductor's options for this way of compiling in ``mode``; a mode's own ones come last."""
    return {**_FORCED, **mode_options(mode.lowering), **(_AUTOTUNED if mode.autotuned else {})}


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def returned_of(program: Program, overwriting: Sequence[WriteBack]) -> tuple[int, ...]:
    """The outputs of the graph that the compiled code returns, when it does the writes of ``overwriting`` itself.

    Not the model's own tensors, nor views of them: Inductor would take those as arguments, however it is given them. Nor the caller's:
    beside convolutions it would return copies of them.
    """
    own = {binding.value for binding in program.bindings} | weight_views(program).keys()
    elsewhere = {*(item.value for item in overwriting), *own, *program.graph.inputs}
    return tuple(value for value in program.graph.outputs if value not in elsewhere)


def _graph_module(
    bound: BoundProgram, constants: Sequence[int], overwriting: Sequence[WriteBack], *, freeze: bool
) -> tuple[torch.fx.GraphModule, tuple[int, ...]]:
    """The program as an FX graph; the values of its placeholders, in order."""
    program = bound.program
    graph = torch.fx.Graph()
    root = torch.nn.Module()
    nodes: dict[int, torch.fx.Node] = {}
    placed = [] if freeze else list(constants)
    for value in (*placed, *program.graph.inputs):
        nodes[value] = graph.placeholder(f"arg{value}")
    if freeze:
        for value in constants:
            constant = bound.constants[value]
            root.register_buffer(f"constant{value}", constant.clone() if constant.is_inference() else constant)
            nodes[value] = graph.get_attr(f"constant{value}")
    add_calls(graph, nodes, (call for operator in program.graph.operators for call in operator.calls), bound.device)
    for item in overwriting:
        # As PyTorch itself says to Inductor what a model changes.
        graph.call_function(torch.ops.aten.copy_.default, (nodes[item.target], nodes[item.value]))
    graph.output(tuple(nodes[value] for value in returned_of(program, overwriting)))
    return torch.fx.GraphModule(root, graph), (*placed, *program.graph.inputs)


def _compile(module: torch.fx.GraphModule, example: list[torch.Tensor], seen: _Seen, mode: Mode) -> None:
    with warnings.catch_warnings():
        # Importing the compiler warns of what it uses itself.
        warnings.simplefilter("ignore")
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        def inner(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
            seen.inner_inputs.append(sum(node.op == "placeholder" for node in graph.graph.nodes))
            returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
            seen.inner_outputs.append(len(returned) if isinstance(returned, list | tuple) else 1)
            return compile_fx_inner(graph, inputs, **options)

        known = known_options(inductor_config, _options(mode)) | {"freezing": mode.frozen, "cpp.threads": torch.get_num_threads()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(inductor_config.patch(known))
            # A hit in this cache would skip the inner compilation, and with it all there is to see. Inductor's own cache stays.
            if hasattr(functorch_config, "enable_autograd_cache"):
                stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            stack.enter_context(kernels_release_gil())
            stack.enter_context(scalars_in_cache_keys())
            stack.enter_context(modules_into(seen.modules))
            stack.enter_context(inductor_kept.folds_into(seen.folds))
            if mode.autotuned:
                # It writes its times there, whatever the settings.
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(packing_into(seen.folds))
            stack.enter_context(choices_into(seen.answers))
            # Inductor keeps what it wrote only of graphs that come with an environment of shapes; all are static all the same.
            fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            fakes = [fake.from_tensor(item, static_shapes=True) for item in example]
            stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(fake)))
            compile_fx(module, fakes, inner_compile=inner)


def _described(module: ModuleType, arguments: tuple[int, ...], answers: Answers) -> Compiled | Refused:
    path = getattr(module, "__file__", None)
    try:
        source = Path(path or "").read_text(encoding="utf-8")
    except OSError as error:
        return Refused(f"the module that Inductor wrote cannot be read: {error}")
    namespace = globals_of(module)
    return Compiled(source, namespace, inductor_kept.tensor_names(namespace), arguments, answers.given)
