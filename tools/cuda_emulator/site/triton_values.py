"""Values for Triton kernels that do not run: what Inductor launches is computed by ``triton_interpreter`` on the same memory.

As for operators (``values``): the real launch happens first, and the values come at once, or at every replay of the graph that holds it.
Launches of which only the time is wanted compute nothing. Only kernels launched by Inductor's ``CachingAutotuner`` are known here, as
PyTorch 2.11 with Triton 3.6, 2.13 with 3.7 and 2.15 with 3.9 have it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from after_import import after_import

_LAUNCHES = "torch._inductor.runtime.triton_heuristics"
# Where Inductor runs kernels for their time only: module, class, method.
_MEASURES = (
    ("torch._inductor.runtime.benchmarking", "TritonBenchmarker", "benchmark_gpu"),
    ("torch._inductor.runtime.benchmarking", "InductorBenchmarker", "benchmark_gpu"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen", "generate_and_run_autotune_block"),
)
_BLOCK_ELEMENTS = 1 << 18

# Where a grid is the number of elements over the size of a block, any size computes the same. Innermost last.
_FREE_GRIDS = ("Grid1D", "Grid2D", "Grid2DWithYZOverflow", "Grid3D")
_BLOCKS = (("R0_BLOCK", "r0_numel"), ("R1_BLOCK", "r1_numel"), ("XBLOCK", "xnumel"), ("YBLOCK", "ynumel"), ("ZBLOCK", "znumel"))


def install(
    twin: Callable[[Any], Any], give: Callable[[Callable[[], None]], None], thrown_away: Callable[[], AbstractContextManager[None]]
) -> None:
    """Compute what Triton kernels launched from now on would.

    Args:
        twin: a tensor's memory as a CPU tensor.
        give: does some work now, or at every replay of the graph that is being captured.
        thrown_away: within, nothing that is launched gets a value.
    """
    _wrap.twin, _wrap.give = twin, give  # type: ignore[attr-defined]

    def wrap_launches(heuristics: Any) -> None:
        if hasattr(heuristics, "CachingAutotuner"):
            _wrap(heuristics.CachingAutotuner)

    def wrap_measures(module: Any) -> None:
        for name, kind_name, method in _MEASURES:
            kind = getattr(module, kind_name, None)
            if name == module.__name__ and kind is not None and method in vars(kind):
                setattr(kind, method, _within(thrown_away, vars(kind)[method]))

    after_import(_LAUNCHES, wrap_launches)
    for name in dict.fromkeys(name for name, _, _ in _MEASURES):
        after_import(name, wrap_measures)


def _within(context: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with context():
            return function(*args, **named)

    return call


def _wrap(kind: Any) -> None:
    launch = kind.run

    def run(self: Any, *args: Any, stream: int, benchmark_run: bool = False, **named: Any) -> Any:
        made = launch(self, *args, stream=stream, benchmark_run=benchmark_run, **named)
        if benchmark_run:
            return made
        twins = [_wrap.twin(item) for item in args]  # type: ignore[attr-defined]
        # Compiled in another process, the function's own text has stayed there.
        function = self.fn if self.fn.fn is not None else self._reload_kernel().fn
        config = self.launchers[0].config
        if self.inductor_meta.get("grid_type") in _FREE_GRIDS:
            config = _in_large_blocks(config, [item.name for item in function.params if not item.is_constexpr], args)
        given, grid = self._interpret_args_grid(tuple(twins), config)
        constants = {name: value for name, value in config.kwargs.items() if name in function.arg_names}
        _wrap.give(_work(function.fn, grid, given, constants))  # type: ignore[attr-defined]
        return made

    kind.run = run


def _in_large_blocks(config: Any, names: Sequence[str], args: Sequence[Any]) -> Any:
    """``config`` with as few blocks as possible: each costs the same time here, whatever is in it.

    The blocks divide the elements, since a kernel has no mask where those of its own configurations do.
    """
    made = copy.copy(config)
    made.kwargs = dict(config.kwargs)
    numels = {name: item for name, item in zip(names, args, strict=False) if isinstance(item, int)}
    room = _BLOCK_ELEMENTS
    for block, numel in _BLOCKS:
        size = numels.get(numel, 1)
        if block in made.kwargs and size > 1:
            chosen = max(part for part in range(1, min(size, room) + 1) if size % part == 0)
            size = made.kwargs[block] = max(chosen, made.kwargs[block]) if chosen < size else size
        room = max(1, room // max(1, size))
    return made


def _work(function: Any, grid: Any, args: Sequence[Any], constants: dict[str, Any]) -> Callable[[], None]:
    from triton_interpreter import Interpreted

    kernel = Interpreted(function, tuple(int(item) for item in grid), args, constants)
    return kernel.run
