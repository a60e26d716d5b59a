"""Packs checkpoint tensors into the weights of an executor: fused row after row, converted, dequantised."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cpmrt.dtypes import Array, DType, from_float32, has_infinity, to_float32
from cpmrt.errors import CheckpointError, quoted
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.block_rows import unpacked_rows
from cpmrt.weights.check import source_entry
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.quantised import dequantised_blocks
from cpmrt.weights.safetensors import FLOATS

_BLOCK = 1 << 18
"""Elements converted at a time: the temporaries (4 bytes an element, a few of them) stay in the cache."""


def pack(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType) -> Array:
    """Make the weight `spec` in the storage words of `dtype`: the rows of its sources one after another, dequantised.

    A single source that is stored as `dtype` already comes as a read-only view of the mapped file; everything
    else as a new array. Raises CheckpointError if a source is missing, is not what the spec says, or has a
    value beyond the range of `dtype`.
    """
    if len(spec.sources) == 1 and spec.sources[0].packing is None:
        words, stored = _read(spec.sources[0], checkpoint)
        # BLAS would copy an unaligned matrix at every call.
        if stored is dtype and words.flags.aligned:
            return words.reshape(spec.shape)
    out = np.empty(spec.num_elements, dtype.storage)
    end = 0
    for block in pack_blocks(spec, checkpoint, dtype):
        out[end : end + block.size] = block
        end += block.size
    assert end == out.size, f"{spec.name}: its sources do not fill its shape"
    return out.reshape(spec.shape)


def pack_blocks(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType) -> Iterator[Array]:
    """Yield the words of `pack`, flat, in blocks; the largest temporaries are a few MiB. Raises as `pack` does."""
    for source in spec.sources:
        yield from _blocks(source, checkpoint, dtype)


def _read(source: Source, checkpoint: Checkpoint) -> tuple[Array, DType]:
    entry = source_entry(source, checkpoint)
    words = checkpoint.view(source.name)
    return words if source.rows is None else words[np.array(source.rows)], FLOATS[entry.dtype]


def _blocks(source: Source, checkpoint: Checkpoint, dtype: DType) -> Iterator[Array]:
    """Yield the elements of a source as words of `dtype`, in blocks. Raises CheckpointError as `pack` does."""
    if source.packing is not None and source.packing.row_bytes:
        for words in unpacked_rows(source, checkpoint, dtype):
            yield _within_range(words.reshape(-1), source, checkpoint, dtype)
        return
    if source.packing is not None:
        for rows in dequantised_blocks(source, checkpoint):
            yield _within_range(from_float32(rows.reshape(-1), dtype), source, checkpoint, dtype)
        return
    words, stored = _read(source, checkpoint)
    words = words.reshape(-1)
    if stored is dtype:
        yield words
        return
    for begin in range(0, words.size, _BLOCK):
        block = from_float32(to_float32(words[begin : begin + _BLOCK], stored), dtype)
        yield _within_range(block, source, checkpoint, dtype)


def _within_range(block: Array, source: Source, checkpoint: Checkpoint, dtype: DType) -> Array:
    if dtype is not DType.FLOAT32 and has_infinity(block, dtype):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(source.name)} has values beyond {dtype.label}",
            fix=f"use dtype {'bfloat16 or ' if dtype is DType.FLOAT16 else ''}float32",
        )
    return block
