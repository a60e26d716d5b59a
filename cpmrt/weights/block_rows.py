"""Reads weights that are stored in blocks of GGUF, as they are or unpacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from cpmrt.cores import computed_ahead
from cpmrt.dtypes import Array, DType, from_float32
from cpmrt.errors import CheckpointError, quoted
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats.blocks import BLOCK_TYPES, U8, BlockType

_BLOCK = 1 << 18
"""Elements that are unpacked at a time: few enough for their temporaries to stay in the cache."""


def block_type(source: Source) -> BlockType:
    """Return the block type of a source that is stored in blocks."""
    assert source.packing is not None and source.packing.row_bytes, source.name
    return BLOCK_TYPES[source.packing.format]


def load_blocks(spec: TensorSpec, checkpoint: Checkpoint, out: Sequence[U8]) -> None:
    """Fill an array uint8 [rows, bytes of a row] for each source of a spec that is held in blocks.

    Raises CheckpointError where a scale is not finite.
    """
    for source, rows in zip(spec.sources, out, strict=True):
        check_scales(source, checkpoint)
        stored = checkpoint.view(source.name)
        rows[:] = stored if source.rows is None else stored[np.array(source.rows)]


def unpacked_rows(source: Source, checkpoint: Checkpoint, dtype: DType) -> Iterator[Array]:
    """Yield the rows of a source that is stored in blocks as words of `dtype`, some rows at a time.

    Threads unpack the next rows meanwhile. Raises CheckpointError as `load_blocks` does.
    """
    kind, stored = block_type(source), checkpoint.view(source.name)
    check_scales(source, checkpoint)
    order = None if source.rows is None else np.array(source.rows)
    step = max(_BLOCK // source.shape[1], 1)

    def unpack(begin: int) -> Array:
        rows = slice(begin, begin + step)
        return from_float32(kind.values(stored[rows] if order is None else stored[order[rows]]), dtype)

    yield from computed_ahead(partial(unpack, begin) for begin in range(0, source.shape[0], step))


def check_scales(source: Source, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where a scale of a source in blocks is NaN or infinite."""
    if not block_type(source).all_finite(checkpoint.view(source.name)):
        tensor = checkpoint.entries[source.name]
        raise CheckpointError(f"{tensor.path}: tensor {quoted(tensor.name)} has scales that are not finite")
