"""Compile a model's Triton kernels for a GPU that is not there, so that its minutes are not spent on that.

    export TRITON_CACHE_DIR=/tmp/triton
    python tools/cuda_emulator/run.py --values zeros -- python tools/cuda_emulator/precompile.py torchvision:googlenet

``torch.compile`` in its default mode, max-autotune and max-autotune with combo kernels: every kernel that the compiler would time is
compiled once and timed not at all. Triton finds them again on the real GPU where torch, Triton, Python's minor version, the GPU's
properties (``run.py --device``) and ``TRITON_CACHE_DIR`` are the same. An H200 was given 502 templates of convolutions that way, most of
GoogLeNet's, and compiled 74 more. What Inductor itself keeps (``TORCHINDUCTOR_CACHE_DIR``) must not be taken along: those kernels were
chosen by nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.runtime import benchmarking

from autosched import zoo
from autosched.device.cuda.baselines import MODES, compile_options
from autosched.runtime.trees import map_tensors


def _once(self: object, run: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
    """In place of timing: it is compiled at its first run, and all take the same."""
    run()
    return 0.01


def main() -> None:
    """Compile every model in every mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="names of the zoo")
    models = parser.parse_args().models
    for timer in (benchmarking.InductorBenchmarker, benchmarking.TritonBenchmarker):
        timer.benchmark_gpu = _once  # type: ignore[method-assign]
    for name in models:
        loaded = zoo.load(name)
        model = loaded.model.cuda().eval()
        args, kwargs = map_tensors(lambda tensor: tensor.cuda(), (loaded.args, loaded.kwargs))
        for kind in MODES:
            torch._dynamo.reset()
            begin = time.monotonic()
            with torch.no_grad():
                torch.compile(model, options=compile_options(kind), dynamic=False)(*args, **kwargs)
            print(f"{name} {kind}: {time.monotonic() - begin:.0f} s", flush=True)
    # Inductor waits minutes for its own compiling processes, which have nothing left to do.
    os._exit(0)


if __name__ == "__main__":
    main()
