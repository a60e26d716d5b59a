"""Quantised weights in canonical form: from any file format, or from 16 bits by rounding to nearest.

Codes u [N, K] of 4 bits lie two in a byte, the even column in the low half, in the order of `perm` where there is one;
codes of 8 bits are int8 [N, K] around 0. W[n, perm[k]] = scale[n, k // G] * (u[n, k] - zero[n, k // G]).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cpmrt.dtypes import F32, Array, DType, round_to, to_float32
from cpmrt.errors import CheckpointError, quoted
from cpmrt.tensor_spec import Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.int4_packing import U8
from cpmrt.weights.packed_formats import FORMATS, ROW_STEP, read_codes, read_order, read_scales, read_zeros
from cpmrt.weights.safetensors import FLOATS

_BLOCK = 1 << 20
"""Codes unpacked at a time; temporaries are a few times as many bytes."""
_ZERO = 8
_LARGEST_CODE = {4: 7, 8: 127}


def load_quantised(
    spec: TensorSpec,
    checkpoint: Checkpoint,
    dtype: DType,
    *,
    codes: Array,
    scales: F32,
    zeros: U8 | None,
    perm: Array | None,
) -> None:
    """Fill the canonical arrays of a spec with a `quant`; scales are rounded to `dtype`.

    codes uint8 [N, K/2] (8 bits: int8 [N, K]), scales and zeros [N, groups], perm int32 [K]. Raises CheckpointError
    where a tensor does not hold what it must or a scale is beyond the range of float16.
    """
    assert spec.quant is not None, spec.name
    begin = 0
    for source in spec.sources:
        rows = slice(begin, begin + source.shape[0])
        begin = rows.stop
        if source.packing is None:
            _round_source(source, checkpoint, spec.quant, dtype, codes[rows], scales[rows])
            continue
        order = read_order(source, checkpoint)
        for first, block in _code_blocks(source, checkpoint):
            ordered = block if order is None else block[:, order]
            codes[rows][first : first + len(block)] = ordered[:, 0::2] | (ordered[:, 1::2] << np.uint8(4))
        scales[rows] = _rounded_scales(source, checkpoint, dtype)
        found = read_zeros(source, checkpoint)
        assert found is None or zeros is not None, f"{spec.name}: no room for zero points"
        if zeros is not None:
            zeros[rows] = _ZERO if found is None else found
        if perm is not None:
            perm[:] = np.arange(source.shape[1]) if order is None else order


def check_values(source: Source, checkpoint: Checkpoint, dtype: DType) -> None:
    """What `load_quantised` checks of a quantised source's scales and zero points, without unpacking what is right.

    Raises CheckpointError where a scale is not finite or beyond `dtype`, or the settings promise symmetry in vain.
    """
    assert source.packing is not None, source.name
    row = FORMATS[source.packing.format]
    entry = checkpoint.entries[f"{source.name}.{row.scales}"]
    stored, words = FLOATS[entry.dtype], checkpoint.view(entry.name)
    bits = words.view(f"u{stored.itemsize}")
    # Without their sign, words of floating-point numbers are in the order of the magnitudes; a NaN is above infinity.
    largest = (bits & bits.dtype.type(2 ** (8 * stored.itemsize - 1) - 1)).max().reshape(1).view(words.dtype)
    if not np.isfinite(round_to(to_float32(largest, stored), dtype)).all():
        _rounded_scales(source, checkpoint, dtype)
    zeros = checkpoint.entries.get(f"{source.name}.{row.zeros}")
    if zeros is not None and source.packing.symmetric:
        eights = np.uint32(0x77777777 if source.packing.v1_zeros else 0x88888888)
        if (checkpoint.view(zeros.name).view(np.uint32) != eights).any():
            read_zeros(source, checkpoint)


def dequantised_blocks(source: Source, checkpoint: Checkpoint) -> Iterator[F32]:
    """Rows of a quantised source as float32, columns in the order of the model, block after block."""
    assert source.packing is not None, source.name
    order = read_order(source, checkpoint)
    scales, zeros = read_scales(source, checkpoint), read_zeros(source, checkpoint)
    for first, block in _code_blocks(source, checkpoint):
        rows = slice(first, first + len(block))
        codes = block if order is None else block[:, order]
        grouped = codes.reshape(len(block), -1, source.packing.group_size).astype(np.float32)
        grouped -= np.float32(_ZERO) if zeros is None else zeros[rows, :, None]
        grouped *= scales[rows, :, None]
        values: F32 = grouped.reshape(block.shape)
        if order is not None:
            in_model_order = np.empty_like(values)
            in_model_order[:, order] = values
            values = in_model_order
        yield values


def round_to_nearest(values: F32, quant: Quantization, dtype: DType) -> tuple[Array, F32]:
    """Symmetric codes and scales of float32 rows [n, K]: the largest magnitude of a group becomes 7 (8 bits: 127).

    The scales are rounded to `dtype` before the codes are chosen.
    """
    largest = _LARGEST_CODE[quant.bits]
    grouped = values.reshape(len(values), -1, quant.group_size)
    scales = round_to(np.abs(grouped).max(axis=2) / np.float32(largest), dtype)
    divisors = np.where(scales > 0, scales, np.float32(1.0))[:, :, None]
    nearest = np.clip(np.rint(grouped / divisors), -largest, largest).reshape(values.shape)
    if quant.bits == 8:
        return nearest.astype(np.int8), scales
    u = (nearest + np.float32(_ZERO)).astype(np.uint8)
    return u[:, 0::2] | (u[:, 1::2] << np.uint8(4)), scales


def _round_source(
    source: Source, checkpoint: Checkpoint, quant: Quantization, dtype: DType, codes: Array, scales: F32
) -> None:
    """Quantise a source in 16 bits, whose values are first rounded to `dtype` as they would be without."""
    words, stored = checkpoint.view(source.name), FLOATS[checkpoint.entries[source.name].dtype]
    picked = None if source.rows is None else np.array(source.rows)
    for first in _row_steps(source):
        block = words[first] if picked is None else words[picked[first]]
        values = round_to(to_float32(np.ascontiguousarray(block), stored), dtype)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{checkpoint.folder}: tensor {quoted(source.name)} has values that are not finite")
        codes[first], scales[first] = round_to_nearest(values, quant, dtype)


def _code_blocks(source: Source, checkpoint: Checkpoint) -> Iterator[tuple[int, U8]]:
    for rows in _row_steps(source):
        yield rows.start, read_codes(source, checkpoint, rows.start, rows.stop)


def _row_steps(source: Source) -> Iterator[slice]:
    """All rows of a source, in blocks."""
    num_rows, num_columns = source.shape
    step = max(_BLOCK // num_columns // ROW_STEP, 1) * ROW_STEP
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def _rounded_scales(source: Source, checkpoint: Checkpoint, dtype: DType) -> F32:
    scales = round_to(read_scales(source, checkpoint), dtype)
    if not np.isfinite(scales).all():
        raise CheckpointError(
            f"{checkpoint.folder}: the scales of {quoted(source.name)} are beyond {dtype.label}",
            fix="use dtype bfloat16",
        )
    return scales
