"""The backend of ``torch.compile(model, backend="autosched", options={...})``, found through the entry point of that name.

Dynamo calls it once for each graph it cuts out of a model (a graph break gives several). Nothing is done then: at the first call,
with real inputs, the graph gets its schedule from the cache of tuned schedules, by tuning if asked to, or by default
(``compiled.recipe_for``), and is verified against itself in eager mode. Where there is any doubt the graph runs as it came, with one
warning; where gradients are wanted, always.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosched.compile_options import CompileOptions, parse_options
from autosched.core.callers import warn_caller
from autosched.core.errors import AutoschedError, UnsupportedGraph, UsageError
from autosched.core.forks import RenewedLock
from autosched.core.frames import empty_frames
from autosched.core.from_outside import let_through

if TYPE_CHECKING:
    import torch

    from autosched.capture.dynamo import DynamoGraph, GraphInputs
    from autosched.compiled import Recipe
    from autosched.runtime.guard import LoadedModel
    from autosched.runtime.load_report import LoadReport

# Models of one class share their code, and so their graphs: this many sets of parameters, and this many input shapes, keep a schedule
# at once for each graph. One more, and the one that was called longest ago is dropped, or the shape refused.
MAX_BOUND = 32
MAX_SHAPES = 16
# Calls of the graph after which one that had none of them may be dropped. To bind takes as long as hundreds of calls, and where more are
# called by turns than are kept, each call would bind one.
IDLE_CALLS = 1000
# Of parameters for which it is worth a tenth of a second, in a large process, to find out whose they are, so that they go with their model.
LEAST_BYTES = 16 << 20

Shapes = tuple[object, ...]

_graphs: weakref.WeakSet[ScheduledGraph] = weakref.WeakSet()
_graphs_lock = RenewedLock()  # to go through them while another thread compiles is an error of Python's


def autosched(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's for inference.

    Args:
        graph: as Dynamo cuts it out.
        example_inputs: its inputs in order; parameters are among them.
        options: ``tune`` (``quick``, ``balanced``, ``full``: at the first call, if the cache has nothing), ``budget_s``, ``device``,
            ``strict``, ``custom_operators`` (namespaces); see ``compile_options.CompileOptions``.
        mode: none is known; say what you want by ``options``.

    Returns:
        A callable on the graph's inputs.

    Raises:
        UsageError: by the callable, so that it arrives as it is: an option that cannot be honoured.
    """
    from autosched.capture.dynamo import gives_gradients, inputs_of, turns_gradients_on

    try:
        if mode is not None:
            raise UsageError(f"mode is {mode!r}; the backend 'autosched' has none. Give options={{'tune': 'quick'}} instead.")
        parsed = parse_options(options)
    except UsageError as error:
        return _raiser(error)
    if gives_gradients(graph):
        reason = "it is called with gradients; call it under torch.no_grad() or torch.inference_mode() to run a schedule"
        if turns_gradients_on(graph):
            reason = "it turns gradients on itself for what it returns (torch.enable_grad); leave that out to run a schedule"
        if parsed.strict:
            return _raiser(UnsupportedGraph(f"the graph may not be scheduled: {reason}"))
        return _aside(graph, reason)
    made = ScheduledGraph(graph, inputs_of(graph, example_inputs), parsed)
    with _graphs_lock.lock:
        _graphs.add(made)
    return made


def reports() -> list[LoadReport]:
    """What became of every graph, shape and set of parameters compiled so far in this process and still in use."""
    with _graphs_lock.lock:
        graphs = list(_graphs)
    return [report for graph in graphs for report in graph.reports()]


@dataclass(slots=True)
class _Refusal:
    """Why a graph runs as it came at inputs of certain shapes.

    Args:
        reason: for people.
        left: calls to come until there is another attempt; ``None``: there will be none.
        attempts: in a row that had no memory.
        recipe: what there was no memory to bind.
    """

    reason: str
    left: int | None = None
    attempts: int = 0
    recipe: Recipe | None = None

    def holds(self) -> bool:
        """Whether the graph runs this call as it came."""
        if self.left == 0:
            return False
        self.left = None if self.left is None else self.left - 1
        return True


class ScheduledGraph:
    """One graph of Dynamo's; called with all its inputs, parameters included. Calls may come from any thread."""

    def __init__(self, graph: torch.fx.GraphModule, inputs: GraphInputs, options: CompileOptions) -> None:
        from autosched.runtime.foreign_modes import WithoutFunctionModes, has_function_mode

        self._has_function_mode, self._without_function_modes = has_function_mode, WithoutFunctionModes
        self._graph = graph
        self._inputs = inputs
        self._options = options
        self._lock = RenewedLock()  # of the two tables below, held for no longer than a look
        self._recipes: dict[Shapes, Recipe | _Refusal] = {}
        self._bound: dict[tuple[Shapes, tuple[int, ...]], _Bound] = {}
        self._calls = 0
        self._warned: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs, as the graph itself would give them.

        Raises:
            AutoschedError: with ``strict``, where the graph would run as it came.
        """
        if not self._has_function_mode():
            return self._called(args)
        # What a mode makes of PyTorch's functions Dynamo has traced: it is in the graph, and would be done to that once more.
        with self._without_function_modes():
            return self._called(args)

    def _called(self, args: Sequence[Any]) -> Any:
        self._calls += 1
        shapes = _shapes([args[index] for index in self._inputs.given]) if self._inputs.dynamic else ()
        if self._inputs.numbers:
            # Not the numbers alone: 0.0 and -0.0 are equal in Python.
            shapes += tuple(float(args[index]).hex() for index in self._inputs.numbers)
        static = [args[index] for index in self._inputs.static]
        # Dynamo does not watch which tensors the parameters are: other ones (a replaced parameter, another model of the same class)
        # come to the same graph. Those bound here are kept alive, so their identities stay theirs.
        key = (shapes, tuple(map(id, static)))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(key, args, static)
        if bound is None:
            return self._graph(*args)
        bound.called = self._calls
        return bound.model(*[args[index] for index in self._inputs.given])

    def reports(self) -> list[LoadReport]:
        """One for each set of shapes and parameters."""
        from autosched.runtime.load_report import LoadReport

        with self._lock.lock:
            recipes, bound = list(self._recipes.values()), list(self._bound.values())
        refused = [LoadReport(False, recipe.reason) for recipe in recipes if isinstance(recipe, _Refusal)]
        return refused + [each.model.report() for each in bound]

    def _bind(self, key: tuple[Shapes, tuple[int, ...]], args: Sequence[Any], static: Sequence[torch.Tensor]) -> _Bound | None:
        from autosched.capture.dynamo import DynamoGraph, alone
        from autosched.runtime.foreign_modes import foreign_mode

        # Nothing is to be prepared, and whoever prepares another model, for an hour perhaps, need not be waited for.
        if self._refusal(key[0]) is not None or self._all_in_use():
            return None
        home = next((item.device for item in (*static, *args) if hasattr(item, "device")), None)
        if home is not None and (reason := foreign_mode(home.type)):
            # For this call only: the mode belongs to the caller.
            if self._options.strict:
                raise UnsupportedGraph(f"the graph may not be scheduled: {reason}")
            self._refuse(reason)
            return None
        # One lock for all graphs: a model being prepared may call another one that is prepared too.
        with alone():
            if key in self._bound:
                return self._bound[key]
            self._let_go()
            model = DynamoGraph(self._graph, self._inputs, static, [float(args[index]) for index in self._inputs.numbers])
            given = tuple(args[index] for index in self._inputs.given)
            recipe = self._recipe(key[0], model, given)
            if isinstance(recipe, _Refusal):
                return None
            loaded = self._verified(model, recipe, given)
            if loaded.short:
                self._again_later(key[0], loaded.report().reason, recipe)
                return None
            bound = _Bound(loaded, tuple(static), self._calls, _owners(static))
            with self._lock.lock:
                self._recipes[key[0]] = recipe
                self._bound[key] = bound
                if len(self._bound) > MAX_BOUND:
                    del self._bound[min(self._bound, key=lambda kept: self._bound[kept].called)]
            return bound

    def _let_go(self) -> None:
        """Drop what is bound to parameters of models that are gone: who puts new ones in place again and again would keep them all."""
        with self._lock.lock:
            for key, bound in list(self._bound.items()):
                if bound.owners and not any(owner() for owner in bound.owners):
                    del self._bound[key]

    def _refusal(self, shapes: Shapes) -> _Refusal | None:
        """Why the graph runs this call, with inputs of these shapes, as it came, if that is known without looking for a schedule."""
        known = self._recipes.get(shapes)
        if isinstance(known, _Refusal):
            return known if known.holds() else None
        if known is not None or len(self._recipes) < MAX_SHAPES:
            return None
        return self._too_many(f"more than {MAX_SHAPES} input shapes came to one graph; pad inputs to fewer shapes")

    def _all_in_use(self) -> bool:
        """Whether no other parameters are bound, because there are enough and all of them were called lately."""
        with self._lock.lock:
            called = [bound.called for bound in self._bound.values()]
        if len(called) < MAX_BOUND or self._calls - min(called) > IDLE_CALLS:
            return False
        self._too_many(
            f"more than {MAX_BOUND} models, or input shapes of models, of one class are called by turns; load() has no such limit"
        )
        return True

    def _too_many(self, reason: str) -> _Refusal:
        if self._options.strict:
            raise UnsupportedGraph(f"the graph may not be scheduled: {reason}")
        return self._refuse(reason)

    def _recipe(self, shapes: Shapes, model: DynamoGraph, given: tuple[Any, ...]) -> Recipe | _Refusal:
        from autosched.compiled import recipe_for
        from autosched.runtime.no_memory import lacks_memory

        if (refusal := self._refusal(shapes)) is not None:
            return refusal
        known = self._recipes.get(shapes)
        recipe = known.recipe if isinstance(known, _Refusal) else known
        if recipe is not None:
            return recipe
        made: Recipe | _Refusal
        try:
            made = recipe_for(model, given, {}, self._options)
        except Exception as error:
            let_through(error)
            # A plugin must not break a model that runs without it, whatever it stumbled over.
            if self._options.strict or (isinstance(error, UsageError) and not isinstance(error, UnsupportedGraph)):
                raise
            reason = str(error) if isinstance(error, AutoschedError) else f"{type(error).__name__}: {error}"
            if lacks_memory(error):
                # The graph runs next, and needs it.
                empty_frames(error)
                self._refuse(reason, "memory")
                return self._again_later(shapes, reason, None)
            made = self._refuse(reason)
        with self._lock.lock:
            if isinstance(known, _Refusal) and not isinstance(made, _Refusal):
                known.recipe = made
            else:
                self._recipes[shapes] = made
        return made

    def _again_later(self, shapes: Shapes, reason: str, recipe: Recipe | None) -> _Refusal:
        """There was no memory, which others may hold for a moment: once more at a later call, unless it was so too often."""
        from autosched.runtime.no_memory import MOST_SHORT, left_alone

        known = self._recipes.get(shapes)
        attempts = 1 + (known.attempts if isinstance(known, _Refusal) else 0)
        refusal = _Refusal(reason, left_alone(attempts) if attempts <= MOST_SHORT else None, attempts, recipe)
        with self._lock.lock:
            self._recipes[shapes] = refusal
        return refusal

    def _verified(self, model: DynamoGraph, recipe: Recipe, given: tuple[Any, ...]) -> LoadedModel:
        from autosched.compiled import ready

        return ready(model, recipe, given, {}, self._options)

    def _refuse(self, reason: str, kind: str = "") -> _Refusal:
        if (said := kind or reason) not in self._warned:
            self._warned.add(said)
            _warn(reason)
        return _Refusal(reason)


@dataclass(slots=True)
class _Bound:
    """A schedule on one set of parameters, which it keeps alive.

    ``called`` is the last call that ran on it, of those of the graph; ``owners`` are the modules that had the first of the parameters then.
    """

    model: LoadedModel
    static: tuple[torch.Tensor, ...]
    called: int
    owners: tuple[weakref.ref[torch.nn.Module], ...]


def _owners(static: Sequence[torch.Tensor]) -> tuple[weakref.ref[torch.nn.Module], ...]:
    """The modules that have the first of ``static``, but for ours; none where these are small. All objects there are are looked at."""
    import torch

    from autosched.capture.dynamo import DynamoGraph

    if not static or sum(tensor.nbytes for tensor in static) < LEAST_BYTES:
        return ()
    # By type: some objects answer for their class with a warning, or worse.
    modules = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module) and type(item) is not DynamoGraph]
    tables = ((module, vars(module).get(kind)) for module in modules for kind in ("_parameters", "_buffers"))
    return tuple(weakref.ref(module) for module, table in tables if table and any(item is static[0] for item in list(table.values())))


def _shapes(given: Sequence[Any]) -> Shapes:
    return tuple((tuple(item.shape), tuple(item.stride()), str(item.dtype)) if hasattr(item, "stride") else item for item in given)


def _raiser(error: AutoschedError) -> Callable[..., Any]:
    """Dynamo would wrap what a backend raises; what its product raises arrives as it is."""

    def fail(*args: Any) -> Any:
        raise error

    return fail


def _aside(graph: torch.fx.GraphModule, reason: str) -> Callable[..., Any]:
    _warn(reason)
    return graph


def _warn(reason: str) -> None:
    from autosched.runtime.guard import FallbackWarning

    warn_caller(f"autosched runs a compiled graph without a schedule: {reason}", FallbackWarning)
