"""Settings of the tuning process that decide which kernels run, read there and repeated in the processes that measure."""

from __future__ import annotations

import torch

from autosched.device.cuda.messages import SettingsBody
from autosched.runtime.cuda_switches import attention_kernels, half_precision, set_switches
from autosched.runtime.float32 import convolutions_rounded, matmul_precision


def current_settings(index: int) -> SettingsBody:
    """This process's settings, and which visible GPU to use."""
    return SettingsBody(
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        cudnn_allow_tf32=convolutions_rounded(),
        float32_matmul_precision=matmul_precision("cuda"),
        device_index=index,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        cudnn_enabled=bool(torch.backends.cudnn.enabled),
        attention=attention_kernels(),
        half_precision=half_precision(),
    )


def apply_settings(settings: SettingsBody) -> None:
    """Set what another process has set."""
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    torch.backends.cudnn.allow_tf32 = settings.cudnn_allow_tf32
    torch.backends.cudnn.enabled = settings.cudnn_enabled
    set_switches(settings.attention, settings.half_precision)
    torch.set_float32_matmul_precision(settings.float32_matmul_precision)
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.deterministic)
