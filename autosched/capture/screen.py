"""Which models and operators cannot be scheduled, and what to tell their owner."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator, OpOverload

from autosched.capture.aliasing import hides_a_view
from autosched.capture.draft import Draft
from autosched.capture.sources import source_of, source_of_traceback
from autosched.core.custom_operators import BUILT_IN, is_custom, trusted, why_unfit
from autosched.core.errors import UnsupportedGraph
from autosched.core.graph import ITEM_BYTES

# What makes a Triton kernel an operator.
_AS_OPERATOR = (
    "launch it through wrap_triton in a function registered with triton_op of PyTorch's library module, and trust its namespace "
    "(custom_operators)"
)
_PICKS_BY_VALUE = frozenset(
    {
        "aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero_numpy", "aten::masked_select", "aten::_unique2",
        "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::equal",
    }
)  # fmt: skip
_BACKENDS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_EFFECT_FREE_CHECKS = ("aten::_assert", "aten::sym_", "aten::_functional_assert", "aten::_functional_sym")
_ASSERT_VALUES = ("aten::_assert_async", "aten::_functional_assert_async")


def require_operators(count: int) -> None:
    """Refuse a model of which nothing is left to be run: there is nothing to measure, and no order to choose.

    Raises:
        UnsupportedGraph: if ``count`` of its operators is 0.
    """
    if count == 0:
        raise UnsupportedGraph(
            "the model computes nothing in this call: what it returns are its inputs or its weights as they are; expected at least one "
            "operator. Give the part that computes, and example inputs that make it."
        )


@contextmanager
def no_nested_padding(model: torch.nn.Module) -> Iterator[None]:
    """While the model is exported: refuse a ``TransformerEncoder`` that would take a padded batch for a nested tensor.

    In eager mode that gives zeros where there is padding; what export traces gives other numbers there, and no random mask shows it.

    Raises:
        UnsupportedGraph: from within the export.
    """

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding = args[2] if len(args) > 2 else kwargs.get("src_key_padding_mask")
        if padding is not None and getattr(module, "use_nested_tensor", False):
            raise UnsupportedGraph(
                "a torch.nn.TransformerEncoder is given src_key_padding_mask; in eager mode it then works on nested tensors and returns "
                "zeros where there is padding, which torch.export does not capture. Build it with enable_nested_tensor=False."
            )

    hooks = [
        module.register_forward_pre_hook(look, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, torch.nn.TransformerEncoder)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def composites(graph: torch.fx.Graph) -> dict[OpOverload[..., Any], Any]:
    """Decompositions of composite operators that export would keep whole: custom ones, written in PyTorch's own, and hidden views.

    A trusted one that has a kernel of its own beside stays whole: its owner has something better there. What gives back a view, and does
    not say so, would be taken for a copy, which sees nothing of what is written to that memory.
    """
    targets = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    views = [node.target for node in graph.nodes if node.op == "call_function" and hides_a_view(node)]
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    custom = [
        target
        for target in targets
        if target.namespace not in BUILT_IN
        and target.has_kernel_for_dispatch_key(key)
        and not (target.namespace in trusted() and any(target.has_kernel_for_dispatch_key(item) for item in _BACKENDS))
    ]
    # Not their method decompose(), which export replaces by what stands in this table.
    return {target: partial(target._op_dk, key) for target in (*custom, *views)}


def is_check(node: torch.fx.Node) -> bool:
    """Whether a node computes nothing, but asserts something: of sizes, which export has made true, or of a tensor's values."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.name.startswith(_EFFECT_FREE_CHECKS)
    return getattr(target, "__name__", "").startswith(("sym_constrain", "_assert"))


def require_true_for_all_inputs(node: torch.fx.Node, depends: bool) -> None:
    """Refuse a check of what is computed from inputs: a schedule would compute something where the model raises.

    Args:
        node: one that ``is_check``.
        depends: whether what it asserts depends on an input, or on what calls change.

    Raises:
        UnsupportedGraph: naming the operator, its own message and the source line.
    """
    target = node.target
    if not (depends and isinstance(target, OpOverload) and target._schema.name.startswith(_ASSERT_VALUES)):
        return
    place = source_of(node.meta.get("stack_trace")) or "a place export did not record"
    said = f" ({node.args[1]!r})" if len(node.args) > 1 else ""
    advice = f" {_UNCHECKED}" if "distribution constraint" in said else ""  # as PyTorch's own say it from 2.15 on
    raise UnsupportedGraph(f"{target._schema.name} at {place}{said} {_asserts_of_values(place)}{advice}")


def _asserts_of_values(place: str) -> str:
    switched = " Those of transformers are left out in a process started with TRANSFORMERS_DISABLE_TORCH_CHECK=1."
    return (
        "asserts something of the values of an input, which no schedule would check; expected assertions on sizes, dtypes and weights "
        f"only. Take the assertion out of forward, and check inputs before the call.{switched if place.startswith('transformers/') else ''}"
    )


def _is_only_asserted(node: torch.fx.Node) -> bool:
    """Whether nothing is made of a number but what is asserted of it (``torch._check``)."""
    return bool(node.users) and all(
        is_check(user) or (not isinstance(user.target, OpOverload) and _is_only_asserted(user)) for user in node.users
    )


def require_schedulable(node: torch.fx.Node) -> None:
    """Refuse a call that cannot be run as data.

    Raises:
        UnsupportedGraph: naming the operator and the source line.
    """
    target = node.target
    place = source_of(node.meta.get("stack_trace")) or "a place export did not record"
    if isinstance(target, HigherOrderOperator) and str(target).startswith("auto_functionalized"):
        name = getattr(node.args[0], "_name", "an operator")
        raise UnsupportedGraph(
            f"{name} at {place} is a custom operator that changes its arguments; expected one that leaves them as they are, in any "
            "namespace. Return new tensors, or capture the model around it."
        )
    if isinstance(target, HigherOrderOperator) and str(target).startswith("triton_kernel_wrapper"):
        raise UnsupportedGraph(
            f"{_triton_name(node)} at {place} is a Triton kernel launched by the model itself; expected operators only. Make it one: "
            f"{_AS_OPERATOR}."
        )
    if isinstance(target, HigherOrderOperator) and str(target).startswith("flex_attention"):
        raise UnsupportedGraph(
            f"{target!s} at {place} takes Python functions that only a compiler makes a kernel of; expected operators only. Use "
            "torch.nn.functional.scaled_dot_product_attention with a mask, or keep torch.compile for that part."
        )
    if isinstance(target, HigherOrderOperator):
        raise UnsupportedGraph(
            f"{target!s} at {place} runs one of several sub-graphs, or one sub-graph several times, and cannot be scheduled; expected "
            "operators only. Unroll it, or capture the parts separately."
        )
    if not isinstance(target, OpOverload):
        raise UnsupportedGraph(f"{getattr(target, '__name__', target)} at {place} computes with sizes that depend on the data. {_DATA}")
    name = target._schema.name
    if name in ("aten::item", "aten::_local_scalar_dense") and _is_only_asserted(node):
        raise UnsupportedGraph(f"{name} at {place} {_asserts_of_values(place)}")
    if name in _PICKS_BY_VALUE or f"{name}.{target._schema.overload_name}" in _PICKS_BY_VALUE or _is_symbolic(node.meta.get("val")):
        raise UnsupportedGraph(f"{name} at {place} makes a number or a shape that depends on the data. {_DATA}")
    if is_custom(name):
        _require_fit(target, f"{name} at {place}")
    if torch.Tag.nondeterministic_seeded in target.tags and _draws(target, node):
        raise UnsupportedGraph(
            f"{name} at {place} draws random numbers, so no two runs agree and no schedule can be checked; expected a deterministic model. "
            "Call model.eval(), or pass the random tensor as an input."
        )


def _triton_name(node: torch.fx.Node) -> str:
    """The kernel's name, by PyTorch's table of the kernels that it saw; ``a kernel`` where that cannot be read."""
    try:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        found: Any = kernel_side_table.get_kernel(cast(int, node.kwargs["kernel_idx"]))
        # An autotuner has the kernel as its function, which has the Python function as its own.
        while not hasattr(found, "__name__"):
            found = found.fn
        return str(found.__name__)
    except (ImportError, KeyError, AttributeError, AssertionError):
        return "a kernel"


def require_dense_dtypes(draft: Draft) -> None:
    """Refuse an observed draft in which a tensor has a dtype that no value may have. What export notes is another: it takes quantised
    tensors for floats.

    Raises:
        UnsupportedGraph: naming the dtype, and the operator and the source line if it is no input or parameter.
    """
    makers = {value: node for node in draft.nodes for value in node.outputs}
    for value, spec in draft.specs.items():
        if spec.dtype not in ITEM_BYTES:
            node = makers.get(value)
            where = f"{node.kind} at {node.source or 'a place export did not record'} makes" if node else "an input or parameter is"
            raise UnsupportedGraph(
                f"{where} a tensor of torch.{spec.dtype}, which cannot be scheduled; expected the dtypes of dense tensors. {_AS_INTEGERS}."
            )


def _require_fit(target: OpOverload[..., Any], what: str) -> None:
    if target.namespace not in trusted():
        raise UnsupportedGraph(
            f"{what} is a custom operator; expected one of the namespaces {sorted(BUILT_IN | trusted())}. Trust its own with "
            f"custom_operators=({target.namespace!r},) (--custom-operators {target.namespace}), or register it with "
            "CompositeImplicitAutograd, written in PyTorch's own operators."
        )
    if reason := why_unfit(target._schema):
        raise UnsupportedGraph(f"{what} is a custom operator that {reason}.")


_DATA = (
    "Expected shapes fixed by the example inputs. Compute it outside the model, or pad to a fixed size; or, if it is made of whole numbers "
    "that are the same in every call, keep them in a buffer of a module around the model."
)


def _draws(target: OpOverload[..., Any], node: torch.fx.Node) -> bool:
    """Whether a call of a random operator really draws: dropout switched off does not."""
    values: dict[str, object] = {}
    for position, argument in enumerate(target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        values[argument.name] = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
    if any(values.get(switch) is False for switch in ("train", "training")):
        return False
    return not any(values.get(chance) == 0 for chance in ("p", "dropout_p", "dropout"))


def _is_symbolic(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_symbolic(item) for item in value)
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep torch from logging and printing, with tracebacks and graphs, the failure that :func:`explain_export_failure` explains.

    What the model itself writes to stderr is passed on when the model is captured.
    """
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    written = io.StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with redirect_stderr(written):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    # None in a process without one. That there is no room for it, or no terminal any more, is no fault of the model.
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(written.getvalue())


def explain_export_failure(error: Exception, of_decisions: str = "") -> UnsupportedGraph:
    """What to raise when ``torch.export`` did: the user's own line, the operator if torch names one, and what to do.

    Args:
        of_decisions: what to do about a value that decides what runs, if that is known.
    """
    place, code = source_of_traceback(error.__traceback__)
    described = str(error).strip().splitlines()
    first = (described[0] if described else type(error).__name__).rstrip(".")
    where = f" at {place} ({code})" if place else ""
    kind = type(error).__name__
    if kind == "PendingUnbackedSymbolNotFound":
        # Its further lines ask about a fake implementation: PyTorch's own have no such fault, and it is a shape that is not known.
        return UnsupportedGraph(f"the model cannot be captured{where}: a shape depends on the data ({first}). {_DATA}")
    if kind == "UnsupportedOperatorException" or "fake impl" in str(error):
        return UnsupportedGraph(
            f"the model cannot be captured{where}: an operator has no fake implementation ({first}). Expected one that makes outputs of "
            "the right shape without computing them; register it with register_fake of PyTorch's library module."
        )
    if kind == "DynamicOutputShapeException":
        return UnsupportedGraph(f"the model cannot be captured{where}: the shape of what {first} makes depends on the data. {_DATA}")
    without_asserts = _looks_for_asserts(error.__traceback__)
    if "DataDependent" in kind or "data-dependent" in str(error) or "unbacked" in str(error) or without_asserts:
        advice = of_decisions or (
            _UNCHECKED if _checks_a_distribution(error.__traceback__) else _ASSERTED if code.startswith("assert") else _DATA
        )
        said = "" if without_asserts else f" ({first})"
        return UnsupportedGraph(f"the model cannot be captured{where}: a value decides what runs next{said}. {advice}")
    apart = place.startswith("bitsandbytes/")
    advice = _PACKED if _packed(error.__traceback__) else f"{_WITH_SCALES_APART}." if apart else _advice(f"{error} {code}")
    return UnsupportedGraph(f"the model cannot be captured{where}: torch.export refuses it with {kind}: {first}. {advice}")


_PACKED = (
    "A packed sequence has sizes that depend on its lengths: give the layer the padded batch, and take the last step of each row by its "
    "length (torch.gather). In one direction that is the same."
)
_UNCHECKED = (
    "PyTorch's distributions check the values that they are given: make each with validate_args=False, or all of them by "
    "torch.distributions.Distribution.set_default_validate_args(False)."
)
_ASSERTED = "It is an assertion about values: leave it out of the model, or capture in a process started with python -O."


def _looks_for_asserts(trace: TracebackType | None) -> bool:
    """Whether PyTorch was finding out if an assertion had asked for a value: under ``python -O`` it finds none, and fails at that."""
    return any(frame.f_code.co_name == "get_assert_bytecode_sequence" for frame, _ in traceback.walk_tb(trace))


def _checks_a_distribution(trace: TracebackType | None) -> bool:
    """Whether one of PyTorch's distributions was looking at its arguments when it failed."""
    return any(frame.f_code.co_filename == torch.distributions.distribution.__file__ for frame, _ in traceback.walk_tb(trace))


def _packed(trace: TracebackType | None) -> bool:
    """Whether a recurrent layer of PyTorch's was called with a packed sequence when it failed."""
    frames = (frame for frame, _ in traceback.walk_tb(trace))
    return any(
        frame.f_code.co_filename == torch.nn.modules.rnn.__file__ and frame.f_locals.get("batch_sizes") is not None for frame in frames
    )


_AS_INTEGERS = "Keep quantised numbers as integers with scales beside them, as torchao and PT2E do"
_TAKEN = ("meta", "graph", "code")
_RENAME = (
    f"Graphs of torch.export have attributes of their own called {_TAKEN[0]}, {_TAKEN[1]} and {_TAKEN[2]}: give what the model has by such "
    "a name another one, or tune a module that holds the model"
)
_WITH_SCALES_APART = (
    "Weights of bitsandbytes keep their scales in attributes, which torch.export does not see: quantize the model as it came with torchao"
)
# Words of export's own refusals, and what helps.
_ADVICE = (
    ("references nonexistent attribute", _RENAME),
    *((f"attribute '{name}' already exists", _RENAME) for name in _TAKEN),
    ("output has alias annotations", "Return a copy from that operator, and delete the annotation"),
    *((words, "Call the model with use_cache=False") for words in ("cache_utils", "Cache'> in output")),
    (
        "not a known type",
        "Make the container a dataclass of a module that can be imported, register it with torch.export.register_dataclass, or return a "
        "tuple or a dictionary",
    ),
    (
        "Unsupported input type",
        "Give dict(...) of it, if it is a mapping, as what a tokenizer of transformers returns; or the tensors of that object "
        "one by one, to a module around the model that makes the object of them; or make its class a "
        "dataclass of a module that can be imported; or keep it in the model, if it holds none",
    ),
    ("ScriptModule", "Give the Python module that was scripted or traced, or convert it with torch.export's TS2EPConverter"),
    ("positional arguments but", "If the line calls a scripted module, put the Python module that was scripted in its place"),
    (
        "__obj_flatten__",
        "Modules with packed weights (torch.ao.quantization) cannot be exported; quantize with torchao or PT2E, or leave it out",
    ),
    (
        "erroneously tracing into a custom kernel",
        f"If it is a Triton kernel, {_AS_OPERATOR}",
    ),
    ("quantized nyi", _AS_INTEGERS),  # torch 2.11; later ones export it, and the draft is screened
    ("torch.nested", "Work on tensors padded to a fixed size, with a mask"),
    ("expected compiled_fn to be GraphModule", "If it changes memory that it knows by two names, register a buffer of its own for each"),
    ("missing nn_module_stack", "If it keeps an input or one buffer as another (self.last = x), copy it there: self.last.copy_(x)"),
    (
        "can require gradients",
        "Call model.requires_grad_(False): export takes quantised weights apart, and their integers have no gradients",
    ),
    ("inference tensor", "Make the model's parameters outside torch.inference_mode"),
    ("fake tensor in the exported program", "Compute no gradients inside the model"),
    *((words, _WITH_SCALES_APART) for words in ("no attribute 'CB'", "Params4bit")),
    ("numpy", "Compute with PyTorch what is computed with NumPy"),
)


def _advice(said: str) -> str:
    if found := next((advice for words, advice in _ADVICE if words in said), ""):
        return f"{found}."
    return (
        "Expected a model that runs on the example inputs given; call it yourself with the same inputs first, and change the line above "
        "if it passes there."
    )
