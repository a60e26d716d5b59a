"""Tensor maps: how the copy engine of sm_90 finds boxes of a matrix in memory and lays them out in shared memory."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.errors import CpmrtError

_MAP_BYTES = 128
_WORD_BYTES = 2


def row_boxes(matrix: DeviceArray, box_rows: int, box_columns: int) -> np.void:
    """Boxes of `box_rows` x `box_columns` of a device array [..., columns] of 16-bit words, taken as a matrix of rows.

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
