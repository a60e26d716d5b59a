"""Quantised weights in NumPy: their arrays in the arena, and their rows as float32.

Layout: codes uint8 [N, K/2], the even column in the low half (8 bits: int8 [N, K]); scales float32 [N, groups];
zeros uint8 [N, groups]; perm int32 [K].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from cpmrt.dtypes import F32, Array
from cpmrt.ops import QuantizedWeight
from cpmrt.tensor_spec import TensorSpec

Matrix = F32 | QuantizedWeight
"""A weight of a matrix product."""
_BLOCK = 1 << 20
"""Elements dequantised at a time: 4 MiB, the only float32 copy of a weight there ever is."""
_ZERO = 8
_PAIRS = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1).astype(np.float32).view(np.complex64)[:, 0]
"""Both codes of a byte as float32, in one element, which NumPy looks up several times as fast as two."""


def quantized_arrays(spec: TensorSpec, arrays: Mapping[str, Array]) -> QuantizedWeight:
    """Return the arrays that the plan gave to a spec with a `quant`."""
    assert spec.quant is not None, spec.name
    num_rows, num_columns = spec.shape
    return QuantizedWeight(
        codes=arrays[f"{spec.name}.codes"],
        scales=arrays[f"{spec.name}.scales"],
        zeros=arrays.get(f"{spec.name}.zeros"),
        perm=arrays.get(f"{spec.name}.perm"),
        shape=(num_rows, num_columns),
        group_size=spec.quant.group_size,
        bits=spec.quant.bits,
    )


def rows_of(weight: Matrix, rows: slice) -> Matrix:
    """A view of some rows of a weight."""
    if not isinstance(weight, QuantizedWeight):
        return weight[rows]
    num_rows = len(range(weight.shape[0])[rows])
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return replace(
        weight,
        codes=weight.codes[rows],
        scales=weight.scales[rows],
        zeros=zeros,
        shape=(num_rows, weight.shape[1]),
    )


def dequantized(weight: QuantizedWeight) -> Iterator[tuple[slice, F32]]:
    """Rows of the matrix as float32, block after block; columns in the stored order, that of `perm`."""
    num_rows, num_columns = weight.shape
    step = max(_BLOCK // num_columns, 1)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        codes = weight.codes[rows]
        values = codes.astype(np.float32) if weight.bits == 8 else _PAIRS[codes].view(np.float32)
        grouped = values.reshape(len(codes), -1, weight.group_size)
        if weight.zeros is not None:
            grouped -= weight.zeros[rows, :, None]
        elif weight.bits == 4:
            grouped -= np.float32(_ZERO)
        grouped *= weight.scales[rows, :, None]
        yield rows, grouped.reshape(len(codes), num_columns)
