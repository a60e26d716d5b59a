"""Freeing of device memory, without a device: when it happens, and that it happens once."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cpmrt.cuda.driver.device_memory import DeviceBuffer


class LostContextError(Exception):
    """Stand-in for the error that CuPy raises when a call of the CUDA runtime fails."""


class Runtime:
    CUDARuntimeError = LostContextError

    def __init__(self):
        self.freed, self.is_lost = [], False

    def malloc(self, nbytes):
        return 4096 + nbytes

    def free(self, address):
        self.freed.append(address)
        if self.is_lost:
            raise LostContextError("the context is lost")


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    cuda = SimpleNamespace(
        runtime=made, UnownedMemory=lambda address, nbytes, owner: address, MemoryPointer=lambda memory, offset: memory
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return made


def test_it_is_freed_once_when_it_is_closed(runtime):
    buffer = DeviceBuffer(100)
    assert buffer.pointer == 4196 and not runtime.freed
    buffer.close()
    assert runtime.freed == [4196]
    buffer.close()
    del buffer
    assert runtime.freed == [4196]


def test_what_nobody_has_closed_is_freed_with_it(runtime):
    buffer = DeviceBuffer(100)
    del buffer
    assert runtime.freed == [4196]


def test_after_a_fault_nothing_is_raised(runtime):
    runtime.is_lost = True
    DeviceBuffer(100).close()
    assert runtime.freed == [4196]
