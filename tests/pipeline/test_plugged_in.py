"""A strategy and a device of another package, installed as the page says: found by entry point, used, and honest about what they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autosched
from autosched import zoo
from autosched.core.errors import IncompatibleArtifact
from autosched.device.base import Device
from tests.conformance.device_suite import DeviceSuite
from tests.pipeline.toychip import ToyChip

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the one of docs/how-it-works.md."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    (strategy,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    (points,) = re.findall(r"^```toml\n(.*?)^```", page, re.S | re.M)
    named = re.findall(r'^\[project\.entry-points\."([\w.]+)"\].*\n(\w+ = )"(.*)"$', points, re.M)
    assert [group for group, _, _ in named] == ["autosched.searchers", "autosched.cost_models", "autosched.runners"]
    folder = tmp_path_factory.mktemp("site")
    (folder / "acme_sched").mkdir()
    (folder / "acme_sched" / "__init__.py").touch()
    (folder / "acme_sched" / "round_robin.py").write_text(strategy)
    (folder / "acme_sched" / "model.py").write_text("from autosched.costmodel.analytic import AnalyticModel as AcmeModel\n")
    (folder / "acme_sched" / "toychip.py").write_text((ROOT / "tests" / "pipeline" / "toychip.py").read_text())
    about = folder / "acme_sched-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-sched\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("".join(f"[{group}]\n{name}{place}\n" for group, name, place in named))
    return folder


def command(site: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "AUTOSCHED_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "autosched", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_a_strategy_and_a_device_are_found_and_what_is_simulated_is_said(site: Path, tmp_path: Path) -> None:
    asked = ("compare", "autosched:toy", "--device", "toychip", "--strategies", "sequential,round_robin", "--budget", "1s", "--json")
    done = command(site, tmp_path / "cache", *asked)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {row["name"]: row for row in report["strategies"]}
    assert {"sequential", "round_robin"} <= {name for name, row in rows.items() if row["measured_us"]}, report
    assert (report["device"]["kind"], report["lowering"]) == ("toychip", "rewritten")
    assert report["source"] == rows["round_robin"]["source"] == "simulated"
    assert report["verdict"].startswith("Simulated, nothing was measured")


def test_what_is_tuned_for_it_is_no_schedule_of_this_machine(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "toy.autosched"
    done = command(site, tmp_path / "cache", "tune", "autosched:toy", "--device", "toychip", "--budget", "1s", "-o", str(file))
    assert done.returncode == 0, done.stderr
    assert "nothing here loads what was made for 'toychip'" in done.stdout
    assert not list((tmp_path / "cache" / "schedules").glob("*"))
    with pytest.raises(IncompatibleArtifact, match="tuned on 'toychip', which this version does not run"):
        autosched.load(file, zoo.load("autosched:toy").model, strict=True)


def test_code_compiled_for_another_device_is_refused_before_anything_is_captured(site: Path, tmp_path: Path) -> None:
    done = command(site, tmp_path, "tune", "autosched:toy", "--device", "toychip", "--lowering", "inductor")
    assert done.returncode == 2
    assert "ask for rewritten or aten" in done.stderr
    assert "capture" not in done.stderr


class TestToyChip(DeviceSuite):
    measures_groups = False

    @pytest.fixture(scope="class")
    @classmethod
    def device(cls) -> Device:
        return ToyChip()
