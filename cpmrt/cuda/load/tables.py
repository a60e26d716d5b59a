"""Fills buffers before the first step: the tables that a model's layers read in every step, and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.dtypes import F32, Array, DType, from_float32
from cpmrt.models.layers import Table


def fill(array: DeviceArray, values: Array | int) -> None:
    """Fill an array with one value, or each of its rows with the same values, on the current stream.

    CuPy's own `fill` would compile a kernel for any value but 0.
    """
    array.set(np.ascontiguousarray(np.broadcast_to(values, array.shape), array.dtype))


def fill_tables(tables: Iterable[Table], arrays: Mapping[str, DeviceArray], dtype: DType) -> None:
    """Copy each table to the array of its name, on the current stream; `dtype` is the storage type of activations."""

    def stored(values: F32) -> Array:
        return from_float32(values, dtype).view(np.uint16)

    for table in tables:
        for part, values in table.parts(arrays[table.spec.name], stored):
            part.set(values)
