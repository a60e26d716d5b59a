"""Memory of the device that is freed when its owner says so, and not with the last array of it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import finalize

if TYPE_CHECKING:
    from cupy.cuda import MemoryPointer


class DeviceBuffer:
    """`nbytes` of the device's memory, from `pointer` on. `close()` frees them; no array may be used then.

    Freeing waits for the device. A garbage collection should not do it, because it may run while the device waits for a
    mask that the collecting thread has to write. Still, a buffer that nobody has closed is freed when it is collected.
    """

    def __init__(self, nbytes: int):
        """Raises CUDARuntimeError if the device has no such memory."""
        from cupy.cuda import MemoryPointer, UnownedMemory, runtime

        address = runtime.malloc(nbytes)
        self.pointer: MemoryPointer = MemoryPointer(UnownedMemory(address, nbytes, None), 0)
        self._free = finalize(self, _free, address)
        self._free.atexit = False

    def close(self) -> None:
        """Free the memory. May be called again, and after a fault of the device."""
        self._free()


def _free(address: int) -> None:
    from cupy.cuda import runtime

    # After a fault the driver frees nothing any more: the memory goes with the process.
    with suppress(runtime.CUDARuntimeError):
        runtime.free(address)
