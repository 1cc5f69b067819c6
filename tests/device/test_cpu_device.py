"""The CPU device against the contract of every device, and what is its own."""

from __future__ import annotations

import os
import signal

import pytest

from autosched.core.graph import OpGraph
from autosched.core.schedule import sequential
from autosched.device.base import Device, StartsEarly
from autosched.device.cpu import CpuDevice
from autosched.device.early import EarlyWorker
from autosched.device.worker import Worker
from autosched.runtime.host_key import cpu_device_key, software_key
from autosched.runtime.plan import FreeRule, make_plan
from autosched.runtime.workspace import peak_live_bytes
from tests.conformance.device_suite import DeviceSuite
from tests.conformance.programs import branches_program, chain_program, not_finite_program


class TestCpuDevice(DeviceSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def device(cls) -> Device:
        return CpuDevice(seed=3)

    def test_keys_are_those_a_loader_computes(self, device: Device) -> None:
        assert device.key == cpu_device_key()
        assert device.software == software_key()


def test_nothing_starts_before_the_first_request() -> None:
    with CpuDevice().open(*chain_program(), timeout_s=10) as session:
        assert session.worker_pid is None


def test_a_process_that_was_started_early_is_the_next_sessions() -> None:
    device = CpuDevice()
    program, constants = branches_program()
    device.start_early(timeout_s=60.0)
    device.start_early(timeout_s=60.0)  # one waits already
    with device.open(program, constants, timeout_s=60.0) as first, device.open(program, constants, timeout_s=60.0) as second:
        started = first.worker_pid
        assert started is not None
        assert second.worker_pid is None
        assert isinstance(first.paired([sequential(program.graph)], rounds=1), list)
        assert first.worker_pid == started
        # Opened once: the next request finds the program there.
        assert isinstance(first.paired([sequential(program.graph)], rounds=1), list)
        assert first.worker_pid == started


def test_a_process_that_died_while_it_waited_is_replaced() -> None:
    device = CpuDevice()
    program, constants = branches_program()
    device.start_early(timeout_s=60.0)
    with device.open(program, constants, timeout_s=60.0) as session:
        started = session.worker_pid
        assert started is not None
        os.kill(started, signal.SIGKILL)
        assert isinstance(session.paired([sequential(program.graph)], rounds=1), list)
        assert session.worker_pid != started


def test_a_process_that_nobody_took_is_ended() -> None:
    device = CpuDevice()
    device.start_early(timeout_s=60.0)
    assert isinstance(device, StartsEarly)
    device.drop_early()
    device.drop_early()
    with device.open(*branches_program(), timeout_s=60.0) as session:
        assert session.worker_pid is None
    device.start_early(timeout_s=60.0)
    # Another patience was asked for than the one it was started with.
    with device.open(*branches_program(), timeout_s=30.0) as session:
        assert session.worker_pid is None
    device.drop_early()


@pytest.mark.parametrize(("kind", "expected"), [("", ["", ""]), ("cuda", ["", "cuda"])])
def test_compilers_start_early_where_they_disturb_nothing(kind: str, expected: list[str]) -> None:
    started: list[str] = []

    class Starting(Worker):
        def start(self, *, compiling_for: str = "") -> None:
            started.append(compiling_for)

    device = EarlyWorker(lambda timeout_s: Starting("no.module", timeout_s=timeout_s), compiling_for=kind)
    for compiling in (False, True):
        device.start_early(timeout_s=60.0, compiling=compiling)
        device.drop_early()
    assert started == expected


def test_a_program_that_is_itself_not_finite_can_be_timed() -> None:
    program, constants = not_finite_program()
    with CpuDevice().open(program, constants, timeout_s=60) as session:
        record = session.schedules([sequential(program.graph)], rounds=2)[0]
    assert hasattr(record, "samples"), record


def test_live_bytes_follow_the_frees() -> None:
    program, _ = chain_program(length=5, size=16)
    graph = program.graph
    one = 16 * 16 * 4
    assert peak_live_bytes(graph, make_plan(graph, sequential(graph))) == 2 * one
    assert peak_live_bytes(graph, make_plan(graph, sequential(graph), FreeRule.HOLD_ALL)) == 5 * one


def test_live_bytes_of_branches_in_two_orders() -> None:
    program, _ = branches_program(branches=3, depth=1, size=8)
    graph: OpGraph = program.graph
    one = 8 * 8 * 4
    deep = peak_live_bytes(graph, make_plan(graph, sequential(graph)))
    wide = peak_live_bytes(graph, make_plan(graph, sequential(graph, order=[0, 2, 4, 1, 3, 5, 6])))
    assert deep == 3 * one + 3 * one  # three branch ends and their concatenation
    assert wide == deep
