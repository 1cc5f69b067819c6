"""Settings of the tuning process that decide which kernels run, read there and repeated in the processes that measure."""

from __future__ import annotations

import torch

from autosched.device.cuda.messages import SettingsBody


def current_settings(index: int) -> SettingsBody:
    """This process's settings, and which visible GPU to use."""
    return SettingsBody(
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        cudnn_allow_tf32=bool(torch.backends.cudnn.allow_tf32),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        device_index=index,
    )


def apply_settings(settings: SettingsBody) -> None:
    """Set what another process has set."""
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    torch.backends.cudnn.allow_tf32 = settings.cudnn_allow_tf32
    torch.set_float32_matmul_precision(settings.float32_matmul_precision)
