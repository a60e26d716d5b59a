"""The type of arrays on the device, which is the part of CuPy's that this package uses, and tensor maps of them.

A tensor map tells the copy engine of sm_90 how to find boxes of a matrix in memory and how to lay them out in shared
memory.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol, SupportsIndex

import numpy as np

from cpmrt.dtypes import Array
from cpmrt.errors import CpmrtError

_MAP_BYTES = 128
_WORD_BYTES = 2
Index = SupportsIndex | slice | tuple[SupportsIndex | slice, ...]


class DevicePointer(Protocol):
    """CuPy's `MemoryPointer`."""

    ptr: int


class DeviceArray(Protocol):
    """An array on the device. While launches are only recorded, NumPy arrays stand in: they have sizes, no pointer.

    `strides` are in bytes, `size` in elements. `set` copies from the host and `get` to it, both on the current stream
    unless they are given one; `get` waits, `set` may not.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    itemsize: int
    nbytes: int
    data: DevicePointer

    def __len__(self) -> int: ...
    def __getitem__(self, index: Index) -> DeviceArray: ...
    def __setitem__(self, index: Index, values: DeviceArray | int | float) -> None: ...
    def reshape(self, *shape: int) -> DeviceArray: ...
    def view(self, dtype: type[np.generic] | np.dtype[Any]) -> DeviceArray: ...
    def fill(self, value: int | float) -> None: ...
    def set(self, values: Array) -> None: ...
    def get(self, stream: object = None) -> Array: ...


KernelArgument = DeviceArray | np.generic | None
"""An argument of a kernel: an array, a scalar of the parameter's exact type (np.void: a struct), or a null pointer."""


def row_boxes(matrix: DeviceArray, box_rows: int, box_columns: int) -> np.void:
    """Return the tensor map of an array [..., columns] of 16-bit words, taken as a matrix, in boxes of this size.

    The array is contiguous and begins at a multiple of 16 bytes. Rows of a box have 64 or 128 bytes, whose 16-byte
    chunks are permuted over that width in shared memory. A kernel takes the map by value; it is right as long as the
    array stays where it is. Raises CpmrtError if the driver refuses it.
    """
    columns = matrix.shape[-1]
    return _encode(matrix.data.ptr, matrix.size // columns, columns, box_rows, box_columns)


@functools.lru_cache(maxsize=1024)
def _encode(pointer: int, rows: int, columns: int, box_rows: int, box_columns: int) -> np.void:
    from cuda.bindings import driver

    swizzles = driver.CUtensorMapSwizzle
    swizzle = {64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B}
    size, count = driver.cuuint64_t, driver.cuuint32_t
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        2,
        pointer,
        [size(columns), size(rows)],
        [size(columns * _WORD_BYTES)],
        [count(box_columns), count(box_rows)],
        [count(1), count(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle[box_columns * _WORD_BYTES],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        boxes = f"{rows} x {columns} in boxes of {box_rows} x {box_columns}"
        raise CpmrtError(f"no tensor map of {boxes}", actual=f"{status.name} ({int(status)})")
    encoded: np.void = np.void(ctypes.string_at(tensor_map.getPtr(), _MAP_BYTES))
    return encoded
