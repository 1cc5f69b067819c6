"""Which of Inductor's modes to take apart: that of the fastest compiled baseline, so that its kernels are what is scheduled.

A sequential schedule of those launches is that baseline, within noise (or faster, where a product is through cuBLASLt); whatever lanes
gain is on top of the best that PyTorch does.
On a CPU, a call of compiled code also checks guards, one for each parameter, which a schedule does not pay for. Of a small model that is
most of the time, and which mode is faster says little of the kernels: two are taken apart there, and the rounds of their orders decide.
(On a GPU the baselines are CUDA graphs that are replayed without guards.)
On a GPU the defaults are taken apart beside a mode that is faster, if the model has many matrix products: of a mixture of experts on an
H200 they were four times as slow as max-autotune for products by cuBLAS alone (``experiments/README.md``, probe P15), and a schedule has
cuBLASLt for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autosched.core.records import Failure
from autosched.core.variants import Lowering
from autosched.device.cuda.baselines import MODES
from autosched.pipeline.judge import External

TORCH_COMPILE = "torch_compile"
"""The baseline of a CPU's ``torch.compile`` with its defaults, frozen."""

MODE_OF: Mapping[str, Lowering] = {TORCH_COMPILE: Lowering.INDUCTOR, **{kind.value: lowering for kind, lowering in MODES.items()}}
"""The lowering with the settings of a baseline, by the baseline's name."""

# A mode that times kernels must be faster by more than this: it compiles for minutes where the others take seconds, wherever it is loaded.
_MARGIN = 0.01
# Where calls take seconds, few say the same: no more rounds once the calls that count took so long together. Nobody's budget has them.
_ROUNDS, _LEAST_ROUNDS, _ENOUGH_US = 9, 3, 5e6

_MOSTLY_GUARDS_US = 1000.0
"""Up to here most of a guarded call may be guards: of DeepFM, with 64 embedding tables on two cores of an EPYC, kernels of 0.03 ms were
0.1 to 0.4 ms of a call (``experiments/results/cpu_amd_epyc_avx512_32k_2/autosched_deepfm.json``)."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """Which modes to take apart, and a sentence that says what the compiled baselines take.

    Args:
        lowerings: the mode of the fastest; where that one's time says little of its kernels, the fastest of the other kind as well, of
            Inductor's defaults and the modes that time kernels.
        measured: whether any of the baselines ran.
    """

    lowerings: tuple[Lowering, ...]
    why: str
    measured: bool = True


def fastest_mode(baselines: Sequence[External], *, guarded: bool, products: bool = False) -> Adopted:
    """Time those of ``baselines`` that are compiled, in rounds, and say whose modes are to be used; Inductor's defaults if none runs.

    Args:
        guarded: whether their calls check guards.
        products: whether they have many matrix products, which a schedule may run by another library.
    """
    columns: dict[str, list[float]] = {item.name: [] for item in baselines if item.name in MODE_OF}
    running = [item for item in baselines if item.name in columns]
    for made in range(_ROUNDS):
        if made >= _LEAST_ROUNDS and sum(map(sum, columns.values())) >= _ENOUGH_US:
            break
        for item in list(running):
            taken = item.round_us()
            if isinstance(taken, Failure):
                running.remove(item)
                del columns[item.name]
            else:
                columns[item.name].append(taken)
    medians = {name: float(np.median(times)) for name, times in columns.items()}
    if not medians:
        return Adopted((Lowering.INDUCTOR,), "no compiled baseline runs here", measured=False)
    best = min(medians, key=lambda name: medians[name])
    plain = next((name for name in medians if MODE_OF[name] is Lowering.INDUCTOR), None)
    if plain is not None and medians[plain] <= medians[best] * (1.0 + _MARGIN):
        best = plain
    others = ", ".join(f"{name} {time_us:,.0f} us" for name, time_us in medians.items() if name != best)
    why = f"{best} is the fastest of torch.compile's ways here: {medians[best]:,.0f} us" + (f"; {others}" if others else "")
    chosen = [best]
    if guarded and medians[best] <= _MOSTLY_GUARDS_US:
        other_kind = [name for name in medians if (name == plain) != (best == plain)]
        chosen += sorted(other_kind, key=lambda name: medians[name])[:1]
    if products and plain is not None and plain not in chosen:
        chosen.append(plain)
    return Adopted(tuple(MODE_OF[name] for name in chosen), why)
