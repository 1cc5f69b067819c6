"""The switches of attention and of products in half precision, carried from one state to another. No GPU is needed to set them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from autosched.device.cuda.settings import apply_settings, current_settings
from autosched.runtime.cuda.switches import attention_kernels, depthwise_kernel, half_precision, products_library, set_switches
from autosched.runtime.host_key import numerics_key


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = attention_kernels(), half_precision(), depthwise_kernel(), products_library()
    yield
    set_switches(*before)
    assert (attention_kernels(), half_precision(), depthwise_kernel(), products_library()) == before


def test_what_one_process_allows_another_is_made_to_allow() -> None:
    usual, key = current_settings(0), numerics_key("cuda")
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
        not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    )
    changed = current_settings(0)
    assert "flash" in usual.attention
    assert "flash" not in changed.attention
    assert set(usual.half_precision) ^ set(changed.half_precision) == {"allow_bf16_reduced_precision_reduction"}
    assert numerics_key("cuda") != key
    apply_settings(usual)
    assert current_settings(0) == usual
    assert numerics_key("cuda") == key
    apply_settings(changed)
    assert current_settings(0) == changed


def test_split_sums_are_kept_apart_from_reduced_ones() -> None:
    name = "allow_fp16_reduced_precision_reduction"
    if not hasattr(torch.backends.cuda.matmul, f"{name}_split_k"):
        pytest.skip("this PyTorch has one switch for both")
    attention = attention_kernels()
    for wanted in ((True, True), (False, True), (False, False)):
        names = tuple(text for text, on in zip((name, f"{name}_split_k"), wanted, strict=True) if on)
        set_switches(attention, names, "", "")
        assert half_precision() == names


def test_a_kernel_that_is_asked_for_is_asked_for_in_the_other_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, key = current_settings(0), numerics_key("cuda")
    # Before it had a say in this, any attribute could be set.
    monkeypatch.setattr(torch.backends.cudnn, "depthwise_kernel", "native", raising=False)
    changed = current_settings(0)
    assert (usual.depthwise_kernel, changed.depthwise_kernel) == ("", "native")
    assert dict(numerics_key("cuda"))["depthwise_kernel"] == "native"
    apply_settings(usual)
    assert current_settings(0) == usual
    assert numerics_key("cuda") == key
    apply_settings(changed)
    assert current_settings(0) == changed


def test_products_go_to_the_library_that_the_other_process_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else kernels are timed and compared that are not those that are served."""
    preferred = [SimpleNamespace(name="Cublas")]

    def prefer(library: str | None = None) -> SimpleNamespace:
        # A build for CPUs answers, and lets itself be told nothing.
        if library is not None:
            preferred[0] = SimpleNamespace(name=library.capitalize())
        return preferred[0]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    usual, key = current_settings(0), numerics_key("cuda")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    changed = current_settings(0)
    assert (usual.products_library, changed.products_library) == ("", "cublaslt")
    assert dict(numerics_key("cuda"))["products_library"] == "cublaslt"
    apply_settings(usual)
    assert current_settings(0) == usual
    assert numerics_key("cuda") == key
    apply_settings(changed)
    assert current_settings(0) == changed
