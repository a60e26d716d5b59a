"""Packing and unpacking as `packed_layout.cuh` describes it, in NumPy: the oracle of the kernels that repack."""

from __future__ import annotations

import numpy as np

from cpmrt.cuda.ops.linear_packed.layout import SLICE_COLUMNS, TILE_ROWS, PackedLayout
from cpmrt.dtypes import Array

_SHIFTS = np.array([0, 16, 8, 24], np.uint32)
"""The bit positions of four columns' codes in a word."""


def tile_rows(layout: PackedLayout) -> Array:
    """Return the weight's row for each of the 16 rows of each tile, int32 [tiles, 16]; -1 where there is none."""
    tiles, row = np.arange(layout.num_tiles)[:, None], np.arange(8)[None, :]
    if layout.product == "qkv":
        half = layout.head_dim // 2
        per_head = layout.head_dim // TILE_ROWS
        low = tiles // per_head * layout.head_dim + tiles % per_head * 8 + row
        high = low + half
    elif layout.product == "gate_up":
        low, high = tiles * 8 + row, layout.out_features // 2 + tiles * 8 + row
    else:
        low, high = tiles * TILE_ROWS + row, tiles * TILE_ROWS + 8 + row
    rows = np.concatenate([low, high], axis=1).astype(np.int32)
    rows[rows >= layout.out_features] = -1
    return rows


def unit_offsets(layout: PackedLayout) -> Array:
    """Return the byte offset of each unit, int64 [tiles, slices]."""
    tile, index = np.arange(layout.num_tiles)[:, None], np.arange(layout.num_slices)[None, :]
    within = index // layout.run_slices * layout.run_bytes + index % layout.run_slices * layout.unit_bytes
    offsets: Array = tile * layout.tile_bytes + within
    return offsets


def pack(layout: PackedLayout, codes: Array, scales: Array, zeros: Array | None) -> Array:
    """Return the packed weight, uint8 [num_bytes], in which padding is zero.

    `codes` [N, K] are 0..15 (2 bits: 0..3, 8 bits: 0..255); `scales` and `zeros` [N, K / scale_group] are storage words
    (uint16, or float16).
    """
    packed = np.zeros(layout.num_bytes, np.uint8)
    rows = tile_rows(layout)
    views = np.empty((layout.num_tiles, layout.num_slices, layout.unit_bytes), np.uint8)
    units = np.where(rows[:, :, None] >= 0, codes[rows], 0).astype(np.uint32)
    words = _words(units.reshape(len(rows), TILE_ROWS, layout.num_slices, SLICE_COLUMNS), layout.bits)
    views[:, :, : layout.code_bytes] = words.view(np.uint8).reshape(len(rows), layout.num_slices, layout.code_bytes)
    views[:, :, layout.code_bytes :] = _scale_bytes(layout, rows, scales, zeros)
    packed[_unit_index(layout)] = views
    return packed


def unpack_codes(layout: PackedLayout, packed: Array) -> Array:
    """Return the codes, uint8 [N, K], of a packed weight: the inverse of `pack`."""
    words = np.ascontiguousarray(packed[_unit_index(layout)][:, :, : layout.code_bytes]).view(np.uint32)
    tiles, slices = words.shape[:2]
    if layout.bits == 2:
        fours = words.reshape(tiles, slices, 8, 4, 4)[..., None] >> np.array([0, 4], np.uint32)
        halves = np.stack([fours, fours >> np.uint32(2)], axis=1).transpose(0, 1, 3, 2, 5, 4, 6)
    elif layout.bits == 8:
        halves = words.reshape(tiles, slices, 2, 2, 8, 4, 2, 2).transpose(0, 7, 4, 1, 2, 3, 5, 6)
    else:
        pairs = words.reshape(tiles, slices, 2, 8, 4, 2, 2).transpose(0, 3, 1, 2, 5, 4, 6)
        halves = np.stack([pairs, pairs >> np.uint32(4)], axis=1)
    codes = halves[..., None] >> _SHIFTS & np.uint32(2**layout.bits - 1)
    out, rows = np.zeros((layout.out_features, layout.in_features), np.uint8), tile_rows(layout)
    out[rows[rows >= 0]] = codes.reshape(tiles, TILE_ROWS, layout.in_features)[rows >= 0]
    return out


def _words(units: Array, bits: int) -> Array:
    """Return the words, in the order of memory, for `units`: codes uint32 [tiles, 16, slices, 128]."""
    # k = 64 a + 32 b + 8 t + 4 step + e
    split = units.reshape(len(units), 2, 8, -1, 2, 2, 4, 2, 4)
    # axes: [tile, half, g, slice, a, b, t, step]
    halves = np.bitwise_or.reduce(split << _SHIFTS, axis=-1)
    if bits == 2:
        steps = halves[..., 0] | halves[..., 1] << np.uint32(4)
        rows = steps[:, 0] | steps[:, 1] << np.uint32(2)
        # axes: [tile, g, slice, a, b, t]
        return np.ascontiguousarray(rows.transpose(0, 2, 1, 5, 3, 4))
    if bits == 8:
        return np.ascontiguousarray(halves.transpose(0, 3, 4, 5, 2, 6, 7, 1))
    pairs = halves[:, 0] | halves[:, 1] << np.uint32(4)
    return np.ascontiguousarray(pairs.transpose(0, 2, 3, 1, 5, 4, 6))


def _scale_bytes(layout: PackedLayout, rows: Array, scales: Array, zeros: Array | None) -> Array:
    pair = [scales] if zeros is None else [scales, zeros]
    words = np.stack([array.view(np.uint16) for array in pair], axis=-1)
    of_tiles = np.where(rows[:, :, None, None] >= 0, words[rows], 0).astype(np.uint16)
    count = SLICE_COLUMNS // layout.scale_group
    split = of_tiles.reshape(len(rows), 2, 8, layout.num_slices, count, len(pair))
    ordered = np.ascontiguousarray(split.transpose(0, 3, 4, 2, 1, 5))
    return ordered.view(np.uint8).reshape(len(rows), layout.num_slices, -1)


def _unit_index(layout: PackedLayout) -> Array:
    index: Array = unit_offsets(layout)[:, :, None] + np.arange(layout.unit_bytes)
    return index
