"""Page-locked host memory that the device reads and writes: command and result rings, the ring of the loader."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, suppress

import numpy as np
from numpy.typing import DTypeLike

from cpmrt.dtypes import Array
from cpmrt.errors import MemoryPlanError


class HostBuffer:
    """`nbytes` zeroed bytes, page-locked and mapped. `close()`, or the end of a `with` block, frees them.

    Arrays from `array` and work of the device that uses the buffer must be done by then: neither keeps it alive.
    """

    def __init__(self, nbytes: int):
        """Raises MemoryPlanError if the host has no such memory."""
        from cupy.cuda import runtime

        self.nbytes, self._runtime = nbytes, runtime
        try:
            self._address: int = runtime.hostAlloc(nbytes, runtime.hostAllocMapped | runtime.hostAllocPortable)
        except runtime.CUDARuntimeError as error:
            raise MemoryPlanError(f"{nbytes} bytes of page-locked host memory cannot be had: {error}") from error
        ctypes.memset(self._address, 0, nbytes)

    @property
    def address(self) -> int:
        """The address at which the host sees the buffer."""
        if not self._address:
            raise ValueError("the host buffer is closed")
        return self._address

    @property
    def device_address(self) -> int:
        """The address at which a kernel sees the buffer, the same wherever addresses are unified."""
        return int(self._runtime.pointerGetAttributes(self.address).devicePointer)

    def array(self, dtype: DTypeLike) -> Array:
        """Return a writable flat view of whole items; a structured type gives records. Raises ValueError if closed."""
        item = np.dtype(dtype)
        memory = memoryview((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        return np.frombuffer(memory, item, self.nbytes // item.itemsize)

    def close(self) -> None:
        """Free the memory. May be called again, and after a fault of the device."""
        address, self._address = self._address, 0
        if address:
            # After a fault the driver frees nothing any more: the memory goes with the process.
            with suppress(self._runtime.CUDARuntimeError):
                self._runtime.freeHost(address)

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def host_buffers(*sizes: int) -> tuple[HostBuffer, ...]:
    """Return a buffer of each size in bytes. If one cannot be had, those before it are freed. Raises as HostBuffer."""
    with ExitStack() as stack:
        buffers = tuple([stack.enter_context(HostBuffer(nbytes)) for nbytes in sizes])
        stack.pop_all()
        return buffers
