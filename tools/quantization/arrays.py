"""Arrays of NumPy or CuPy behind one interface: which library holds them, how they come to the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpmrt.dtypes import Array, DType
from cpmrt.errors import NoDeviceError

Xp = Any
"""The module `numpy` or `cupy`."""


def open_module(device: str) -> Xp:
    """Return the array module of "cpu" or "cuda". Raises NoDeviceError where CuPy cannot use a GPU."""
    if device == "cpu":
        return np
    try:
        import cupy

        cupy.linalg.cholesky(cupy.eye(2))
    except Exception as error:  # CuPy's own classes cannot be named where it is not installed
        raise NoDeviceError(
            f"CuPy cannot run on a GPU here: {type(error).__name__}: {error}",
            fix="install CuPy with cuBLAS and cuSOLVER (pip install 'cupy-cuda13x[ctk]'), or use --device cpu",
        ) from error
    return cupy


def module_of(array: Any) -> Xp:
    """Return the library that `array` belongs to."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


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
