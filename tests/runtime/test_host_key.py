"""What decides on a CPU which kernels are chosen, and is in no version: instructions and variables of the environment."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest
import torch

from autosched.core.records import DeviceKey
from autosched.runtime import cores as cores_module
from autosched.runtime import host_key
from autosched.runtime.cores import usable_cores
from autosched.runtime.host_key import LOW_PRECISION, cpu_device_key, software_key
from autosched.runtime.verdict import Compatibility, check_bundle
from tests.conformance.bundles import two_branches_bundle
from tests.conformance.graphs import TwoBranches


def _key_with(monkeypatch: pytest.MonkeyPatch, found: dict[str, object]) -> DeviceKey:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    return host_key._key_with_cores.__wrapped__(usable_cores())


def test_processors_of_one_name_are_told_apart_by_what_they_multiply_with(monkeypatch: pytest.MonkeyPatch) -> None:
    older = _key_with(monkeypatch, {"avx512_f": True, "avx512_vnni": True, "amx_bf16": False})
    newer = _key_with(monkeypatch, {"avx512_f": True, "avx512_vnni": True, "avx512_bf16": True, "amx_bf16": True, "amx_int8": True})
    assert newer.differences(older) == [f"{LOW_PRECISION}: amx_bf16 amx_int8 avx512_bf16 avx512_vnni there, avx512_vnni here"]
    assert older.name == newer.name


def test_a_processor_without_any_has_the_key_it_always_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LOW_PRECISION not in dict(_key_with(monkeypatch, {"avx2": True}).details)


def test_a_bundle_that_says_less_of_its_processor_is_looked_at_again_and_another_processor_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _key_with(monkeypatch, {})
    matrices = _key_with(monkeypatch, {"amx_bf16": True})
    for there, here, grade in ((plain, matrices, Compatibility.DEGRADED), (matrices, plain, Compatibility.INCOMPATIBLE)):
        monkeypatch.setattr("tests.conformance.bundles.cpu_device_key", lambda there=there: there, raising=True)
        verdict = check_bundle(two_branches_bundle(TwoBranches().eval()), here, software_key())
        assert verdict.compatibility is grade
        assert len(verdict.lines) == 1
        assert LOW_PRECISION in verdict.lines[0]


def test_a_process_that_is_pinned_to_fewer_cores_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "quota_cores", lambda: None)
    keys = []
    for usable in ({0, 1, 2, 3}, {2}):
        monkeypatch.setattr(cores_module.os, "sched_getaffinity", lambda process, usable=usable: usable, raising=False)
        keys.append(cpu_device_key())
    assert keys[0].differences(keys[1]) == ["cores: 4 there, 1 here"]


def test_limits_on_the_instructions_that_onednn_may_use_are_part_of_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = software_key()
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    assert usual.differences(software_key()) == [
        "onednn_default_fpmath_mode: absent there, bf16 here",
        "onednn_max_cpu_isa: absent there, avx2 here",
    ]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert dict(software_key().versions)["onednn_max_cpu_isa"] == "avx512_core"


def test_flags_that_pytorch_does_not_name_are_not_looked_for() -> None:
    known = torch.cpu.get_capabilities()
    unknown = [name for name in host_key._FOR_PRODUCTS if name.startswith(("amx", "avx")) and name not in known]
    assert not unknown or known.get("architecture") not in ("x86", "x86_64")


_ARM = """processor\t: {core}
BogoMIPS\t: 2100.00
Features\t: fp asimd atomics asimddp
CPU implementer\t: {maker}
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: {part}
CPU revision\t: 1

"""


def _name_on(monkeypatch: pytest.MonkeyPatch, folder: Path, *cores: tuple[str, str]) -> str:
    told = folder / "cpuinfo"
    told.write_text("".join(_ARM.format(core=core, maker=maker, part=part) for core, (maker, part) in enumerate(cores)))
    monkeypatch.setattr(host_key, "_CPUINFO", told)
    return host_key._key_with_cores.__wrapped__(usable_cores()).name


def test_processors_of_which_linux_has_no_name_are_told_apart_by_their_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _name_on(monkeypatch, tmp_path, ("0x41", "0xd0c"), ("0x41", "0xd0c")) == "Neoverse-N1"
    assert _name_on(monkeypatch, tmp_path, ("0x41", "0xd4f")) == "Neoverse-V2"
    assert _name_on(monkeypatch, tmp_path, ("0x48", "0xd01")) == "implementer 0x48 part 0xd01"
    both = _name_on(monkeypatch, tmp_path, ("0x41", "0xd87"), ("0x41", "0xd85"), ("0x41", "0xd87"))
    assert both == "Cortex-A725 + Cortex-X925"


def test_a_processor_of_which_linux_says_nothing_is_called_as_python_calls_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _name_on(monkeypatch, tmp_path) == (platform.processor() or platform.machine())


def test_a_schedule_of_one_arm_processor_is_refused_on_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = dataclasses.replace(cpu_device_key(), name=_name_on(monkeypatch, tmp_path, ("0x41", "0xd49")))
    here = dataclasses.replace(there, name=_name_on(monkeypatch, tmp_path, ("0x41", "0xd4f")))
    monkeypatch.setattr("tests.conformance.bundles.cpu_device_key", lambda: there)
    verdict = check_bundle(two_branches_bundle(TwoBranches().eval()), here, software_key())
    assert verdict.compatibility is Compatibility.INCOMPATIBLE
    assert verdict.lines == ("device name: Neoverse-N2 there, Neoverse-V2 here",)
