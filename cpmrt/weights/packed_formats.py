"""The tensors of a quantised matrix in each file format: their names, types and shapes, and how rows are taken out.

Canonical is u [N, K] in 0..15 in the file's order of columns, scale [N, groups], zero [N, groups] in 0..15, and
W[n, k] = scale[n, g] * (u[n, k] - zero[n, g]) with g = k // group_size, or g_idx[k] where the file has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cpmrt.dtypes import F32, Array, to_float32
from cpmrt.errors import CheckpointError, quoted
from cpmrt.tensor_spec import Packing, Source
from cpmrt.weights import int4_packing as packing
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.int4_packing import I32, U8
from cpmrt.weights.safetensors import FLOATS

ROW_STEP = 64
"""Rows are taken in multiples of it, counted from the first: a run of Marlin's permutation."""
Shape = tuple[int, ...]
Sizes = Callable[[int, int, int], Shape]


@dataclass(frozen=True)
class PackedFormat:
    """Suffixes and shapes (of N, K, groups) of the tensors, and the words that hold rows begin..end."""

    codes: str
    codes_shape: Sizes
    code_words: Callable[[I32, int, int], I32]
    unpack_codes: Callable[[I32], U8]
    scales: str
    scales_shape: Sizes
    scale_rows: Callable[[Array], Array]
    zeros: str | None = None
    zeros_shape: Sizes | None = None
    unpack_zeros: Callable[[I32, bool], U8] | None = None
    order: str | None = None
    shape: str | None = None
    """A tensor that holds N and K."""
    row_step: int = 8
    column_step: int = 8
    """N and K are multiples of them."""


FORMATS = {
    "gptq": PackedFormat(
        codes="qweight",
        codes_shape=lambda n, k, groups: (k // 8, n),
        code_words=lambda words, begin, end: words[:, begin:end],
        unpack_codes=packing.unpack_gptq_codes,
        scales="scales",
        scales_shape=lambda n, k, groups: (groups, n),
        scale_rows=lambda scales: scales.T,
        zeros="qzeros",
        zeros_shape=lambda n, k, groups: (groups, n // 8),
        unpack_zeros=lambda words, v1: packing.unpack_gptq_zeros(words, v1=v1),
        order="g_idx",
    ),
    "awq": PackedFormat(
        codes="qweight",
        codes_shape=lambda n, k, groups: (k, n // 8),
        code_words=lambda words, begin, end: words[:, begin // 8 : end // 8],
        unpack_codes=packing.unpack_awq,
        scales="scales",
        scales_shape=lambda n, k, groups: (groups, n),
        scale_rows=lambda scales: scales.T,
        zeros="qzeros",
        zeros_shape=lambda n, k, groups: (groups, n // 8),
        unpack_zeros=lambda words, v1: packing.unpack_awq(words),
    ),
    "compressed": PackedFormat(
        codes="weight_packed",
        codes_shape=lambda n, k, groups: (n, k // 8),
        code_words=lambda words, begin, end: words[begin:end],
        unpack_codes=packing.unpack_compressed_codes,
        scales="weight_scale",
        scales_shape=lambda n, k, groups: (n, groups),
        scale_rows=lambda scales: scales,
        zeros="weight_zero_point",
        zeros_shape=lambda n, k, groups: (n // 8, groups),
        unpack_zeros=lambda words, v1: packing.unpack_compressed_zeros(words),
        order="weight_g_idx",
        shape="weight_shape",
    ),
    "marlin": PackedFormat(
        codes="qweight",
        codes_shape=lambda n, k, groups: (k // 16, 2 * n),
        code_words=lambda words, begin, end: words[:, 2 * begin : 2 * end],
        unpack_codes=packing.unpack_marlin_codes,
        scales="scales",
        scales_shape=lambda n, k, groups: (groups, n),
        scale_rows=packing.unpack_marlin_scales,
        row_step=64,
        column_step=16,
    ),
}


@dataclass(frozen=True)
class PackedTensor:
    """One tensor that a source needs, or may have."""

    name: str
    dtypes: tuple[str, ...]
    shape: Shape
    required: bool = True


def packed_tensors(source: Source) -> Iterator[PackedTensor]:
    """The tensors of a source that has a packing."""
    row, settings = _row(source)
    num_rows, num_columns = source.shape
    sizes = num_rows, num_columns, num_columns // settings.group_size
    yield PackedTensor(f"{source.name}.{row.codes}", ("I32",), row.codes_shape(*sizes))
    yield PackedTensor(f"{source.name}.{row.scales}", tuple(FLOATS), row.scales_shape(*sizes))
    has_zeros = settings.format != "compressed" or not settings.symmetric
    if row.zeros and row.zeros_shape and has_zeros:
        yield PackedTensor(f"{source.name}.{row.zeros}", ("I32",), row.zeros_shape(*sizes))
    if row.order:
        yield PackedTensor(f"{source.name}.{row.order}", ("I32",), (num_columns,), required=False)
    if row.shape:
        yield PackedTensor(f"{source.name}.{row.shape}", ("I32", "I64"), (2,), required=False)


def read_codes(source: Source, checkpoint: Checkpoint, begin: int, end: int) -> U8:
    """u of rows begin..end (a multiple of ROW_STEP first), columns as in the file."""
    row, _ = _row(source)
    return row.unpack_codes(row.code_words(checkpoint.view(f"{source.name}.{row.codes}"), begin, end))


def read_scales(source: Source, checkpoint: Checkpoint) -> F32:
    """float32 [N, groups]. Raises CheckpointError where one is not finite."""
    row, _ = _row(source)
    name = f"{source.name}.{row.scales}"
    words, stored = checkpoint.view(name), FLOATS[checkpoint.entries[name].dtype]
    values = to_float32(np.ascontiguousarray(row.scale_rows(words)), stored)
    if not np.isfinite(values).all():
        raise CheckpointError(f"{checkpoint.folder}: tensor {quoted(name)} has scales that are not finite")
    return values


def read_zeros(source: Source, checkpoint: Checkpoint) -> U8 | None:
    """uint8 [N, groups], or None where all are 8. Raises CheckpointError where the settings promise that in vain."""
    row, settings = _row(source)
    name = f"{source.name}.{row.zeros}"
    if row.unpack_zeros is None or name not in checkpoint.entries:
        return None
    zeros = row.unpack_zeros(checkpoint.view(name), settings.v1_zeros)
    if not settings.symmetric:
        return zeros
    if (zeros != 8).any():
        other = int(zeros[zeros != 8][0])
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(name)} contradicts the symmetric quantisation of config.json",
            expected="zero points of 8",
            actual=other,
            fix="correct sym (or zero_point) or checkpoint_format in quantization_config",
        )
    return None


def read_order(source: Source, checkpoint: Checkpoint) -> I32 | None:
    """The columns sorted by their group (perm [K]: stored column j is input feature perm[j]); None: they are already.

    Raises CheckpointError where the file's groups are out of range or of unequal size.
    """
    row, settings = _row(source)
    name = f"{source.name}.{row.order}"
    if row.order is None or name not in checkpoint.entries:
        return None
    group_of = np.asarray(checkpoint.view(name))
    num_groups = source.shape[1] // settings.group_size
    # compressed-tensors writes -1 everywhere for an order that was never set.
    if settings.format == "compressed" and (group_of == -1).all():
        return None
    if group_of.min() < 0 or group_of.max() >= num_groups:
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(name)}",
            expected=f"groups in [0, {num_groups})",
            actual=f"{int(group_of.min())} to {int(group_of.max())}",
        )
    sizes = np.bincount(group_of, minlength=num_groups)
    if (sizes != settings.group_size).any():
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {quoted(name)}",
            expected=f"{settings.group_size} columns in every group",
            actual=f"{int(sizes.min())} to {int(sizes.max())}",
        )
    if (np.diff(group_of) >= 0).all():
        return None
    return np.argsort(group_of, kind="stable").astype(np.int32)


def check_shape_tensor(source: Source, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where the file's own note of the shape is another one."""
    row, _ = _row(source)
    name = f"{source.name}.{row.shape}"
    if row.shape and name in checkpoint.entries:
        found = checkpoint.view(name).tolist()
        if found != list(source.shape):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor {quoted(name)}", expected=list(source.shape), actual=quoted(found)
            )


def _row(source: Source) -> tuple[PackedFormat, Packing]:
    assert source.packing is not None, source.name
    return FORMATS[source.packing.format], source.packing
