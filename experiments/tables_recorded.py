"""What the tables share: result files of a suite, and how a figure is written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.devices import DeviceKey, title

NOT_YET = "(not recorded yet)"
_LESS_TIME = re.compile(r" kept: ([\d.]+) % less time than ")
# Folders of ``results`` that are no GPU's: those of CPUs, of what was computed and not measured, and of tools/cuda_emulator.
_NO_GPU = ("cpu", "sim", "cuda_emulated")


@dataclass(frozen=True)
class Recorded:
    """One result file of the suite whose run succeeded."""

    path: Path
    document: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        """The report of ``autosched compare``."""
        found: dict[str, Any] = self.document["report"]
        return found

    @property
    def model(self) -> str:
        """Its name in the zoo."""
        return str(self.report["model"])

    @property
    def taken(self) -> str:
        """When, as a date that sorts; empty if that is not said."""
        return str(self.document.get("environment", {}).get("taken", ""))

    @property
    def batch(self) -> int:
        """Batch size."""
        return int(self.document["run"]["batch"])

    @property
    def dtype(self) -> str:
        """Data type of parameters and inputs."""
        return str(self.document["run"]["dtype"])

    @property
    def lowering_asked(self) -> bool:
        """Whether the lowering was named in the command, and not the job's own choice."""
        return "--lowering" in self.document["run"].get("command", ())

    def time_us(self, *names: str) -> float | None:
        """Least measured median of the rows called so."""
        times = [row["measured_us"] for row in self.rows(*names) if row["measured_us"] is not None]
        return min(times) if times else None

    def rows(self, *names: str) -> list[dict[str, Any]]:
        """Rows of these names, in the report's order."""
        return [row for row in self.report["strategies"] if row["name"] in names]

    @property
    def kept(self) -> dict[str, Any]:
        """Row of the schedule that was kept."""
        return self.rows(self.report["chosen"])[0]

    @property
    def kept_us(self) -> float:
        """Its measured median."""
        return float(self.kept["measured_us"])

    @property
    def over_sequential(self) -> float | None:
        """Time of the best sequential schedule over that of the kept one: of rounds in pairs where it is another, else of medians."""
        # Of the ratio, the report itself has the interval alone, which need not lie evenly around it.
        if said := _LESS_TIME.search(self.report["verdict"]):
            return 1.0 / (1.0 - float(said[1]) / 100.0)
        sequential_us = self.time_us("sequential", "sequential_wide")
        return sequential_us / self.kept_us if sequential_us is not None else None

    @property
    def best_published(self) -> dict[str, Any] | None:
        """The fastest row of a system of the literature: a baseline that is a schedule on several lanes."""
        schedules = [row for row in self.report["strategies"] if row["is_baseline"] and row["predicted_us"] is not None]
        timed = [row for row in schedules if row["measured_us"] is not None and not row["name"].startswith("sequential")]
        return min(timed, key=lambda row: row["measured_us"]) if timed else None

    @property
    def bound_us(self) -> float | None:
        """The higher of the lower bounds that are known."""
        bounds = [bound for name in ("critical_path_us", "work_us") if (bound := self.report.get(name)) is not None]
        return max(bounds) if bounds else None


def recorded(folder: Path) -> tuple[list[Recorded], list[tuple[Path, str]]]:
    """Results of the suite, and the files of runs that failed, with why."""
    found: list[Recorded] = []
    failed: list[tuple[Path, str]] = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if "report" not in document:
            continue  # another benchmark's
        error = document["report"].get("error")
        if error is None:
            found.append(Recorded(path, document))
        else:
            failed.append((path, (str(error["message"]).strip().splitlines() or [""])[-1][:160]))
    return found, failed


def one_each(found: Iterable[Recorded]) -> dict[str, Recorded]:
    """Results at batch 1 in float32 by model: that of the job's own choice of a lowering where there are several."""
    wanted = [item for item in found if item.batch == 1 and item.dtype == "float32"]
    return {item.model: item for item in sorted(wanted, key=lambda item: not item.lowering_asked)}


def where(recorded: dict[str, Any]) -> str:
    """Where and when a result was taken."""
    environment = recorded["environment"]
    return (
        f"{environment['cores']} cores, torch {environment['torch']}, Python {environment['python']}, "
        f"commit {environment['commit'][:9]}, {environment['taken'][:10]}."
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def ratio(over: float | None, under: float | None) -> str:
    """``over / under`` as text, empty where one is not known."""
    return f"{over / under:.2f}x" if over and under else ""


def cell(text: str) -> str:
    """``text`` inside a table of Markdown."""
    return text.replace("|", "\\|").replace("\n", " ")


def first(values: Iterable[Any]) -> Any:
    """The first of ``values``, or ``None``."""
    return next(iter(values), None)


def gpus(results: Path) -> list[Path]:
    """The folder of each GPU that something was recorded on, by name."""
    return sorted(folder for folder in results.glob("*/") if not folder.name.startswith(_NO_GPU))


def cpus(results: Path) -> list[Path]:
    """The folder of each CPU that something was recorded on; first the one with most models, of such the one with the newest report."""

    def worth(folder: Path) -> tuple[int, str]:
        reports = recorded(folder)[0]
        return len(reports), max((item.taken for item in reports), default="")

    folders = sorted(results.glob("cpu_*/"), key=lambda folder: folder.name)
    return sorted(folders, key=worth, reverse=True)


def for_each(folders: Sequence[Path], table: Callable[[Path], str]) -> str:
    """``table`` of each device's folder, below its name; figures of two devices never share a table."""
    made = [(folder, text) for folder in folders if (text := table(folder)) != NOT_YET]
    return "\n\n".join(f"**{device_name(folder)}**\n\n{text}" for folder, text in made) or NOT_YET


def device_name(folder: Path) -> str:
    """What the device called itself where the results in ``folder`` were taken; the folder's name if no file says."""
    for path in sorted(folder.rglob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        environment = document.get("environment", {})
        gpu = environment.get("gpu") or document.get("machine", {}).get("gpu")
        if gpu and not folder.name.startswith("cpu_"):
            return str(gpu).partition(",")[0]
        if device := document.get("report", {}).get("device"):
            return processor(device)
        if cpu := environment.get("cpu"):
            return str(cpu)
    return folder.name


def processor(device: dict[str, Any]) -> str:
    """What a report's ``device`` is called."""
    return title(DeviceKey(device["kind"], device["name"], tuple(map(tuple, device["details"]))))


def by_shape(recorded: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], list[dict[str, Any]]]]:
    """The rows of each shape, in the order of their threads."""
    for shape in dict.fromkeys(tuple(row["shape"]) for row in recorded["rows"]):
        yield shape, sorted((row for row in recorded["rows"] if tuple(row["shape"]) == shape), key=lambda row: row["threads"])
