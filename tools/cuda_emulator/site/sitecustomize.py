"""Found by every Python under run.py: gives kernels their values, or zeros, as soon as PyTorch has been imported."""

from __future__ import annotations

import os
from types import ModuleType

from after_import import after_import

_ZEROS = os.environ.get("EMULATED_CUDA_VALUES") == "zeros"


def _install(torch: ModuleType) -> None:
    # The stand-in for cuDNN has no attention, which PyTorch would prefer on such a device in half precision; flash attention is next.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if _ZEROS:
        import zeros

        zeros.install()
    else:
        import values

        values.install()


after_import("torch", _install)
