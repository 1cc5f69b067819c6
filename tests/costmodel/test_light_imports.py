"""What a tuning job needs of this room loads nothing heavy until it is used."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "xgboost", "sklearn", "pandas", "pyarrow", "plotly", "autosched.device")


def test_the_table_the_models_and_the_journal_load_nothing_heavy() -> None:
    modules = (
        "costmodel.table", "costmodel.select_pairs", "costmodel.train", "costmodel.persist", "costmodel.evaluate", "costmodel.plots",
        "datasets.journal", "datasets.store", "datasets.collect", "datasets.audit",
    )  # fmt: skip
    code = "import sys\n" + "\n".join(f"import autosched.{name}" for name in modules)
    code += f"\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip() == "[]"
