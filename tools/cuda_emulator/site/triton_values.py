"""Values for Triton kernels that do not run: what Inductor launches is computed by Triton's interpreter on the same memory.

As for operators (``values``): the real launch happens first, and the values come at once, or at every replay of the graph that holds it.
Only kernels launched by Inductor's ``CachingAutotuner`` are known here, as PyTorch 2.11 and Triton 3.6 have it. Slow: for small models.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from after_import import after_import

_NAME = "torch._inductor.runtime.triton_heuristics"
_lock = threading.RLock()


def _wrap_launches(heuristics: Any) -> None:
    if hasattr(heuristics, "CachingAutotuner"):
        _wrap(heuristics.CachingAutotuner)


def install(twin: Callable[[Any], Any], give: Callable[[Callable[[], None]], None]) -> None:
    """Compute what Triton kernels launched from now on would.

    Args:
        twin: a tensor's memory as a CPU tensor.
        give: does some work now, or at every replay of the graph that is being captured.
    """
    _wrap.twin, _wrap.give = twin, give  # type: ignore[attr-defined]
    after_import(_NAME, _wrap_launches)


def _wrap(kind: Any) -> None:
    launch = kind.run

    def run(self: Any, *args: Any, stream: int, **named: Any) -> Any:
        made = launch(self, *args, stream=stream, **named)
        twins = [_wrap.twin(item) for item in args]  # type: ignore[attr-defined]
        config = self.launchers[0].config
        # Compiled in another process, the function's own text has stayed there.
        function = self.fn if self.fn.fn is not None else self._reload_kernel().fn
        given, grid = self._interpret_args_grid(tuple(twins), config)
        constants = {name: value for name, value in config.kwargs.items() if name in function.arg_names}
        _wrap.give(lambda: _interpret(function.fn, grid, given, constants))  # type: ignore[attr-defined]
        return made

    kind.run = run


def _interpret(function: Any, grid: Any, args: Sequence[Any], constants: dict[str, Any]) -> None:
    from triton.runtime.interpreter import GridExecutor

    with _lock, _interpreting(function):
        made = _interpreted(function)
        GridExecutor(made.rewrite(), made.arg_names, tuple(int(item) for item in grid))(*args, **constants)


def _interpreted(function: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(function)


@contextlib.contextmanager
def _interpreting(function: Any) -> Iterator[None]:
    """Let functions that were made to be compiled call each other as Python, and put formulas in the place of NVIDIA's library."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    call, patch, library = JITFunction.__call__, interpreter._patch_lang_tensor, function.__globals__.get("libdevice")

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # NumPy no longer takes an array of one element for a number.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    JITFunction.__call__ = lambda self, *args, **named: _interpreted(self.fn)(*args, **named)
    interpreter._patch_lang_tensor = patched
    function.__globals__["libdevice"] = _library()
    try:
        yield
    finally:
        JITFunction.__call__ = call
        interpreter._patch_lang_tensor = patch
        function.__globals__["libdevice"] = library


def _library() -> SimpleNamespace:
    import triton.language as tl

    names = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "abs")
    functions = {name: (lambda x, name=name: getattr(tl, name)(x)) for name in names}
    return SimpleNamespace(**functions, tanh=lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0)
