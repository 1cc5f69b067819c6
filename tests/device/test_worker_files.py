"""Files that a measuring process reads: where they cannot be written, the folder and what to do are named."""

from __future__ import annotations

import pytest
import torch

from autosched.core.errors import ScratchFull
from autosched.device.worker import Worker


def test_a_folder_for_temporary_files_that_takes_nothing_is_named() -> None:
    worker = Worker("no.module.is.started", timeout_s=1.0)
    try:
        (worker.folder / "constants.safetensors").mkdir()
        with pytest.raises(ScratchFull, match=r"4\.0 MiB .* cannot be written to .*TMPDIR"):
            worker.write_tensors("constants.safetensors", {"0": torch.zeros(1024, 1024)})
    finally:
        worker.close()
