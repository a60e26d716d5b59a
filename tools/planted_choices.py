"""Makes block choices for a prefill chunk, in which neighbouring rows together choose a known number of blocks."""

from __future__ import annotations

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.dtypes import Array
from cpmrt.memory.caches import PAGE_SIZE

TOGETHER = 12
"""The number of neighbouring rows whose union of chosen blocks is given."""


def planted_choices(
    start: int, rows: int, num_heads: int, config: SparseConfig, union: float | None, rng: np.random.Generator
) -> Array:
    """Returns the chosen blocks, ascending, int32 [rows, K, W], of rows from position `start` on.

    Every row must have more blocks than it chooses. A row keeps so many of the blocks of the row before that TOGETHER
    neighbours choose about `union` blocks in all, and draws the others at random; with None it draws all of them.
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
    """Returns the share of its blocks that a row draws anew instead of keeping them from the row before.

    A block is in none of the choices of n neighbours with probability (1 - s) (1 - s / (1 - s) x)^(n - 1), where s is
    the share of all blocks that a row chooses and x is the result.
    """
    free = own - config.local_blocks - config.init_blocks
    share, forced = config.num_scored / free, config.num_selected - config.num_scored
    none = max(0.0, 1 - (union - forced) / free) / (1 - share)
    return float(np.clip((1 - none ** (1 / (TOGETHER - 1))) * (1 - share) / share, 0, 1))
