"""Products and attention in tiles of fixed shapes, so that a row's bits do not depend on the number of rows or keys.

BLAS picks its summation order by the shape of a product. Rows go through it in tiles of one shape, filled up with
zeros: small tiles for a step, large ones for the many rows of a prefill, whose keys go in tiles at fixed positions.
Some kernels of BLAS also sum by a row's place in its tile: those of OpenBLAS for CPUs without AVX-512 take twelve rows
at a time, and the last six in another order than the first. With them a prefill has small tiles too.
"""

from __future__ import annotations

import numpy as np

from cpmrt.dtypes import F32, Array

STEP_TILE, KEY_TILE = 8, 256


def rows_are_alike(num_rows: int) -> bool:
    """Tell whether BLAS gives equal rows of a tile of so many rows equal bits, wherever in the tile they are."""
    weight = np.sin(np.arange(80 * 96, dtype=np.float32)).reshape(80, 96)
    tile = np.tile(weight[0], (1, num_rows, 1))
    products = np.matmul(tile, weight.T), np.matmul(tile, np.ascontiguousarray(weight.T))
    return all(np.array_equal(found, np.broadcast_to(found[:, :1], found.shape)) for found in products)


PREFILL_TILE = 64 if rows_are_alike(64) else STEP_TILE


def tiles_of(x: F32, tile_rows: int) -> F32:
    """Return x [T, ...] as tiles of so many rows, the last one filled up with zeros: [tiles, tile_rows, ...]."""
    num_tiles = -(-len(x) // tile_rows)
    if len(x) == num_tiles * tile_rows:
        return x.reshape(num_tiles, tile_rows, *x.shape[1:])
    tiles = np.zeros((num_tiles, tile_rows, *x.shape[1:]), x.dtype)
    tiles.reshape(-1, *x.shape[1:])[: len(x)] = x
    return tiles


def product(tiles: F32, weight: F32, num_rows: int) -> F32:
    """Return tiles [tiles, rows, K] of `num_rows` rows times weight [N, K] transposed, tile by tile: [num_rows, N]."""
    found: F32 = np.matmul(tiles, weight.T).reshape(-1, len(weight))[:num_rows]
    return found


def key_tiles(tokens: F32) -> F32:
    """Return keys or values [K, length, D] as tiles at fixed positions, filled up: [K, tiles, KEY_TILE, D]."""
    num_heads, length, head_dim = tokens.shape
    tiles = np.zeros((num_heads, -(-length // KEY_TILE) * KEY_TILE, head_dim), np.float32)
    tiles[:, :length] = tokens
    return tiles.reshape(num_heads, -1, KEY_TILE, head_dim)


def softmax(scores: F32) -> F32:
    """Return the softmax over the last axis."""
    weights: F32 = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def attend(queries: F32, keys: F32, values: F32, seen: Array, scale: float) -> F32:
    """Return the attention of one tile of rows: queries [heads, rows, D], keys and values [tiles, KEY_TILE, D].

    `seen` bool [rows, tiles * KEY_TILE]: which keys each row sees; a row that sees none gives zeros. Each product is of
    one tile of rows with one tile of keys, and sums over keys go from tile to tile. A tile that no row sees would add
    zeros, and is left out.
    """
    by_tile = seen.reshape(len(seen), len(keys), KEY_TILE).transpose(1, 0, 2)
    used = by_tile.any(axis=(1, 2))
    if not used.any():
        return np.zeros_like(queries)
    scores: F32 = np.matmul(queries[:, None], keys[used].transpose(0, 2, 1))
    scores *= np.float32(scale)
    scores += np.where(by_tile[used], np.float32(0), np.float32(-np.inf))
    highest = scores.max(axis=(1, 3), keepdims=True)
    scores -= np.where(np.isfinite(highest), highest, 0)
    weights: F32 = np.exp(scores, out=scores)
    total = _in_order(weights.sum(axis=-1))
    weights /= np.where(total > 0, total, 1)[:, None, :, None]
    return _in_order(np.matmul(weights, values[used]))


def _in_order(parts: F32) -> F32:
    """Add parts [heads, tiles, ...] over the tiles, one after the other."""
    total: F32 = parts[:, 0].copy()
    for tile in range(1, parts.shape[1]):
        total += parts[:, tile]
    return total
