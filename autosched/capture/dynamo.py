"""The second way in: a graph that Dynamo cut out of a model, as a module that ``capture`` takes like any other.

Dynamo hands a backend an FX graph whose parameters and buffers are inputs like the user's own. Put back where they belong, on a
module, the graph goes through ``torch.export`` with the same lowering as a whole model, so both ways give one program and one hash.
The only file that reads Dynamo's private marks.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autosched.core.forks import RenewedLock, outlive_forks

_tracing = RenewedLock()
_IN_BRACKETS = re.compile(r"\['?([^'\]]+)'?\]")


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """What the inputs of a Dynamo graph are.

    Args:
        names: one for each input, for messages.
        static: positions of parameters and buffers, ascending: the same tensors in every call, unless the model is changed.
        numbers: positions of floats, which Dynamo hands over as tensors without dimensions where it leaves them open (``dynamic=True``: an
            ``eps``, the chance of a dropout). A schedule is for their values.
        given: positions of all others.
        dynamic: whether sizes are left open, to be taken from each call's inputs.
    """

    names: tuple[str, ...]
    static: tuple[int, ...]
    numbers: tuple[int, ...]
    given: tuple[int, ...]
    dynamic: bool


def inputs_of(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> GraphInputs:
    """Tell parameters from inputs.

    Args:
        graph: as Dynamo gives it to a backend.
        examples: real tensors, parameters and symbolic sizes, in the order of the graph's placeholders.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    static = tuple(index for index, (node, item) in enumerate(zip(nodes, examples, strict=True)) if _is_static(node, item))
    numbers = tuple(index for index, node in enumerate(nodes) if _is_number(node))
    given = tuple(sorted(set(range(len(nodes))) - set(static) - set(numbers)))
    dynamic = any(_is_open(nodes[index].meta.get("example_value"), examples[index]) for index in given)
    return GraphInputs(tuple(_name(node) for node in nodes), static, numbers, given, dynamic)


def turns_gradients_on(graph: torch.fx.GraphModule) -> bool:
    """Whether part of the graph runs under ``torch.enable_grad``, though it is called without gradients."""
    if torch.is_grad_enabled():
        return False
    return any(node.target is torch._C._set_grad_enabled and node.args == (True,) for node in graph.graph.nodes)


def gives_gradients(graph: torch.fx.GraphModule) -> bool:
    """Whether something the graph returns, or an input that it changes in place, has a gradient history, or may have one."""
    if not torch.is_grad_enabled() and not turns_gradients_on(graph):
        return False
    returned = next(node for node in graph.graph.nodes if node.op == "output").all_input_nodes
    values = [node.meta.get("example_value", node.meta.get("val")) for node in returned]
    # Nothing known of an output: assume the worst.
    if any(value is None or getattr(value, "requires_grad", False) for value in values):
        return True
    # As Dynamo leaves them: a history that is no parameter's came with an input, or was written to it.
    inputs = [node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"]
    return any(getattr(value, "requires_grad", False) and not getattr(value, "is_leaf", True) for value in inputs)


class _DynamosLock:
    """Dynamo's own, which is held for ever in a process that was forked while another thread of its parent's was compiling."""

    def after_fork(self) -> None:
        """Put another in its place, unless it is free, or held by the thread that forked, which gives it back."""
        convert_frame = sys.modules.get("torch._dynamo.convert_frame")
        lock = getattr(convert_frame, "compile_lock", None)
        if convert_frame is None or lock is None:
            return
        if lock.acquire(blocking=False):
            lock.release()
        else:
            vars(convert_frame)["compile_lock"] = threading.RLock()


_dynamos_lock = _DynamosLock()
outlive_forks(_dynamos_lock)


def alone() -> AbstractContextManager[Any]:
    """Trace while no other thread does: Dynamo and ``torch.export`` patch classes as they go, and see each other's patches.

    A lock and no context of Python's, which an exception of a signal's handler may keep from being left.
    """
    from torch._dynamo import convert_frame

    lock: AbstractContextManager[Any] = getattr(convert_frame, "compile_lock", _tracing.lock)
    return lock


def untraced(model: torch.nn.Module) -> str:
    """The class of a part that Dynamo leaves alone, with whatever its caller does after it, without asking any backend; empty if none."""
    from torch._dynamo import config

    # A release without the switch has no such exception.
    if getattr(config, "allow_rnn", True):
        return ""
    return next((type(part).__name__ for part in model.modules() if isinstance(part, torch.nn.LSTM | torch.nn.GRU | torch.nn.RNN)), "")


class DynamoGraph(torch.nn.Module):
    """A Dynamo graph with its parameters and buffers in place: the very tensors, not copies. In inference mode.

    Args:
        graph: what Dynamo cut out.
        inputs: as :func:`inputs_of` gives them.
        static: the tensor at each of ``inputs.static``.
        numbers: the value at each of ``inputs.numbers``.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, inputs: GraphInputs, static: Sequence[torch.Tensor], numbers: Sequence[float] = ()
    ) -> None:
        super().__init__()
        self._numbers = dict(zip(inputs.numbers, numbers, strict=True))
        self.graph = graph = _with_numbers(graph, self._numbers) if numbers else graph
        # Not eval(): a graph that holds modules of the user's holds the user's own.
        self.training = graph.training = False
        for part in _functions_of(graph):
            part.training = False
        self._keys: list[str | None] = [None] * len(inputs.names)
        for position, tensor in zip(inputs.static, static, strict=True):
            key = f"{inputs.names[position]}_{position}"
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(key, tensor)
            else:
                self.register_buffer(key, tensor)
            self._keys[position] = key

    def forward(self, *given: Any) -> Any:
        """Run the graph as it came on the inputs that are not parameters, in order."""
        left = iter(given)
        return self.graph(*[self._at(position, key, left) for position, key in enumerate(self._keys)])

    def _at(self, position: int, key: str | None, left: Iterator[Any]) -> Any:
        if position in self._numbers:
            return self._numbers[position]
        return next(left) if key is None else getattr(self, key)


def _functions_of(graph: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """Graphs that Dynamo has made of functions which operators are given, as FlexAttention is; and those of them."""
    for node in graph.graph.nodes:
        part = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(part, torch.fx.GraphModule):
            yield part
            yield from _functions_of(part)


def _with_numbers(graph: torch.fx.GraphModule, numbers: Mapping[int, float]) -> torch.fx.GraphModule:
    """``graph`` with the value of each number in the place of what is read from its tensor; the inputs stay as many."""
    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    placeholders = [node for node in copied.nodes if node.op == "placeholder"]
    for position, value in numbers.items():
        for read in list(placeholders[position].users):
            for user in list(read.users):
                user.args = torch.fx.map_arg(user.args, partial(_instead, read, value))
                user.kwargs = torch.fx.map_arg(user.kwargs, partial(_instead, read, value))
            copied.erase_node(read)
    return torch.fx.GraphModule(graph, copied)


def _instead(read: torch.fx.Node, value: float, node: torch.fx.Node) -> torch.fx.Node | float:
    return value if node is read else node


def _is_number(node: torch.fx.Node) -> bool:
    argument = node.meta.get("grapharg")
    if not getattr(argument, "pass_arg_as_tensor", False) or getattr(argument, "is_tensor", True):
        return False
    return all((user.op, user.target, len(user.args)) == ("call_method", "item", 1) for user in node.users)


def _is_static(node: torch.fx.Node, item: object) -> bool:
    if isinstance(item, torch.nn.Parameter):
        return True
    noted = node.meta.get("tensor_dict") or {}
    return isinstance(item, torch.Tensor) and bool(
        noted.get("_dynamo_static_input_type") or getattr(item, "_dynamo_static_input_type", None)
    )


def _is_open(noted: object, item: object) -> bool:
    value = noted if isinstance(noted, torch.Tensor) else item
    if not isinstance(value, torch.Tensor):
        return True
    return any(not isinstance(size, int) for size in value.shape)


def _name(node: torch.fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", None)
    text = name() if callable(name) else name
    # L['self']._modules['fc']._parameters['weight'] without its root.
    parts = _IN_BRACKETS.findall(text)[1:] if isinstance(text, str) else []
    return re.sub(r"\W", "_", "_".join(parts)) or node.name
