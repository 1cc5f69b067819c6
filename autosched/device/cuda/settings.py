"""Settings of the tuning process that decide which kernels run, read there and repeated in the processes that measure."""

from __future__ import annotations

import torch

from autosched.core.errors import DeviceError
from autosched.core.records import DeviceKey
from autosched.device.cuda.messages import SettingsBody
from autosched.runtime.cuda.key import cuda_device_key
from autosched.runtime.cuda.switches import attention_kernels, depthwise_kernel, half_precision, products_library, set_switches
from autosched.runtime.float32 import convolutions_rounded, matmul_precision, round_convolutions


def current_settings(index: int, gpu: DeviceKey | None = None) -> SettingsBody:
    """This process's settings, and which visible GPU to use.

    Args:
        gpu: what it is, for :func:`require_gpu` there.
    """
    return SettingsBody(
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        cudnn_allow_tf32=convolutions_rounded(),
        float32_matmul_precision=matmul_precision("cuda"),
        device_index=index,
        gpu=gpu,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        cudnn_enabled=bool(torch.backends.cudnn.enabled),
        attention=attention_kernels(),
        half_precision=half_precision(),
        depthwise_kernel=depthwise_kernel(),
        products_library=products_library(),
    )


def require_gpu(settings: SettingsBody) -> None:
    """Check that the GPU of that index is here what it is in the process whose ``settings`` these are: a record carries its key.

    A process that changed ``CUDA_VISIBLE_DEVICES`` after it had asked the driver sees other GPUs than those that it starts.

    Raises:
        DeviceError: if it is another.
        DeviceMissing, UsageError: if there is none.
    """
    if settings.gpu is not None and (differing := settings.gpu.differences(cuda_device_key(settings.device_index))):
        raise DeviceError(
            f"cuda:{settings.device_index} is another GPU in the measuring process than in this one ({differing[0]}); "
            "set CUDA_VISIBLE_DEVICES before the process starts, not in it."
        )


def apply_settings(settings: SettingsBody) -> None:
    """Set what another process has set."""
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    round_convolutions(allowed=settings.cudnn_allow_tf32)
    torch.backends.cudnn.enabled = settings.cudnn_enabled
    set_switches(settings.attention, settings.half_precision, settings.depthwise_kernel, settings.products_library)
    torch.set_float32_matmul_precision(settings.float32_matmul_precision)
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.deterministic)
