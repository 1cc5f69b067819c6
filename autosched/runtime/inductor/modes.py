"""Inductor's modes: one place for their options, so that a lowering and the baseline of its name are compiled alike.

What our way of taking code apart needs on top of that is in ``inductor.compile``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autosched.core.program import Program
from autosched.core.variants import Lowering

_AUTOTUNE: Mapping[str, object] = {"max_autotune": True, "coordinate_descent_tuning": True}
# A process may have switched these on for its own models (TORCHINDUCTOR_MAX_AUTOTUNE=1): its kernels would be others in each process.
_UNTUNED: Mapping[str, object] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}
_OPTIONS: Mapping[Lowering, Mapping[str, object]] = {
    Lowering.INDUCTOR: _UNTUNED,
    Lowering.MAX_AUTOTUNE: _AUTOTUNE,
    Lowering.MAX_AUTOTUNE_COMBO: {**_AUTOTUNE, "combo_kernels": True, "benchmark_combo_kernel": True},
}


def mode_options(lowering: Lowering) -> dict[str, object]:
    """Inductor's options of the mode that ``lowering`` is compiled in, but for freezing.

    Raises:
        KeyError: for a lowering that is not one of ``WHOLE``.
    """
    return dict(_OPTIONS[lowering])


@dataclass(frozen=True, slots=True)
class Mode:
    """How a program is compiled as a whole.

    Args:
        lowering: one of ``WHOLE``.
        frozen: whether Inductor computes with the constants (folds them, lays them out anew, packs them); else they are arguments.
        choices: as ``Program.choices``: what to take wherever there is a choice between kernels; empty to choose by timing.
    """

    lowering: Lowering = Lowering.INDUCTOR
    frozen: bool = True
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def autotuned(self) -> bool:
        """Whether kernels are chosen by timing them."""
        return bool(_OPTIONS[self.lowering]["max_autotune"])


PLAIN = Mode()
"""Inductor's own defaults, frozen."""


def mode_of(program: Program, kind: str) -> Mode:
    """How the operators of ``program`` were compiled, on a device of ``kind``: ``cpu`` or ``cuda``."""
    return Mode(Lowering(program.lowering), program.frozen or kind == "cpu", program.choices)
