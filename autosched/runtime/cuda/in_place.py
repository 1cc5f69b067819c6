"""A plan that overwrites some of its inputs, on a GPU: recorded where those inputs lie, so that nothing is copied in and nothing back.

A recorded graph holds addresses. Where a model's buffers, or a caller's cache, are at the same place in one call and the next, the plan
is recorded once more on that very memory. Anywhere else it runs on buffers of its own: what is overwritten is copied in, and written back
when the run has ended. Those buffers are as large as the caches; they are given back where nobody seems to need them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import torch

from autosched.core.errors import DeviceError
from autosched.runtime.cuda.runner import GraphRunner
from autosched.runtime.kernels import Begun

_log = logging.getLogger(__name__)

# Graphs kept at a time. Their memory is their own, and a server has few caches in use.
_KEPT = 4
# Recording takes longer than many copies: whoever brings other memory at each turn is better served by those.
_MOST_RECORDED = 16
# Calls in a row that need no copies, after which their memory is given back.
_SETTLED = 100
# What Inductor's kernels rely on, if the examples that they were compiled for began so; PyTorch's allocator gives more.
_ALIGNMENT_BYTES = 16

Record = Callable[[Sequence[torch.Tensor], Collection[int]], GraphRunner]
"""Records the plan on copies of the inputs, but for those, by place, that are to be overwritten where they lie."""


class InPlaceRunner:
    """Called as a :class:`GraphRunner`; by one thread at a time.

    Args:
        record: records the plan.
        example: as every call's inputs.
        targets: places of the inputs that are overwritten.
        begun: told whether a call has begun to overwrite memory of its caller's.
        anywhere: whether the plan may be recorded on a caller's memory at all.

    Raises:
        DeviceError: if it cannot be recorded.
    """

    def __init__(
        self, record: Record, example: Sequence[torch.Tensor], targets: Sequence[int], begun: Begun, *, anywhere: bool = True
    ) -> None:
        self._record = record
        self._targets = tuple(targets)
        self._begun = begun
        self._left = _MOST_RECORDED if anywhere else 0
        self._copies: GraphRunner | None = record(example, ())
        self._peak_bytes = self._copies.peak_bytes
        self._without_copies = 0  # calls in a row
        self._at: OrderedDict[tuple[int, ...], GraphRunner] = OrderedDict()
        self._last: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """As of a ``GraphRunner``."""
        return self._peak_bytes

    @property
    def recorded(self) -> int:
        """On how many callers' memory it is recorded now."""
        return len(self._at)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it; what was overwritten is the tensor that was given, or one to be copied there before the next call."""
        places = tuple(inputs[target].data_ptr() for target in self._targets)
        runner = self._at.get(places)
        # What came once may never come again.
        if runner is None and places == self._last and self._left and not any(place % _ALIGNMENT_BYTES for place in places):
            runner = self._recorded_at(places, inputs)
        self._last = places
        if runner is None:
            return self.on_copies(inputs)
        self._at.move_to_end(places)
        self._without_copies += 1
        if self._without_copies == _SETTLED:
            self._give_copies_back()
        self._begun.set(True)
        return runner(inputs)

    def on_copies(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it and change nothing of the caller's.

        Raises:
            DeviceError: if the copies were given back, and it cannot be recorded on others.
        """
        self._begun.set(False)
        if self._copies is None:
            # Needed after all, and so from now on: not again does a call take as long as recording does.
            self._copies = self._record(inputs, ())
            self._without_copies = _SETTLED
        elif self._without_copies < _SETTLED:
            self._without_copies = 0
        return self._copies(inputs)

    def close(self) -> None:
        """As of a ``GraphRunner``."""
        self._give_copies_back()
        for runner in self._at.values():
            runner.close()
        self._at.clear()

    def _give_copies_back(self) -> None:
        # A signal's handler may raise when they are gone.
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()

    def _recorded_at(self, places: tuple[int, ...], inputs: Sequence[torch.Tensor]) -> GraphRunner | None:
        self._left -= 1
        try:
            made = self._record(inputs, self._targets)
        except (DeviceError, torch.OutOfMemoryError) as error:
            _log.warning("what is changed is copied at each call: %s", error)
            self._left = 0
            return None
        self._at[places] = made
        if len(self._at) > _KEPT:
            self._at.popitem(last=False)[1].close()
        return made
