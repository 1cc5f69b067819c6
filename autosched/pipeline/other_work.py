"""Other processes' work on a GPU while a job measures: the job's clocks do not show it, so that the device is asked before and after."""

from __future__ import annotations

from autosched.datasets.facts import DISTURBED
from autosched.device.base import Device, TellsOtherWork

TUNE_AGAIN = (
    "what is fastest beside them need not be fastest alone; stop other work on it and tune again, with --fresh (in Python: fresh=True)"
)
COLLECT_AGAIN = "runs taken beside them teach a cost model nothing; stop other work on it and collect again, into another folder"


def other_work_note(device: Device, when: str, advice: str = TUNE_AGAIN) -> str:
    """What to say if other processes' kernels run on ``device`` now; empty if none do, or nobody knows.

    Args:
        device: nothing of this job runs on it now.
        when: such as "when this job began".
    """
    share = device.other_work() if isinstance(device, TellsOtherWork) else None
    if share is None or share <= DISTURBED:
        return ""
    return f"other processes kept {device.key.name} busy {share:.0%} of the time {when}: {advice}"
