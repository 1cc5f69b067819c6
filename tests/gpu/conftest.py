"""Where there is no CUDA device these tests skip and say so; where there is one, ``pytest -m gpu`` is the whole check of the CUDA side.

``--gpu-budget`` is a time plan that fails loudly: a test whose turn comes after it is spent fails and says that it did not run, and
none runs on for long past it: one that waits for the device and cannot be interrupted there takes its process with it. What everything else
rests on comes first, what compiles comes last. Where there are cores for it, files run in several processes at once (``--gpu-lanes``, and
not ``-n`` of pytest-xdist): see gpu_lanes.py. ``--gpu-done FILE`` goes on where an earlier run ended: see gpu_done.py. Where the device no
longer answers after a failure, the process ends: what is left would fail as well. ``--gpu-rehearsal`` runs the bodies on a double with CPU
tensors, so that what is misspelt is found without a GPU; it proves nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_root = Path(__file__).resolve().parents[2]
if str(_root) not in sys.path:
    sys.path.append(str(_root))

_ORDER = (
    "streams", "memory", "fuzz", "in_place", "device", "state", "low_precision",
    "models", "serving", "layout", "regions", "inductor", "second",
)  # fmt: skip
_EMULATED = "EMULATED_CUDA_MEMORY_BYTES" in os.environ
_GRACE_S = 10.0
_LAST_WORDS = 12  # lines
_LONGEST_S = 75.0  # of a test that does not say how long it may take, which none does that compiles: a GPU's time is dear
_STUCK_S = 10.0  # longer than it takes to say that a test's time is over
_CORES = 3  # for each process of tests: what it starts and compiles keeps these busy
_MEMORY_BYTES = 6 << 30  # of the device, likewise: it and the processes that it starts have contexts of their own
_DONE, _LANES = "gpu-done", "gpu-lanes"
_terminal: list[int] = []  # a file number that says what a captured one would keep for itself
_spent_s: list[float] = []
_took_s: dict[str, float] = {}  # by file; in several processes, more than was spent
_failed: set[str] = set()


def missing() -> str:
    """Why there is no device to test on; empty if there is one."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return ""


def broken() -> str:
    """Why nothing more can be asked of the device in this process; empty if it answers."""
    import torch

    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def pytest_configure(config: pytest.Config) -> None:
    _terminal[:] = _terminal or [os.dup(2)]
    if (target := config.getoption("--gpu-done")) is not None:
        from tests.gpu.gpu_done import Done

        config.pluginmanager.register(Done(target.resolve()), _DONE)
    if (folder := config.getoption("--gpu-lane")) is not None:
        from tests.gpu.gpu_lanes import Told

        config.pluginmanager.register(Told(config, folder))
        _beside_others()


def _beside_others() -> None:
    """The device is shared with the other processes of tests: no job need wait until their kernels are done, or tell of them."""
    from autosched.device.cuda.meter import GpuMeter

    GpuMeter.others_share = lambda self: 0.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rehearsal = config.getoption("--gpu-rehearsal")
    reason = "" if rehearsal else missing()
    items.sort(key=_turn)
    if reason and (done := config.pluginmanager.get_plugin(_DONE)) is not None:
        done.device = False
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        # What PyTorch warns of when CUDA starts is not this project's to fix, and would be an error here.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device: {reason}"))
        elif rehearsal and (why := item.get_closest_marker("gpu_only")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"cannot be rehearsed: {why.kwargs['reason']}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Share the tests among several processes, after whatever is left out."""
    from tests.gpu.gpu_lanes import Lanes, grouped

    config = session.config
    rehearsal = config.getoption("--gpu-rehearsal")
    groups = grouped(item for item in session.items if item.get_closest_marker("gpu") is not None)
    count = _lanes(config)
    if min(count, len(groups)) < 2 or config.option.collectonly or (not rehearsal and missing()):
        return
    config.pluginmanager.register(Lanes(config, groups, count, functools.partial(_say, config)), _LANES)


def _lanes(config: pytest.Config) -> int:
    """How many processes run tests at a time."""
    from tests.gpu.gpu_lanes import MOST

    if config.getoption("--gpu-lane") is not None or hasattr(config, "workerinput"):  # one of several already, or of pytest-xdist's
        return 1
    if asked := config.getoption("--gpu-lanes"):
        return int(asked)
    if _EMULATED or config.getoption("--gpu-rehearsal") or config.option.usepdb or config.option.capture == "no":
        return 1
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // _CORES, _memory_bytes() // _MEMORY_BYTES))


def _memory_bytes() -> int:
    """Of the device, as the driver says; none where there is no device."""
    from autosched.core.errors import DeviceMissing
    from autosched.runtime.cuda.key import gpu_facts

    try:
        return gpu_facts().memory_bytes
    except DeviceMissing:
        return 0


def _turn(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_gpu_")
    if item.get_closest_marker("gpu") is None:
        return -1
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what no longer fits, or would break others, instead of leaving it out: a green run means that everything ran.

    No fixture may do this: a module's own, which opens a model, comes before any test's.
    """
    from tests.gpu.gpu_lanes import not_run

    budget_s = item.config.getoption("--gpu-budget")
    others = getattr(item.config, "workerinput", {}).get("workercount", 1) - 1
    if item.get_closest_marker("gpu_alone") is not None and others and not item.config.getoption("--gpu-rehearsal"):
        why = "it leaves other processes no memory of the device, and pytest-xdist runs tests beside it; leave out -n (see gpu_lanes.py)"
        pytest.fail(f"not run: {why}", pytrace=False)
    if item.config.pluginmanager.has_plugin(_DONE):
        return  # such a run has stopped by then
    if item.get_closest_marker("gpu") is not None and sum(_spent_s) >= budget_s:
        pytest.fail(not_run(budget_s), pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Say at once why a test failed: a run that is ended by force never comes to its summary."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        _failed.add(item.nodeid)
    if report.failed and item.get_closest_marker("gpu") is not None:
        _say(item.config, report)


def _say(config: pytest.Config, report: pytest.TestReport) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.write_line("")
        terminal.write_line("\n".join(report.longreprtext.splitlines()[-_LAST_WORDS:]))


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("gpu") is None:
        yield
        return
    budget_s = item.config.getoption("--gpu-budget")
    left_s = max(0.0, budget_s - sum(_spent_s))
    begin = time.monotonic()
    if (lanes := item.config.pluginmanager.get_plugin(_LANES)) is not None:
        # Each process has limits for its tests; here one of them is waited for, which may be another one.
        item.add_marker(pytest.mark.timeout(0), append=False)
        lanes.left_s = left_s + _GRACE_S if left_s else 0.0
        yield
        (item, took_s), why = lanes.answered, ""
        _spent_s.append(time.monotonic() - begin)
    else:
        own = item.get_closest_marker("timeout")
        # What computes on a CPU may take as long as the budget says: see tools/cuda_emulator.
        on_a_cpu = _EMULATED or item.config.getoption("--gpu-rehearsal")
        limit_s = left_s + _GRACE_S
        limit_s = limit_s if on_a_cpu else min(limit_s, own.args[0] if own is not None else _LONGEST_S)
        item.add_marker(pytest.mark.timeout(limit_s), append=False)
        # Fixtures included: a model's session starts and ends in them.
        with _killed_after(limit_s + _STUCK_S):
            yield
            why = broken() if item.nodeid in _failed else ""
        took_s = time.monotonic() - begin
        _spent_s.append(took_s)
    _took_s[item.path.name] = _took_s.get(item.path.name, 0.0) + took_s
    done = item.config.pluginmanager.get_plugin(_DONE)
    if why:
        item.session.shouldstop = f"the device no longer answers in this process: {why}"
    elif done is not None and sum(_spent_s) >= budget_s:
        done.cut_off(item.nodeid)
        item.session.shouldstop = f"the GPU budget of {budget_s:.0f} s is spent; run again to go on"


@contextlib.contextmanager
def _killed_after(seconds: float) -> Iterator[None]:
    """A signal that is to fail a test waits until the driver's call returns, which may be never: the next process has its turn instead."""
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end() -> None:
    """Say what every thread is at, and end this process at once.

    Not by faulthandler: its thread reads the frames of threads that run on meanwhile, and has broken a process that was only slow.
    """
    for frame in sys._current_frames().values():
        os.write(_terminal[0], ("\n" + "".join(traceback.format_stack(frame))).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def pytest_sessionfinish() -> None:
    """What a compiler has left to wait for may take minutes of a GPU."""
    from autosched.runtime.inductor.pools import end_pools

    end_pools()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if sum(_spent_s) >= 1.0:
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in _took_s.items())
        lanes = terminalreporter.config.pluginmanager.get_plugin(_LANES)
        at_once = f", {lanes.count} processes at a time" if lanes is not None else ""
        terminalreporter.write_line(f"GPU tests took, in seconds: {parts}; {sum(_spent_s):.0f} in all{at_once}")
