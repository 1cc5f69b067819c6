"""Adds what comparisons measured of operators and pairs to the data set of their device, anywhere and without the device.

    python experiments/costmodel/add_runs.py gpu-session/h200/cache/*/runs/* --to datasets/data/h200

Every job leaves such runs in ``runs`` of its cache folder, in a folder for each device. Rows that are there already stay as they are
unless the new ones say more. ``experiments/h200/costmodel.py`` or ``experiments/costmodel/held_out.py`` then makes the tables and the
model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Last, so that the checkout's datasets/ hides nobody's.
sys.path.append(str(ROOT))

from autosched.core.errors import AutoschedError  # noqa: E402
from experiments.costmodel.shipping import add  # noqa: E402


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="a folder of datasets/data")
    options = parser.parse_args(given)
    try:
        described = add(options.runs, options.to)
    except AutoschedError as error:
        sys.exit(str(error))
    print(f"{options.to} has {', '.join(f'{count} {table}' for table, count in described['rows'].items())} now")


if __name__ == "__main__":
    main()
