"""A target pass over a draft tree: its rows, and what stays in the pages of the path that is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from cpmrt.dtypes import F32, Array, DType
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import KVPages, Rows
from cpmrt.reference.draft_tree import Nodes
from cpmrt.reference.sparse_attention import append_compressed


def tree_rows(nodes: Nodes, slot: int, base: int, num_positions: int, max_context: int, block_tables: Array) -> Rows:
    """Node n at position base + depth, its keys at location base + n.

    `num_positions`: what the slot's pages hold. A node that does not fit, or is not there, is padding (slot -1).
    """
    locations = base + np.arange(len(nodes.tokens))
    positions = base + nodes.depths
    is_there = (nodes.parents >= 0) | (np.arange(len(locations)) == 0)
    fits = is_there & (locations < num_positions) & (positions < max_context)
    return Rows(
        nodes.tokens.astype(np.int64),
        np.where(fits, positions, 0),
        np.where(fits, slot, -1),
        block_tables,
        False,
        np.where(fits, locations, 0),
        nodes.masks,
        np.full(len(locations), base),
    )


def child_with(nodes: Nodes, rows: Rows, parent: int, token: int) -> int | None:
    """The node after `parent` that has `token`, if there is one and it fits."""
    found = np.flatnonzero((nodes.parents == parent) & (nodes.tokens == token) & (rows.slots >= 0))
    return int(found[0]) if len(found) else None


def keep_path(
    moved: Iterable[F32], pages: Iterable[KVPages], block_table: Array, base: int, path: Sequence[int], dtype: DType
) -> None:
    """Move what the caches `moved` [layers, P, ..., 64, D] hold of the path's nodes to the positions of the path.

    Windows of sparse attention that end within the path are compressed then, in the `pages` of every layer.
    """
    for cache in moved:
        for position, node in enumerate(path):
            if position != node:
                to, source = (divmod(base + place, PAGE_SIZE) for place in (position, node))
                cache[:, block_table[to[0]], :, to[1]] = cache[:, block_table[source[0]], :, source[1]]
    for kv in pages:
        if kv.compressed is not None:
            positions = range(base, base + len(path))
            append_compressed(kv.compressed.k1, kv.compressed.k2, kv.scored_keys, block_table, positions, dtype)
