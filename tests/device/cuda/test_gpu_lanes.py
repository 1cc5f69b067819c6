"""GPU tests in several processes at once: everything is reported as if there were one, and whatever breaks a process costs one test."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as Tree
from pathlib import Path
from types import SimpleNamespace

import pytest

import tests.gpu.conftest as plan
from autosched.core.errors import DeviceMissing
from autosched.runtime.cuda import key
from autosched.runtime.cuda.key import GpuFacts
from tests.conformance.forked import run_forked

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
_PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
_HEAD = """
import atexit, os, pathlib, signal, time, pytest, torch
pytestmark = pytest.mark.gpu
folder = pathlib.Path(__file__).parent

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""
_ONE = """
@pytest.mark.gpu_alone
def test_alone():
    # Long enough for the others to begin, if they did.
    time.sleep(2)
    assert not list(folder.glob("begun-*"))
    (folder / "alone").write_text(str(os.getpid()))
    # Until it has ended, nobody else may begin.
    atexit.register(time.sleep, 60)

def test_dies():
    (folder / "begun-1").touch()
    os.kill(os.getpid(), signal.SIGKILL)

def test_after_it(record_property):
    record_property("process", os.getpid())
    (folder / "one").touch()
"""
_TWO = """
def test_beside_it(record_property):
    (folder / "begun-2").touch()
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "alone").read_text()), 0)
    wait_for("one")
    record_property("process", os.getpid())

def test_breaks_the_device():
    def refuse():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), refuse
    assert False, "a reason"

def test_is_skipped():
    pytest.skip("why not")
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Two files in two lanes; what runs alone has one more."""
    files = [str(folder / "test_one.py"), str(folder / "test_two.py")]
    return run_pytest(folder, "--gpu-rehearsal", "--gpu-lanes", "2", *options, *files)


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = ["-v", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-m", "gpu", "-p", "pytest_timeout"]
    command += ["-p", "tests.conftest", "-p", "tests.gpu.conftest", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = run_forked(_PYTEST, *command, environment=environment, folder=ROOT)
    return ended.returncode, ended.stdout + ended.stderr


def test_what_lanes_report_is_reported_and_a_process_that_ends_costs_one_test(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(_HEAD + _ONE)
    (tmp_path / "test_two.py").write_text(_HEAD + _TWO)
    kept, xml = tmp_path / "done.jsonl", tmp_path / "said.xml"
    code, said = run(tmp_path, "--gpu-done", str(kept), "--junitxml", str(xml), "-rs")
    assert code == 1, said
    assert "2 failed, 3 passed, 1 skipped" in said.splitlines()[-1]
    events = [json.loads(line) for line in kept.read_text().splitlines()]
    outcomes = {event["test"].rpartition("::")[2]: event["outcome"] for event in events}
    assert outcomes == {
        "test_alone": "passed",
        "test_dies": "failed",
        "test_after_it": "passed",
        "test_beside_it": "passed",
        "test_breaks_the_device": "failed",
        "test_is_skipped": "skipped",
    }
    assert "the process of this test ended with signal 9; the last that it said:" in said
    assert "AssertionError: a reason" in said
    assert re.search(r"SKIPPED \[1\] .*test_two.py:\d+: why not", said)
    assert "in all, 2 processes at a time" in said
    cases = {case.attrib["name"]: case for case in Tree.parse(xml).iter("testcase")}
    # The second waited for the first: they ran at the same time.
    assert len({item.attrib["value"] for name in ("test_after_it", "test_beside_it") for item in cases[name].iter("property")}) == 2
    assert not list(tmp_path.glob("autosched-gpu-lanes-*"))


@pytest.mark.parametrize(("cores", "memory_gib", "expected"), [(16, 139, 5), (16, 16, 2), (16, 4, 1), (8, 139, 2), (2, 139, 1), (16, 0, 1)])
def test_there_are_as_many_lanes_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory_gib: int, expected: int
) -> None:
    def facts() -> GpuFacts:
        if not memory_gib:
            raise DeviceMissing("no driver")
        return GpuFacts("a GPU", memory_gib << 30, (), "13.0")

    monkeypatch.setattr(key, "gpu_facts", facts)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    options = {"--gpu-lane": None, "--gpu-lanes": 0, "--gpu-rehearsal": False}
    config = SimpleNamespace(getoption=options.get, option=SimpleNamespace(usepdb=False, capture="fd"))
    assert plan._lanes(config) == expected


def test_when_the_time_is_over_what_is_left_fails_and_says_so_and_no_process_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(_HEAD + "def test_in_time(): wait_for('begun')\ndef test_left(): pass\n")
    late = "def test_late():\n (folder / 'process').write_text(str(os.getpid()))\n (folder / 'begun').touch()\n time.sleep(600)\n"
    (tmp_path / "test_two.py").write_text(_HEAD + late + "def test_left_too(): pass\n")
    # The first is waited for, and when it has ended the budget is spent.
    (tmp_path / "conftest.py").write_text("import tests.gpu.conftest as plan\nplan._GRACE_S = 200.0\n")
    code, said = run(tmp_path, "--gpu-budget", "0.1")
    assert code == 1, said
    results = re.findall(r"::(test_\w+) (PASSED|FAILED)", said)
    assert results[0] == ("test_in_time", "PASSED")
    assert ("test_late", "FAILED") in results
    assert "the GPU budget of 0 s was spent while this test ran" in said
    assert "not run: the GPU budget of 0 s is spent" in said
    process = int((tmp_path / "process").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_leaves_others_no_memory_does_not_run_beside_those_of_xdist(tmp_path: Path, processes: int) -> None:
    (tmp_path / "conftest.py").write_text("import tests.gpu.conftest as plan\nplan.missing = lambda: ''\n")
    (tmp_path / "test_one.py").write_text(_HEAD + "@pytest.mark.gpu_alone\ndef test_alone(): pass\ndef test_beside_others(): pass\n")
    code, said = run_pytest(tmp_path, "-p", "xdist.plugin", "-n", str(processes), str(tmp_path / "test_one.py"))
    assert code == int(processes > 1), said
    assert ("2 passed" if processes == 1 else "1 passed, 1 error") in said.splitlines()[-1]
    assert ("not run: it leaves other processes no memory" in said) is (processes > 1)
