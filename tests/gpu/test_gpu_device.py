"""The device as a whole on a small program: its key, its failures, and the compiled baselines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autosched.core.records import Failure, FailureKind, PairRecord, SoloRecord
from autosched.core.schedule import sequential
from autosched.device.base import Pair
from autosched.device.cuda.baselines import BaselineKind
from autosched.device.cuda.device import CudaDevice
from autosched.device.cuda.meter import GpuMeter
from autosched.device.cuda.profile import OperatorProfile
from autosched.device.cuda.session import CudaSession
from tests.conformance.programs import branches_program
from tests.gpu.gpu_rig import open_baseline, open_session

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

_PLUGIN = """
import torch

_flag = None


def wrap_kernel(index, kernel):
    if index != 8:
        return kernel

    def run(slots):
        global _flag
        kernel(slots)
        if _flag is None:
            _flag = torch.zeros((), dtype=torch.bool, device="cuda")
        if torch.cuda.is_current_stream_capturing():
            torch._assert_async(_flag)  # fails on the device, which answers nothing from then on

    return run
"""


@pytest.mark.gpu_only(reason="it asks the driver")
def test_the_key_names_the_device_and_this_process_has_no_context() -> None:
    device = CudaDevice()
    details = dict(device.key.details)
    assert device.key.kind == "cuda"
    assert int(details["sm_count"]) > 0
    assert int(details["l2_bytes"]) > 0
    assert "compute_capability" in details
    assert dict(device.software.versions)["cuda_runtime"] == str(torch.version.cuda)


@pytest.mark.gpu_only(reason="it asks NVML")
def test_what_is_used_of_the_device_is_told_in_shares_or_not_at_all() -> None:
    use = GpuMeter(0).use()
    assert use is None or (0.0 <= use.busy <= 1.0 and 0 < use.held_bytes <= use.memory_bytes)


def test_a_session_measures_without_a_context_in_this_process() -> None:
    program, constants = branches_program(branches=3, depth=2, size=256)
    with open_session(program, constants) as session:
        assert isinstance(session, CudaSession)
        limits = session.limits
        assert limits.cross_lane_us >= 0
        assert all(isinstance(row[0], SoloRecord) for row in session.solo([1], repeats=3))
        assert isinstance(session.pairs([Pair(0, 4)], repeats=3)[0], PairRecord)
        times = session.paired([sequential(program.graph)] * 2, rounds=5)
        assert not isinstance(times, Failure)
        assert len(times) == 2
        profiles = session.profiles()
        assert all(isinstance(item, OperatorProfile) and item.kernels and item.cold_us >= 0 for item in profiles)


@pytest.mark.gpu_only(reason="an assertion fails at once on a CPU")
def test_a_sticky_device_error_is_one_failure_and_a_fresh_process_goes_on(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(_PLUGIN, encoding="utf-8")
    program, constants = branches_program(branches=2, depth=2, size=64)
    session = open_session(program, constants, plugin)
    try:
        rows = session.solo([1], repeats=2)
        assert len(rows) == 9
        assert isinstance(rows[8][0], Failure)
        assert rows[8][0].kind is FailureKind.CRASH
        assert all(isinstance(row[0], SoloRecord) for row in rows[:8])
    finally:
        session.close()


@pytest.mark.gpu_only(reason="Inductor writes kernels for a GPU")
@pytest.mark.parametrize("kind", [BaselineKind.COMPILED, BaselineKind.MAX_AUTOTUNE_COMBO])
def test_compiled_baselines_run(kind: BaselineKind) -> None:
    # Two branches are what combined kernels need; each further kernel is tuned by itself, step by step.
    program, constants = branches_program(branches=2, depth=1, size=128)
    with open_baseline(program, constants, kind) as baseline:
        prepared = baseline.prepare()
        assert not isinstance(prepared, Failure), prepared
        assert prepared.max_abs_error < 1e-2
        assert isinstance(baseline.round_us(), float)
