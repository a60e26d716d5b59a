"""Begins to create the device's context before anything needs it, beside the reading of a model's files."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Thread


def begin_context(index: int = 0) -> None:
    """Have a thread create the primary context of the GPU with this index, which CuPy uses too.

    That takes the driver some tenths of a second, without Python's lock. What goes wrong is told where the device is
    opened.
    """
    Thread(target=_create, args=(index,), name="cpmrt-context").start()


def _create(index: int) -> None:
    with suppress(OSError, AttributeError):  # there is no driver, or none that has a name used here
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
