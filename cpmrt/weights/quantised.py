"""Reads quantised weights of any file format into plain arrays, or rounds 16-bit weights to nearest.

Codes u [N, K] of 4 bits lie two in a byte, those of 2 bits four, the first column in the low bits; codes of 8 bits are
int8 [N, K] around 0. Columns are in the order of `perm` where there is one.
W[n, perm[k]] = scale[n, k // G] * (u[n, k] - zero[n, k // G]) with G columns in a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from cpmrt.dtypes import F32, Array, DType, round_to, to_float32
from cpmrt.errors import CheckpointError, quoted
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats import format_of
from cpmrt.weights.formats.format import I32, U8, Format
from cpmrt.weights.formats.gptq import V1_STEPS, from_v1
from cpmrt.weights.formats.marlin import RUN
from cpmrt.weights.safetensors import FLOATS
from cpmrt.weights.ternary import TERNARY_BITS, is_ternary, not_ternary

_BLOCK = 1 << 20
"""Codes unpacked at a time; temporaries are a few times as many bytes."""
_MIDDLE = {4: 0x88888888, 8: 0x80808080}
"""Bits of a code -> a 32-bit word of the zero points of symmetric codes."""


class PlainArrays(Protocol):
    """The arrays that a quantised weight is read into: codes uint8 [N, K * bits / 8] (8 bits: int8 [N, K]), scales and
    zeros [N, groups], perm int32 [K].

    `zeros` is None where all are half of the codes' range, `perm` where columns are in the model's order.
    """

    @property
    def codes(self) -> Array: ...
    @property
    def scales(self) -> F32: ...
    @property
    def zeros(self) -> U8 | None: ...
    @property
    def perm(self) -> I32 | None: ...


def load_quantised(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType, out: PlainArrays) -> None:
    """Fill the arrays of a spec with a `quant`; scales are rounded to `dtype`.

    Raises CheckpointError where a tensor does not hold what it must or a scale is beyond the range of float16.
    """
    assert spec.quant is not None, spec.name
    for source, rows in spec.parts():
        codes, scales = out.codes[rows], out.scales[rows]
        if source.packing is None:
            _round_source(source, checkpoint, spec.quant, dtype, codes, scales)
            continue
        order = read_order(source, checkpoint)
        for block_rows, block in _code_blocks(source, checkpoint):
            ordered = block if order is None else block[:, order]
            codes[block_rows] = packed_codes(ordered, spec.quant.bits)
        scales[:] = _rounded_scales(source, checkpoint, dtype)
        zeros = read_zeros(source, checkpoint)
        assert zeros is None or out.zeros is not None, f"{spec.name}: no room for zero points"
        if out.zeros is not None:
            out.zeros[rows] = spec.quant.zero if zeros is None else zeros
        if out.perm is not None:
            out.perm[:] = np.arange(source.shape[1]) if order is None else order


def dequantised_blocks(source: Source, checkpoint: Checkpoint) -> Iterator[F32]:
    """Yield rows of a quantised source as float32, columns in the order of the model, in blocks."""
    row, packing = _row(source)
    order = read_order(source, checkpoint)
    scales, zeros = read_scales(source, checkpoint), read_zeros(source, checkpoint)
    for rows, block in _code_blocks(source, checkpoint):
        codes = block if order is None else block[:, order]
        grouped = codes.reshape(len(block), -1, packing.group_size).astype(np.float32)
        grouped -= np.float32(row.zero) if zeros is None else zeros[rows, :, None]
        grouped *= scales[rows, :, None]
        values: F32 = grouped.reshape(block.shape)
        if order is not None:
            in_model_order = np.empty_like(values)
            in_model_order[:, order] = values
            values = in_model_order
        yield values


def packed_codes(u: U8, bits: int) -> Array:
    """Pack codes u uint8 [n, K] of 2 or 4 bits to bytes, the first in the low bits; those of 8 become int8 u - 128."""
    if bits == 8:
        around_zero: Array = (u ^ np.uint8(128)).view(np.int8)
        return around_zero
    a_byte = 8 // bits
    packed: Array = u[:, 0::a_byte].copy()
    for index in range(1, a_byte):
        packed |= u[:, index::a_byte] << np.uint8(index * bits)
    return packed


def round_to_nearest(values: F32, quant: Quantization, dtype: DType) -> tuple[Array, F32]:
    """Round float32 rows [n, K] to symmetric codes: the largest magnitude of a group becomes 7 (127 of 8 bits, 1 of 2).

    Returns codes and scales; the scales are rounded to `dtype` before the codes are chosen.
    """
    largest = quant.zero - 1
    grouped = values.reshape(len(values), -1, quant.group_size)
    scales = round_to(np.abs(grouped).max(axis=2) / np.float32(largest), dtype)
    divisors = np.where(scales > 0, scales, np.float32(1.0))[:, :, None]
    nearest = np.clip(np.rint(grouped / divisors), -largest, largest).reshape(values.shape)
    return packed_codes((nearest + np.float32(quant.zero)).astype(np.uint8), quant.bits), scales


def read_codes(source: Source, checkpoint: Checkpoint, begin: int, end: int) -> U8:
    """Read the codes u of rows begin..end (`begin` a multiple of 64), columns as in the file."""
    row, _ = _row(source)
    return row.codes.unpack(row.rows(checkpoint.view(row.codes.of(source.name)), begin, end))


def read_scales(source: Source, checkpoint: Checkpoint) -> F32:
    """Read the scales as float32 [N, groups]. Raises CheckpointError where one is not finite."""
    row, _ = _row(source)
    name = row.scales.of(source.name)
    words = row.scales.unpack(checkpoint.view(name))
    values = to_float32(np.ascontiguousarray(words), FLOATS[checkpoint.entries[name].dtype])
    if not np.isfinite(values).all():
        raise CheckpointError(f"{checkpoint.folder}: tensor {quoted(name)} has scales that are not finite")
    return values


def read_zeros(source: Source, checkpoint: Checkpoint) -> U8 | None:
    """Read the zero points as uint8 [N, groups]; None where all are 8 (in 8 bits 128).

    Raises CheckpointError where the settings say that the codes are symmetric, and a zero point differs from that.
    """
    row, packing = _row(source)
    if row.zeros is None or (name := row.zeros.of(source.name)) not in checkpoint.entries:
        return None
    words = checkpoint.view(name)
    zeros = row.zeros.unpack(from_v1(words, row.bits) if packing.v1_zeros else words)
    if not packing.symmetric:
        return zeros
    if (zeros != row.zero).any():
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(name)} contradicts the symmetric quantisation of config.json",
            expected=f"zero points of {row.zero}",
            actual=int(zeros[zeros != row.zero][0]),
            fix="correct sym (or zero_point) or checkpoint_format in quantization_config",
        )
    return None


def read_order(source: Source, checkpoint: Checkpoint) -> I32 | None:
    """Return the order perm [K] that sorts the columns by group: sorted column j is input feature perm[j].

    None where they are sorted in the file already. Raises CheckpointError where the file's groups are out of range or
    of unequal size.
    """
    row, packing = _row(source)
    name = f"{source.name}.{row.order}"
    if not row.order or name not in checkpoint.entries:
        return None
    group_of = np.asarray(checkpoint.view(name))
    if row.blank_order and (group_of == -1).all():
        return None
    where, num_groups = f"{checkpoint.folder}: tensor {quoted(name)}", source.shape[1] // packing.group_size
    if group_of.min() < 0 or group_of.max() >= num_groups:
        found = f"{int(group_of.min())} to {int(group_of.max())}"
        raise CheckpointError(where, expected=f"groups in [0, {num_groups})", actual=found)
    sizes = np.bincount(group_of, minlength=num_groups)
    if (sizes != packing.group_size).any():
        found = f"{int(sizes.min())} to {int(sizes.max())}"
        raise CheckpointError(where, expected=f"{packing.group_size} columns in every group", actual=found)
    if (np.diff(group_of) >= 0).all():
        return None
    return np.argsort(group_of, kind="stable").astype(np.int32)


def check_shape_tensor(source: Source, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where a quantised source has a tensor that holds its shape, and the shape is wrong."""
    row, _ = _row(source)
    name = f"{source.name}.{row.shape}"
    if row.shape and name in checkpoint.entries:
        found = checkpoint.view(name).tolist()
        if found != list(source.shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {quoted(name)}", expected=list(source.shape), actual=quoted(found)
            )


def check_values(source: Source, checkpoint: Checkpoint, dtype: DType) -> None:
    """Check a quantised source's scales and zero points as `load_quantised` does, but on the packed words.

    Only wrong tensors are unpacked, for the error. Raises CheckpointError where a scale is not finite or beyond
    `dtype`, or where the settings say that the codes are symmetric, and a zero point differs from that.
    """
    row, packing = _row(source)
    entry = checkpoint.entries[row.scales.of(source.name)]
    stored, words = FLOATS[entry.dtype], checkpoint.view(entry.name)
    bits = words.view(f"u{stored.itemsize}")
    # Without their sign, words of floating-point numbers are in the order of the magnitudes; a NaN is above infinity.
    largest = (bits & bits.dtype.type(2 ** (8 * stored.itemsize - 1) - 1)).max().reshape(1).view(words.dtype)
    if not np.isfinite(round_to(to_float32(largest, stored), dtype)).all():
        _rounded_scales(source, checkpoint, dtype)
    zeros = row.zeros and checkpoint.entries.get(row.zeros.of(source.name))
    if zeros and packing.symmetric:
        middle = _MIDDLE[row.bits] - (V1_STEPS[row.bits] if packing.v1_zeros else 0)
        if (checkpoint.view(zeros.name).view(np.uint32) != np.uint32(middle)).any():
            read_zeros(source, checkpoint)


def _row(source: Source) -> tuple[Format, Packing]:
    assert source.packing is not None, source.name
    return format_of(source), source.packing


def _round_source(
    source: Source, checkpoint: Checkpoint, quant: Quantization, dtype: DType, codes: Array, scales: F32
) -> None:
    """Quantise a source in 16 bits; its values are first rounded to `dtype`, as they are in an unquantised weight."""
    words, stored = checkpoint.view(source.name), FLOATS[checkpoint.entries[source.name].dtype]
    picked = None if source.rows is None else np.array(source.rows)
    for rows in _row_steps(source):
        block = words[rows] if picked is None else words[picked[rows]]
        values = to_float32(np.ascontiguousarray(block), stored)
        if stored is not dtype:
            values = round_to(values, dtype)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{checkpoint.folder}: tensor {quoted(source.name)} has values that are not finite")
        if quant.bits == TERNARY_BITS and not is_ternary(values, quant.group_size):
            raise not_ternary(source.name, checkpoint)
        codes[rows], scales[rows] = round_to_nearest(values, quant, dtype)


def _code_blocks(source: Source, checkpoint: Checkpoint) -> Iterator[tuple[slice, U8]]:
    for rows in _row_steps(source):
        yield rows, read_codes(source, checkpoint, rows.start, rows.stop)


def _row_steps(source: Source) -> Iterator[slice]:
    """Yield all rows of a source in blocks that hold whole runs of 64 rows, which Marlin permutes together."""
    num_rows, num_columns = source.shape
    step = max(_BLOCK // num_columns // RUN, 1) * RUN
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
