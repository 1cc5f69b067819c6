"""What a custom operator is called says nothing to the cost model; what it moves, and its time alone, do."""

from __future__ import annotations

import numpy as np

from autosched.costmodel.features import kernel_columns
from autosched.datasets.facts import DeviceFacts, KernelFacts
from autosched.datasets.splits import operator_family


def features_of(kind: str) -> np.ndarray:
    kernel = KernelFacts("s", 1, kind, flops=0, bytes_read=4096, bytes_written=4096, elements=1024, solo_us=10.0)
    device = DeviceFacts("cpu", "cpu", 2, peak_gflops=50.0, bandwidth_gb_s=20.0, cache_bytes=1 << 20)
    return kernel_columns([kernel], [device], np.zeros(1, np.int64)).matrix


def test_names_that_sound_like_products_and_convolutions_are_one_opaque_kind() -> None:
    opaque = features_of("mylib::norm")
    assert np.isfinite(opaque).all()
    for name in ("mylib::grouped_mm", "mylib::conv", "mylib::attention", "mylib::cat"):
        assert np.array_equal(features_of(name), opaque)
    assert not np.array_equal(features_of("aten::mm"), opaque)
    # Launches of Inductor's code are named by Inductor.
    assert np.array_equal(features_of("inductor::mm"), features_of("aten::mm"))


def test_their_family_is_that_of_what_is_bound_by_memory() -> None:
    assert {operator_family(kind) for kind in ("mylib::conv", "mylib::mm", "aten::relu")} == {"memory"}
    assert operator_family("inductor::convolution") == "convolution"
