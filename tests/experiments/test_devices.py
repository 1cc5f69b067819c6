"""Folders are named after devices, so that no device's figures stand in another's place."""

from __future__ import annotations

import pytest

from autosched.core.records import DeviceKey
from experiments.devices import RESULTS, folder_name, key_of, results_of


@pytest.mark.parametrize(
    ("kind", "name", "details", "folder"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", (), "h100"),
        ("cuda", "NVIDIA H100 PCIe", (), "cuda_nvidia_h100_pcie"),
        ("cpu", "Intel(R) Xeon(R) Processor", (("cores", "2"),), "cpu_intel_xeon_processor_2"),
        ("cpu", "AMD EPYC", (("cache_l1", "32K"), ("cores", "2"), ("vector", "AVX2")), "cpu_amd_epyc_avx2_32k_2"),
        ("cpu", "AMD EPYC", (("cache_l1", "48K"), ("cores", "2"), ("vector", "AVX512")), "cpu_amd_epyc_avx512_48k_2"),
        ("cpu", "Intel(R) Core(TM) i9 CPU @ 3.60GHz", (("cores", "16"), ("vector", "AVX2")), "cpu_intel_core_i9_cpu_3_60ghz_16"),
    ],
)
def test_a_folder_says_what_was_measured(kind: str, name: str, details: tuple[tuple[str, str], ...], folder: str) -> None:
    assert folder_name(DeviceKey(kind, name, details)) == folder


def test_results_of_this_machine_lie_under_its_own_name() -> None:
    assert results_of("cpu") == RESULTS / folder_name(key_of("cpu"))
    assert results_of("cpu").name.startswith("cpu_")
