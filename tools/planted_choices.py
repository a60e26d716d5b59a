"""Makes choices of blocks for a chunk of prefill whose neighbours share a known number of blocks."""

from __future__ import annotations

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.dtypes import Array
from cpmrt.memory.caches import PAGE_SIZE

TOGETHER = 12
"""The number of neighbours whose union is stated."""


def planted_choices(
    start: int, rows: int, num_heads: int, config: SparseConfig, union: float | None, rng: np.random.Generator
) -> Array:
    """Returns ascending blocks int32 [rows, K, W] of the rows from position `start` on, all of which leave blocks out.

    Each row keeps as many of the blocks of the one before that TOGETHER neighbours choose about `union` blocks in all,
    and draws the others at random; None: it draws all of them.
    """
    owns = (start + np.arange(rows)) // PAGE_SIZE
    fresh = 1.0 if union is None else _drawn(union, int(owns[0]), config)
    blocks = np.empty((rows, num_heads, config.num_selected), np.int32)
    for head in range(num_heads):
        drawn = np.empty(0, np.int64)
        for row, own in enumerate(owns.tolist()):
            free = np.arange(config.init_blocks, own - config.local_blocks)
            kept = drawn[rng.random(len(drawn)) >= fresh]
            others = free if union is None else np.setdiff1d(free, drawn, assume_unique=True)
            drawn = np.concatenate([kept, rng.choice(others, config.num_scored - len(kept), replace=False)])
            forced = [*range(config.init_blocks), *range(own - config.local_blocks, own + 1)]
            blocks[row, head] = np.sort(np.concatenate([drawn, forced]))
    return blocks


def _drawn(union: float, own: int, config: SparseConfig) -> float:
    """Returns the share of its blocks that a row does not have from the one before.

    A block is in none of n choices with probability (1 - s) (1 - s / (1 - s) x)^(n - 1), where s is the share of all
    blocks that a row chooses and x is the result.
    """
    free = own - config.local_blocks - config.init_blocks
    share, forced = config.num_scored / free, config.num_selected - config.num_scored
    none = max(0.0, 1 - (union - forced) / free) / (1 - share)
    return float(np.clip((1 - none ** (1 / (TOGETHER - 1))) * (1 - share) / share, 0, 1))
