"""Reads keys and values out of their pages, in the order of positions, and finds the places of those of new rows."""

from __future__ import annotations

import numpy as np

from cpmrt.dtypes import F32, Array
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import Fp8Pages, Rows
from cpmrt.reference.fp8_pages import path_of, values_of, values_of_nodes


def gather(pages: F32 | Fp8Pages, block_table: Array, length: int) -> F32:
    """Return the first `length` tokens of a slot out of its pages: [K, length, D]."""
    used = values_of(pages, block_table[: -(-length // PAGE_SIZE)])
    tokens: F32 = used.transpose(1, 0, 2, 3).reshape(pages.shape[1], -1, pages.shape[3])[:, :length]
    return tokens


def gather_row(pages: F32 | Fp8Pages, rows: Rows, row: int, window: int) -> F32:
    """Return the keys or values that a row sees, [K, tokens, D], in the order of positions.

    A row of a tree sees the decided positions, then its path as if that stood alone. With a `window` only the last
    `window` tokens are returned.
    """
    block_table, length = rows.block_tables[rows.slots[row]], int(rows.positions[row]) + 1
    tokens = gather(pages, block_table, length)
    if rows.tree_masks is not None:
        base, path = int(rows.tree_base[row]), path_of(int(rows.tree_masks[row]))
        if isinstance(pages, Fp8Pages):
            of_path = values_of_nodes(pages, path)
        else:
            locations = base + np.array(path)
            of_path = pages[block_table[locations // PAGE_SIZE], :, locations % PAGE_SIZE]
        tokens[:, base:] = of_path.transpose(1, 0, 2)
    return tokens[:, max(length - window, 0) if window else 0 :]


def places_of(rows: Rows) -> tuple[Array, Array, Array]:
    """Return which rows are no padding, and for each of these its page and its place among the page's tokens."""
    kept = rows.slots >= 0
    locations = (rows.positions if rows.locations is None else rows.locations)[kept]
    return kept, rows.block_tables[rows.slots[kept], locations // PAGE_SIZE], locations % PAGE_SIZE
