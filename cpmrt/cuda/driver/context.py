"""Starts a thread for the slow setup of the device that needs no model, beside imports and reading a model's files."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from threading import Lock, Thread

_has_begun = Lock()
"""Held from the first call of `begin_context` on: a process makes context and library ready once."""
_threads: list[Thread] = []


def begin_context() -> None:
    """Have a thread create the primary context of the first GPU, which CuPy uses too, and make cuBLASLt ready there.

    Both take some tenths of a second, without Python's lock. Failures are ignored here: `open_device` reports those of
    the device, `Gemm.reason` those of cuBLASLt. Does nothing from the second call on.
    """
    if _has_begun.acquire(blocking=False):
        thread = Thread(target=_create, name="cpmrt-context")
        thread.start()
        _threads.append(thread)


def await_setup() -> None:
    """Wait until that thread has ended.

    To be called before a graph is captured, so that nothing of cuBLASLt's setup falls into a capture.
    """
    for thread in _threads:
        thread.join()


def _create() -> None:
    with suppress(OSError, AttributeError):  # there is no driver, or none that has a name used here
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or driver.cuCtxSetCurrent(context):
            return
        _make_library_ready()


def _make_library_ready() -> None:
    # Imported only now, when the driver is at work already, so that the import does not hold it up.
    from cpmrt.cuda.driver.blaslt import CublasLtError, make_ready

    with suppress(CublasLtError):
        make_ready()
