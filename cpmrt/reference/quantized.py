"""Weights in NumPy that are not float32: their arrays in the arena, and their rows as float32.

Layout: codes uint8 [N, K * bits / 8], the first column in the low bits (8 bits: int8 [N, K]); scales float32
[N, groups]; zeros uint8 [N, groups]; perm int32 [K]. Weights of GGUF files stay in the blocks of their file, mapped
ones in its words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from cpmrt.dtypes import F32, Array, to_float32
from cpmrt.ops import BlockWeight, MappedWeight, QuantizedWeight
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.formats.blocks import BLOCK_TYPES

Matrix = F32 | QuantizedWeight | BlockWeight | MappedWeight
"""A weight of a matrix product."""
_BLOCK = 1 << 20
"""Elements dequantised at a time: 4 MiB, the only float32 copy of a weight there ever is."""


def _values_of_bytes(bits: int, element: type[np.generic]) -> Array:
    """Return the codes in each byte as float32, packed in one `element`, which NumPy looks up faster than several."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    return codes.astype(np.float32).view(element)[:, 0]


_VALUES = {2: _values_of_bytes(2, np.complex128), 4: _values_of_bytes(4, np.complex64)}


def quantized_arrays(spec: TensorSpec, arrays: Mapping[str, Array]) -> QuantizedWeight | BlockWeight:
    """Return the arrays that the plan gave to a spec with a `quant`."""
    assert spec.quant is not None, spec.name
    num_rows, num_columns = spec.shape
    if spec.quant.in_blocks:
        types = [source.packing.format for source in spec.sources if source.packing]
        parts = ((name, arrays[f"{spec.name}.blocks{index}"]) for index, name in enumerate(types))
        return BlockWeight(tuple(parts), (num_rows, num_columns))
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
    """Return a view of some rows of a weight."""
    if isinstance(weight, np.ndarray):
        return weight[rows]
    if isinstance(weight, MappedWeight):
        return replace(weight, words=weight.words[rows])
    wanted = range(weight.shape[0])[rows]
    num_rows = len(wanted)
    if isinstance(weight, BlockWeight):
        return BlockWeight(tuple(_parts_of(weight, wanted)), (num_rows, weight.shape[1]))
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return replace(
        weight,
        codes=weight.codes[rows],
        scales=weight.scales[rows],
        zeros=zeros,
        shape=(num_rows, weight.shape[1]),
    )


def _parts_of(weight: BlockWeight, wanted: range) -> Iterator[tuple[str, Array]]:
    """Yield the parts that hold the wanted rows, which follow one another."""
    first = 0
    for name, rows in weight.parts:
        begin, end = max(wanted.start - first, 0), min(wanted.stop - first, len(rows))
        if begin < end:
            yield name, rows[begin:end]
        first += len(rows)


def dequantized(weight: QuantizedWeight | BlockWeight | MappedWeight) -> Iterator[tuple[slice, F32]]:
    """Yield the rows of the matrix as float32, block after block; columns are in the stored order, that of `perm`."""
    if isinstance(weight, BlockWeight):
        yield from _unpacked(weight)
        return
    num_rows, num_columns = weight.shape
    step = max(_BLOCK // num_columns, 1)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        if isinstance(weight, MappedWeight):
            yield rows, to_float32(weight.words[rows], weight.dtype)
            continue
        codes = weight.codes[rows]
        values = codes.astype(np.float32) if weight.bits == 8 else _VALUES[weight.bits][codes].view(np.float32)
        grouped = values.reshape(len(codes), -1, weight.group_size)
        if weight.zeros is not None:
            grouped -= weight.zeros[rows, :, None]
        elif weight.bits < 8:
            grouped -= np.float32(1 << weight.bits - 1)
        grouped *= weight.scales[rows, :, None]
        yield rows, grouped.reshape(len(codes), num_columns)


def picked_rows(weight: BlockWeight | MappedWeight, rows: Array) -> F32:
    """Return these rows of a matrix in blocks of one type or in a file, such as the embeddings of tokens."""
    if isinstance(weight, MappedWeight):
        return to_float32(weight.words[rows], weight.dtype)
    ((name, stored),) = weight.parts
    return BLOCK_TYPES[name].values(stored[rows])


def _unpacked(weight: BlockWeight) -> Iterator[tuple[slice, F32]]:
    step, first = max(_BLOCK // weight.shape[1], 1), 0
    for name, stored in weight.parts:
        for begin in range(0, len(stored), step):
            rows = stored[begin : begin + step]
            yield slice(first + begin, first + begin + len(rows)), BLOCK_TYPES[name].values(rows)
        first += len(stored)
