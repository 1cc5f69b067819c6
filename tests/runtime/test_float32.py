"""PyTorch's two interfaces for the precision of float32, in the states that one of them cannot describe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parents[2]

# Settings of the whole process, some of which nothing puts back: each case in a process of its own.
_CASES = {
    "legacy": ("torch.set_float32_matmul_precision('high')", "high", True),
    "products": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "high", True),
    "exact_products": ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "highest", True),
    "exact_convolutions": ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "highest", False),
    "exact_recurrence": ("torch.backends.cudnn.rnn.fp32_precision = 'ieee'", "highest", True),
    "both": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.cudnn.conv.fp32_precision = 'ieee'", "high", False),
}


@pytest.mark.parametrize("name", _CASES)
def test_both_interfaces_are_read(name: str) -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has the older interface only")
    change, matmul, rounded = _CASES[name]
    code = f"""
import torch
{change}
from autosched.device.cuda.settings import apply_settings, current_settings
from autosched.runtime import float32
from autosched.runtime.host_key import numerics_key
kinds = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
before = [kind.fp32_precision for kind in kinds]
assert float32.matmul_precision("cuda") == {matmul!r}
assert float32.convolutions_rounded() is {rounded}
assert dict(numerics_key("cuda"))["float32_matmul_precision"] == {matmul!r}
assert dict(numerics_key("cpu"))["float32_matmul_precision"] in ("highest", "high")
found = current_settings(0)
assert (found.float32_matmul_precision, found.cudnn_allow_tf32) == ({matmul!r}, {rounded})
with float32.full_convolutions():
    assert torch.backends.cudnn.allow_tf32 is False
    assert torch.backends.cudnn.conv.fp32_precision != "tf32"
assert [kind.fp32_precision for kind in kinds] == before
assert float32.convolutions_rounded() is {rounded}
apply_settings(found)
with float32.full_float32():
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
assert current_settings(0) == found
"""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(_ROOT)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
