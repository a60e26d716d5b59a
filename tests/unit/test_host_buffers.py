"""Page-locked memory of several rings, without a device: none stays locked where the host has no more of it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cpmrt.cuda.step.masks import MaskRing, TreeRing
from cpmrt.cuda.step.rings import Rings
from cpmrt.errors import MemoryPlanError


class NoMemoryError(Exception):
    """Stand-in for the error that CuPy raises when a call of the CUDA runtime fails."""


class Runtime:
    """A runtime whose host has memory for `room` buffers; `locked` has those that are not freed."""

    CUDARuntimeError, hostAllocMapped, hostAllocPortable = NoMemoryError, 2, 1

    def __init__(self) -> None:
        self.room, self.locked = 0, dict[int, Any]()

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        if len(self.locked) == self.room:
            raise NoMemoryError("out of memory")
        buffer = ctypes.create_string_buffer(nbytes)
        self.locked[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def freeHost(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    cuda = SimpleNamespace(runtime=made)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return made


@pytest.mark.parametrize(("make", "num_buffers"), [
    (lambda: Rings(SimpleNamespace(ptr=0), 8, 4, 50), 2), (lambda: MaskRing(2, 9), 2), (lambda: TreeRing(9), 3),
], ids=["commands and results", "masks", "trees"])  # fmt: skip
def test_a_ring_that_finds_no_room_keeps_none(runtime: Runtime, make: Callable[[], Any], num_buffers: int) -> None:
    for runtime.room in range(num_buffers):
        with pytest.raises(MemoryPlanError, match="page-locked"):
            make()
        assert not runtime.locked
    runtime.room = num_buffers
    ring = make()
    assert len(runtime.locked) == num_buffers
    ring.close()
    assert not runtime.locked
