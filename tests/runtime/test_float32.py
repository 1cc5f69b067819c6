"""PyTorch's two interfaces for the precision of float32, in the states that one of them cannot describe."""

from __future__ import annotations

import threading

import pytest
import torch

from autosched.runtime import float32
from tests.conformance.forked import run_forked
from tests.conformance.waiting import at_once

# Settings of the whole process, some of which nothing puts back: each case in a process of its own.
_CASES = {
    "legacy": ("torch.set_float32_matmul_precision('high')", "high", True),
    "products": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "high", True),
    "exact_products": ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "highest", True),
    "exact_convolutions": ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "highest", False),
    "exact_recurrence": ("torch.backends.cudnn.rnn.fp32_precision = 'ieee'", "highest", True),
    "all_backends": ("torch.backends.fp32_precision = 'tf32'", "high", True),
    "all_of_cudnn": ("torch.backends.cudnn.fp32_precision = 'tf32'", "high", True),
    "exact_against_all": (
        "b = torch.backends; b.fp32_precision = 'tf32'; b.cudnn.conv.fp32_precision = b.cudnn.rnn.fp32_precision = 'ieee'",
        "high",
        False,
    ),
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
with float32.full_float32():
    assert "tf32" not in [kind.fp32_precision for kind in kinds]
assert [kind.fp32_precision for kind in kinds] == before
assert float32.convolutions_rounded() is {rounded}
apply_settings(found)
with float32.full_float32():
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32
assert current_settings(0) == found
"""
    done = run_forked(code)
    assert done.returncode == 0, done.stderr


_ON_A_CPU: tuple[tuple[str, str, dict[str, str], str | None], ...] = (
    ("pass", "highest", {}, None),
    ("torch.set_float32_matmul_precision('medium')", "medium", {}, "bfloat16"),
    ("torch.set_float32_matmul_precision('high')", "high", {}, "float16"),
    ("backends.mkldnn.matmul.fp32_precision = 'bf16'", "medium", {}, "bfloat16"),
    ("backends.mkldnn.conv.fp32_precision = 'bf16'", "highest", {"float32_convolutions": "bf16"}, "bfloat16"),
    ("backends.mkldnn.rnn.fp32_precision = 'tf32'", "highest", {"float32_recurrence": "tf32"}, "float16"),
    ("backends.cuda.matmul.fp32_precision = 'tf32'", "highest", {}, None),
    ("torch.set_float32_matmul_precision('medium'); backends.mkldnn.matmul.fp32_precision = 'ieee'", "highest", {}, None),
)


def test_what_onednn_may_round_is_in_the_key_and_can_be_off_for_a_while() -> None:
    code = f"""
import torch
from autosched.runtime import float32
from autosched.runtime.host_key import apply_numerics, numerics_key
backends = torch.backends
kinds = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
def state():
    return [float32.matmul_precision("cpu"), float32.cpu_roundings()]
for change, matmul, others, dtype in {_ON_A_CPU!r}:
    torch.set_float32_matmul_precision("highest")
    for kind in kinds:
        kind.fp32_precision = "none"
    exec(change)
    key, raw = numerics_key("cpu"), [kind.fp32_precision for kind in kinds]
    assert state() == [matmul, others], (change, state())
    assert dict(key)["float32_matmul_precision"] == matmul
    assert {{name: value for name, value in key if name in ("float32_convolutions", "float32_recurrence")}} == others
    assert float32.rounded_as("cpu") is (getattr(torch, dtype) if dtype else None), change
    with float32.full_float32():
        assert float32.rounded_as("cpu") is None, change
        assert state() == ["highest", {{}}], (change, state())
    assert [kind.fp32_precision for kind in kinds] == raw, change
    # As a process that measures does, whatever it had before.
    for before in ("ieee", "bf16"):
        for kind in kinds:
            kind.fp32_precision = before
        apply_numerics(key)
        assert numerics_key("cpu") == key, change
"""
    done = run_forked(code)
    assert done.returncode == 0, done.stderr


def test_threads_that_compute_in_full_float32_at_once_leave_everything_as_it_was() -> None:
    """What one puts back last would be what the other one had set, for good: every load() after that finds another setting."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    inside: list[int] = []
    both, first_left = threading.Event(), threading.Event()

    def compute(number: int) -> None:
        with float32.full_float32():
            inside.append(number)
            # Were both let in, the first would leave first.
            if inside[0] == number:
                both.wait(0.2)
            else:
                both.set()
                first_left.wait(0.2)
        first_left.set()

    try:
        at_once(compute, range(2))
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def test_another_thread_is_told_what_the_process_is_set_to() -> None:
    before = float32.rounded_as("cuda"), float32.convolutions_rounded()
    assert before == (torch.float16, True)
    told: list[object] = []
    reader = threading.Thread(target=lambda: told.append((float32.rounded_as("cuda"), float32.convolutions_rounded())))
    with float32.full_float32():
        assert (float32.rounded_as("cuda"), float32.convolutions_rounded()) == (None, False)
        reader.start()
        reader.join(0.1)
    reader.join()
    assert told == [before]


def test_a_turn_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it may wait for what this thread holds."""
    monkeypatch.setattr(float32, "_PATIENCE_S", 0.01)
    with float32.as_it_is_set():
        reader = threading.Thread(target=float32.convolutions_rounded, daemon=True)
        reader.start()
        reader.join(20.0)
        assert not reader.is_alive()
