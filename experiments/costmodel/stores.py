"""Which store of runs a script reads, and where its results go: one named, else the one recorded on a device, else a simulated one."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autosched.datasets.store import Store
from autosched.datasets.synthetic import synthetic_store
from experiments.devices import RESULTS, folder_name, key_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is read, and the folder to write to.

    Args:
        place: folder of the store; None if it is simulated.
        out: None where nothing is to be kept: a rehearsal, or a store that was named without ``--out``.
    """

    store: Store
    place: Path | None
    out: Path | None


def parser_of(description: str | None, files: str) -> argparse.ArgumentParser:
    """The options that :func:`chosen` reads, and ``--seed``; ``files`` names what is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=None, help=f"folder of {files}; default: experiments/results/<device>")
    parser.add_argument("--device", default="cpu", help="whose recorded store to take if none is named: h100, ...; cpu: this one's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    return parser


@contextmanager
def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[Chosen]:
    """What the options name, for as long as it is read: a simulated store is gone afterwards. Ends the process if there is none."""
    place = options.store or (None if options.smoke else recorded_store(options.device))
    if place is None and not options.smoke:
        parser.error("no runs are recorded here: make them with experiments/costmodel/collect.py, name a store, or use --smoke")
    out = options.out or (None if options.store or place is None else RESULTS / place.name)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    if place is not None:
        yield Chosen(Store.open(place), place, out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Chosen(synthetic_store(Path(scratch) / "simulated", kernels=10, pairs=40), None, out)


def recorded_store(device: str) -> Path | None:
    """The store that was recorded on ``device`` and is committed, if there is one; of several CPUs, this machine's comes first."""
    wanted = folder_name(key_of("cpu")) if device == "cpu" else device
    found = {path.name: path for path in recorded_stores()}
    return found.get(wanted) or next((path for name, path in found.items() if name.startswith(device)), None)


def recorded_stores() -> list[Path]:
    """All stores that are committed, by name."""
    return sorted(path.parent for path in (ROOT / "datasets" / "data").glob("*/pairs"))
