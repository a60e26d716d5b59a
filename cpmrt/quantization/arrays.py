"""One interface to arrays of NumPy or CuPy: finds their library, copies them to the host, rounds them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cpmrt.dtypes import Array, DType

Xp = Any
"""The module `numpy` or `cupy`."""


def open_module(device: str) -> Xp:
    """Return the array module of "cpu" or "cuda". Raises NoDeviceError where CuPy cannot use a GPU."""
    if device == "cpu":
        return np
    from cpmrt.cuda.linear_algebra import open_cupy

    return open_cupy()


def module_of(array: Any) -> Xp:
    """Return the library that `array` belongs to."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def to_host(array: Any) -> Array:
    """Return the array in host memory; one that is there already is not copied."""
    if isinstance(array, np.ndarray):
        return array
    host: Array = array.get()
    return host


def round_to(values: Any, dtype: DType) -> Any:
    """Round float32 values to the nearest that `dtype` holds, ties to even, on either device."""
    if dtype is DType.BFLOAT16:
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return values.astype(dtype.storage).astype(np.float32)
