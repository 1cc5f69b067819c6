"""A stand-in for NVIDIA's driver library: the few calls that need no context, for as many GPUs as a test wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch

from autosched.runtime.cuda import key as cuda_key

MIG = "Test GPU MIG 1g.18gb"


class FakeDriverLibrary:
    """GPUs called ``names``; each attribute of one is the attribute's own number, unless ``attributes`` says another.

    ``start`` is what ``cuInit`` answers, ``words`` what the driver says of that, ``version`` which CUDA it is for.
    """

    def __init__(
        self,
        *,
        start: int = 0,
        names: Sequence[str] = (MIG,),
        words: str = "",
        version: int = 13020,
        attributes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._start = start
        self._names = tuple(names)
        self._words = words
        self._version = version
        self._attributes = dict(attributes)

    def cuGetErrorString(self, code: int, words: Any) -> int:
        words._obj.value = self._words.encode()
        return 0 if self._words else 1

    def cuInit(self, flags: int) -> int:
        return self._start

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self._names)
        return 0

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, handle: Any) -> int:
        name.value = self._names[handle.value].encode()
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, handle: Any) -> int:
        total._obj.value = 18 << 30
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return 0

    def cuDeviceGetPCIBusId(self, place: Any, length: int, handle: Any) -> int:
        place.value = f"0000:{0x3B + handle.value:02x}:00.0".encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, handle: Any) -> int:
        if number == 37:
            return 1  # this driver does not tell the bus width
        value._obj.value = self._attributes.get(number, number)
        return 0


@contextmanager
def gpus_called(*names: str, kind: type[FakeDriverLibrary] = FakeDriverLibrary, **options: Any) -> Iterator[None]:
    """A machine with these GPUs and a CUDA build of PyTorch, as far as anything is asked before a context is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_key, "driver_library", lambda: kind(names=names, **options))
        patch.setattr(torch.version, "cuda", "13.0")
        cuda_key.gpu_facts.cache_clear()
        yield
    cuda_key.gpu_facts.cache_clear()
