"""Attention over latents in NumPy: absorbed, a row at a time, and expanded to heads for the rows of a prefill."""

from __future__ import annotations

import numpy as np

from cpmrt.dtypes import F32
from cpmrt.ops import Rows
from cpmrt.reference.kv_rows import gather, gather_row
from cpmrt.reference.tiles import KEY_TILE, PREFILL_TILE, attend, key_tiles, product, softmax, tiles_of


def attend_row(query: F32, rotated: F32, pages: F32, up: F32, rows: Rows, row: int, scale: float) -> F32:
    """Return the attention of one row [H, U]: `query` [H, N] before its rotated part [H, R].

    A head's query is projected to the space of the latents, and its result back from there (the absorbed form), so that
    the row reads each latent once.
    """
    rank, nope_dim = up.shape[2], query.shape[1]
    keys, values = up[:, :nope_dim], up[:, nope_dim:]
    tokens = gather_row(pages, rows, row, 0)[0]
    absorbed = np.matmul(query[:, None], keys)[:, 0]
    scores: F32 = np.concatenate([absorbed, rotated], axis=1) @ tokens.T
    scores *= np.float32(scale)
    seen: F32 = softmax(scores) @ tokens[:, :rank]
    attended: F32 = np.matmul(values, seen[:, :, None])[:, :, 0]
    return attended


def attend_chunk(out: F32, query: F32, rotated: F32, pages: F32, up: F32, rows: Rows, scale: float) -> None:
    """Fill out [T, H, U] with the causal attention of consecutive rows of one slot, the heads one after the other."""
    num_rows, num_heads, nope_dim = query.shape
    rank, length = up.shape[2], int(rows.positions[-1]) + 1
    tokens = key_tiles(gather(pages, rows.block_tables[rows.slots[-1]], length))[0]
    places = np.arange(len(tokens) * KEY_TILE)
    seen = tiles_of(places <= rows.positions[:, None], PREFILL_TILE)
    latents, shared = np.ascontiguousarray(tokens[..., :rank]), tokens[..., rank:]
    for head in range(num_heads):
        expanded = product(latents, up[head], places.size).reshape(len(tokens), KEY_TILE, -1)
        keys = np.concatenate([expanded[..., :nope_dim], shared], axis=-1)
        values = np.ascontiguousarray(expanded[..., nope_dim:])
        queries = np.concatenate([query[:, head], rotated[:, head]], axis=-1)
        for first, (tile, seen_by) in enumerate(zip(tiles_of(queries, PREFILL_TILE), seen, strict=True)):
            into = out[first * PREFILL_TILE : (first + 1) * PREFILL_TILE, head]
            into[:] = attend(tile[None], keys, values, seen_by, scale)[0, : len(into)]
