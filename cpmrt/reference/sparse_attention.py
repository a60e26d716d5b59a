"""Block-sparse attention in NumPy: compressed keys, the choice of blocks, and the tokens that a row's choice leaves.

The definition is in `config.sparse`. In the pages of `ops.CompressedKeys` compressed keys are counted from the start of
the text as entries: entry e of K1 is the window that ends at position 16 e + 15, entry e of K2 that which ends at
64 e + 63. Entry 0 would begin before the text and is never used; block b covers entries 4 b .. 4 b + 4 of K1.

Source: InfLLM-v2 (arXiv 2509.24663) and the official modeling code of MiniCPM4.1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.dtypes import F32, Array, DType, round_to
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import WINDOW_STRIDE, Fp8Pages, KVPages, Rows, Selection
from cpmrt.reference.kv_rows import gather, gather_row

_FINE, _COARSE = WINDOW_STRIDE, PAGE_SIZE
"""Tokens between two windows of K1 and of K2. A window is twice as long: 32 tokens for K1, two pages for K2."""
_ENTRIES = PAGE_SIZE // _FINE


def window_means(keys: F32, stride: int, dtype: DType) -> F32:
    """Return the mean of each stride of keys and the next: [K, strides - 1, D] of keys [K, strides * stride, D].

    Keys are summed token by token from the first, so that a window's bits do not depend on the windows that are
    compressed with it.
    """
    num_heads, num_tokens, head_dim = keys.shape
    strides = keys.reshape(num_heads, num_tokens // stride, stride, head_dim)
    total = np.zeros((num_heads, strides.shape[1] - 1, head_dim), np.float32)
    for part in (strides[:, :-1], strides[:, 1:]):
        for token in range(stride):
            total += part[:, :, token]
    return round_to(total / np.float32(2 * stride), dtype)


def append_compressed(
    k1_pages: F32,
    k2_pages: F32,
    k_pages: F32 | Fp8Pages,
    block_table: Array,
    positions: Iterable[int],
    dtype: DType,
) -> None:
    """Store the compressed key of every window that ends at one of a slot's `positions`.

    The slot's pages have the keys of these positions already.
    """
    for position in positions:
        page, offset = divmod(position, PAGE_SIZE)
        for stride in (_FINE, _COARSE):
            first = position + 1 - 2 * stride
            if (position + 1) % stride or first < 0:
                continue
            start = first % PAGE_SIZE
            keys = gather(k_pages, block_table[first // PAGE_SIZE : page + 1], start + 2 * stride)[:, start:]
            mean = window_means(keys, stride, dtype)[:, 0]
            if stride == _FINE:
                k1_pages[block_table[page], :, offset // _FINE] = mean
            else:
                k2_pages[block_table[page]] = mean


def append_step(kv: KVPages, rows: Rows, dtype: DType) -> None:
    """Store the compressed keys that a step's rows complete."""
    assert kv.compressed is not None
    for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
        if slot >= 0:
            table = rows.block_tables[slot]
            append_compressed(kv.compressed.k1, kv.compressed.k2, kv.scored_keys, table, (position,), dtype)


def compressed_of_row(kv: KVPages, rows: Rows, row: int, dtype: DType) -> tuple[F32, F32]:
    """Return the compressed keys that a row may score: entries 1 and on of K1 and of K2, [K, entries, D].

    The windows of a row of a tree that end within its path are not in the pages: they are averaged here.
    """
    assert kv.compressed is not None
    block_table, num_tokens = rows.block_tables[rows.slots[row]], int(rows.positions[row]) + 1
    used = block_table[: pages_for(num_tokens)]
    fine, coarse = kv.compressed.k1, kv.compressed.k2
    k1 = fine[used].transpose(1, 0, 2, 3).reshape(fine.shape[1], -1, fine.shape[3])
    k2 = coarse[used].transpose(1, 0, 2)
    found = []
    for entries, stride in ((k1, _FINE), (k2, _COARSE)):
        entries = np.ascontiguousarray(entries[:, 1 : num_tokens // stride])
        if rows.tree_masks is not None:
            first = int(rows.tree_base[row]) // stride
            if first < num_tokens // stride:
                keys = gather_row(kv.scored_keys, rows, row, 0)[:, : num_tokens // stride * stride]
                entries[:, max(first - 1, 0) :] = window_means(keys[:, max(first - 1, 0) * stride :], stride, dtype)
        found.append(entries)
    return found[0], found[1]


def block_scores(q: F32, k1: F32, k2: F32, scale: float) -> F32:
    """Return the scores [K, blocks] of the blocks that end at or before a row, by its q [K, G, D] and by k1 and k2 of
    `compressed_of_row`."""
    fine, coarse = (q @ keys.transpose(0, 2, 1) * np.float32(scale) for keys in (k1, k2))
    highest = coarse.max(axis=-1, keepdims=True)
    log_sum = highest + np.log(np.exp(coarse - highest).sum(axis=-1, keepdims=True))
    with np.errstate(over="ignore"):
        entries = np.exp(fine - log_sum).sum(axis=1)
    # Entry 0 has no window; that of entry 4 b + 4 of the row's last whole block may not have ended yet.
    num_blocks = (entries.shape[1] + 1) // _ENTRIES
    padded = np.pad(entries, ((0, 0), (1, _ENTRIES)), constant_values=-np.inf)
    spans = [padded[:, part : part + num_blocks * _ENTRIES : _ENTRIES] for part in range(_ENTRIES + 1)]
    scores: F32 = np.max(spans, axis=0)
    return scores


def choose_blocks(scores: F32, position: int, config: SparseConfig) -> Array:
    """Return the ascending block numbers [K, W] of a row that leaves blocks out, by scores [K, blocks before its own].
    """
    own = position // PAGE_SIZE
    local = own - config.local_blocks
    between = scores[:, config.init_blocks : local]
    best = np.argsort(-between, axis=1, kind="stable")[:, : config.num_scored] + config.init_blocks
    forced = [*range(config.init_blocks), *range(local, own + 1)]
    return np.sort(np.concatenate([best, np.tile(forced, (len(scores), 1))], axis=1), axis=1)


def select_blocks(
    blocks: Array, q: F32, kv: KVPages, rows: Rows, scale: float, config: SparseConfig, dtype: DType
) -> None:
    """Compute the op `select_blocks`. Rows that leave nothing out keep what is in `blocks`."""
    for row in map(int, np.flatnonzero(rows.slots >= 0)):
        position = int(rows.positions[row])
        if not config.leaves_out(position + 1):
            continue
        k1, k2 = compressed_of_row(kv, rows, row, dtype)
        groups = q[row].reshape(k1.shape[0], -1, k1.shape[2])
        blocks[row] = choose_blocks(block_scores(groups, k1, k2, scale), position, config)


def chosen_tokens(tokens: F32, selection: Selection, row: int) -> F32:
    """Return, of the tokens [K, positions, D] that a row sees, those in its blocks, equally many for each head."""
    if not selection.config.leaves_out(tokens.shape[1]):
        return tokens
    places = (selection.blocks[row][:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(len(tokens), -1)
    # The row's own block, the last one, ends with the row.
    places = places[:, : places.shape[1] - -tokens.shape[1] % PAGE_SIZE]
    return np.stack([tokens[head, places[head]] for head in range(len(tokens))])


def left_out(selection: Selection, positions: Array, head: int, length: int) -> Array:
    """Return whether each row leaves out each of the first `length` positions for a KV head: bool [T, length]."""
    kept = np.ones((len(positions), pages_for(length)), bool)
    for row, position in enumerate(map(int, positions)):
        if selection.config.leaves_out(position + 1):
            kept[row] = False
            kept[row, selection.blocks[row, head]] = True
    return ~np.repeat(kept, PAGE_SIZE, axis=1)[:, :length]
