"""How file formats lay 4-bit numbers out in 32-bit words: pure rearrangement, both ways, nothing rounded.

Every function speaks of one matrix in its canonical form: codes u [N, K] and zero points z [N, groups] are uint8
arrays of values 0..15, N = output features (rows), K = input features. Words are int32 as the files have them; eight
numbers a word, the first in the low bits. N and K must be multiples of 8 (Marlin: N of 64, K of 16).

Sources: GPTQ and its v1 zero points: AutoGPTQ and GPTQModel (`qlinear`); AWQ: AutoAWQ (`WQLinear_GEMM`);
compressed-tensors: its `pack_to_int32`; Marlin: IST-DASLab/marlin and vLLM's `gptq_marlin_repack`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble j of an AWQ word holds column AWQ_ORDER[j] of its eight."""
_AWQ_PLACE = tuple(AWQ_ORDER.index(column) for column in range(8))
_V1_STEP = np.uint32(0x11111111)
_MARLIN_TILE = 16
MARLIN_RUN = 64
"""Columns that Marlin permutes together."""


def pack_nibbles(values: U8) -> I32:
    """uint8 [..., 8 n] with values 0..15 to words [..., n]."""
    pairs = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(pairs).view("<i4").astype(np.int32, copy=False)


def unpack_nibbles(words: I32) -> U8:
    """Words [..., n] to uint8 [..., 8 n]: the inverse of `pack_nibbles`."""
    pairs = np.ascontiguousarray(words, "<i4").view(np.uint8)
    out = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.uint8)
    np.bitwise_and(pairs, 15, out=out[..., 0::2])
    np.right_shift(pairs, 4, out=out[..., 1::2])
    return out


def pack_gptq_codes(u: U8) -> I32:
    """GPTQ `qweight` int32 [K/8, N]: a word holds eight neighbouring input features of one output."""
    return np.ascontiguousarray(pack_nibbles(u).T)


def unpack_gptq_codes(qweight: I32) -> U8:
    """u [N, K] of `qweight` [K/8, N], or of a slice of its columns."""
    return unpack_nibbles(qweight.T)


def pack_gptq_zeros(z: U8, *, v1: bool) -> I32:
    """GPTQ `qzeros` int32 [groups, N/8]. `v1` stores z - 1: one is taken from each nibble of the whole word, with a
    borrow where a zero point is 0, as GPTQModel does."""
    words = pack_nibbles(z.T)
    return (words.view(np.uint32) - _V1_STEP).view(np.int32) if v1 else words


def unpack_gptq_zeros(qzeros: I32, *, v1: bool) -> U8:
    """z [N, groups] of `qzeros` [groups, N/8]: the inverse of `pack_gptq_zeros`."""
    words = np.ascontiguousarray(qzeros, np.int32)
    if v1:
        words = (words.view(np.uint32) + _V1_STEP).view(np.int32)
    return np.ascontiguousarray(unpack_nibbles(words).T)


def pack_awq(values: U8) -> I32:
    """AutoAWQ GEMM `qweight` int32 [K, N/8] of codes u [N, K], or `qzeros` [groups, N/8] of z [N, groups]."""
    columns = np.ascontiguousarray(values.T).reshape(values.shape[1], -1, 8)
    return pack_nibbles(columns[:, :, AWQ_ORDER].reshape(values.shape[1], -1))


def unpack_awq(words: I32) -> U8:
    """u [N, K] of `qweight`, or z [N, groups] of `qzeros`, or of a slice of their columns."""
    columns = unpack_nibbles(words).reshape(words.shape[0], -1, 8)
    return np.ascontiguousarray(columns[:, :, _AWQ_PLACE].reshape(words.shape[0], -1).T)


def pack_compressed_codes(u: U8) -> I32:
    """compressed-tensors `weight_packed` int32 [N, K/8]. (Its signed values -8..7 are stored plus 8: u itself.)"""
    return pack_nibbles(u)


def unpack_compressed_codes(weight_packed: I32) -> U8:
    """u [N, K] of `weight_packed` [N, K/8]."""
    return unpack_nibbles(weight_packed)


def pack_compressed_zeros(z: U8) -> I32:
    """compressed-tensors `weight_zero_point` int32 [N/8, groups]: packed along the output features."""
    return np.ascontiguousarray(pack_nibbles(z.T).T)


def unpack_compressed_zeros(weight_zero_point: I32) -> U8:
    """z [N, groups] of `weight_zero_point` [N/8, groups]."""
    return np.ascontiguousarray(unpack_nibbles(weight_zero_point.T).T)


def pack_marlin_codes(u: U8) -> I32:
    """Marlin `qweight` int32 [K/16, 2 N]: 16 x 16 tiles, four neighbours permuted to the order of tensor-core lanes."""
    num_rows, num_columns = u.shape
    tiles = u.T.reshape(num_columns // _MARLIN_TILE, _MARLIN_TILE, num_rows // _MARLIN_TILE, _MARLIN_TILE)
    runs = np.ascontiguousarray(tiles.transpose(0, 2, 1, 3)).reshape(num_columns // _MARLIN_TILE, -1, 1024)
    return pack_nibbles(runs[:, :, marlin_code_order()].reshape(num_columns // _MARLIN_TILE, -1))


def unpack_marlin_codes(qweight: I32) -> U8:
    """u [N, K] of `qweight` [K/16, 2 N], or of a slice of its columns that begins and ends at runs of 64 rows of u."""
    num_tiles = qweight.shape[0]
    runs = unpack_nibbles(qweight).reshape(num_tiles, -1, 1024)
    tiles = runs[:, :, np.argsort(marlin_code_order())].reshape(num_tiles, -1, _MARLIN_TILE, _MARLIN_TILE)
    columns = tiles.transpose(1, 3, 0, 2).reshape(qweight.shape[1] // 2, num_tiles * _MARLIN_TILE)
    return np.ascontiguousarray(columns)


def pack_marlin_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """Marlin `scales` [groups, N] of canonical scales [N, groups], whatever their type."""
    order = marlin_scale_order(scales.shape[1] > 1)
    rows = np.ascontiguousarray(scales.T)
    return np.ascontiguousarray(rows.reshape(-1, len(order))[:, order]).reshape(rows.shape)


def unpack_marlin_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """Canonical scales [N, groups] of Marlin's [groups, N]."""
    inverse = np.argsort(marlin_scale_order(scales.shape[0] > 1))
    rows = np.ascontiguousarray(scales).reshape(-1, len(inverse))[:, inverse].reshape(scales.shape)
    return np.ascontiguousarray(rows.T)


@lru_cache(maxsize=1)
def marlin_code_order() -> NDArray[np.intp]:
    """The 1024 places of four tiles, in the order in which Marlin stores them."""
    order = []
    for lane in range(32):
        column, row = lane // 4, lane % 4
        places = [
            _MARLIN_TILE * in_tile + column + 8 * half
            for half in (0, 1)
            for in_tile in (2 * row, 2 * row + 1, 2 * row + 8, 2 * row + 9)
        ]
        order += [place + 256 * tile for tile in range(4) for place in places]
    interleaved = np.array(order, np.intp).reshape(-1, 8)[:, AWQ_ORDER]
    return interleaved.reshape(-1)


@lru_cache(maxsize=2)
def marlin_scale_order(grouped: bool) -> NDArray[np.intp]:
    """Which of 64 (one group a column: 32) neighbouring scales comes at each place."""
    if grouped:
        order = [place + 8 * step for place in range(8) for step in range(8)]
    else:
        order = [2 * pair + place for pair in range(4) for place in (0, 1, 8, 9, 16, 17, 24, 25)]
    return np.array(order, np.intp)
