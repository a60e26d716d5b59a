"""Block-sparse attention by its formulas, one token and one KV head at a time, in float64.

There are no pages, entries or rows here: `keys` [n, D] are those of all tokens up to the one that attends, included.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpmrt.config import SparseConfig

BLOCK = 64


def windows(keys: Any, size: int, stride: int) -> list[Any]:
    """Return the mean key of each complete window."""
    found = []
    while stride * len(found) + size <= len(keys):
        first = stride * len(found)
        found.append(sum(keys[first + i].astype(np.float64) for i in range(size)) / size)
    return found


def scores(queries: Any, k1: list[Any], k2: list[Any], scale: float, num_blocks: int) -> list[float]:
    """Return the score of each block before a token's own, for its `queries` [G, D] of one KV head.

    `k1` and `k2` are the fine and coarse compressed keys that the token may see.
    """
    p = [0.0] * len(k1)
    for query in queries.astype(np.float64):
        coarse = [float(query @ key) * scale for key in k2]
        highest = max(coarse)
        log_sum = highest + math.log(sum(math.exp(value - highest) for value in coarse))
        for j, key in enumerate(k1):
            p[j] += math.exp(float(query @ key) * scale - log_sum)
    return [max(p[j] for j in range(4 * b - 1, 4 * b + 4) if 0 <= j < len(p)) for b in range(num_blocks)]


def forced(position: int, config: SparseConfig) -> set[int]:
    own = position // BLOCK
    always = {b for b in range(config.init_blocks) if b <= own}
    return always | {b for b in range(own + 1) if b >= own - config.window_size // BLOCK}


def looks_at_everything(position: int, config: SparseConfig) -> bool:
    num_blocks = position // BLOCK + 1
    return position + 1 < config.dense_len or num_blocks <= config.topk + config.window_size // BLOCK


def chosen(block_scores: list[float], position: int, config: SparseConfig) -> list[int]:
    """Return the blocks, ascending, that a token attends to; of equal scores the lower block is chosen first."""
    kept = forced(position, config)
    rest = [b for b in range(position // BLOCK) if b not in kept]
    rest.sort(key=lambda b: (-block_scores[b], b))
    kept.update(rest[: config.topk + config.window_size // BLOCK - len(kept)])
    return sorted(kept)


def check_choice(actual: Any, block_scores: list[float], position: int, config: SparseConfig, slack: float) -> None:
    """Check a choice up to rounding: no chosen block scores below 1 - `slack` times that of a block left out."""
    actual = [int(block) for block in actual]
    assert actual == sorted(set(actual)), actual
    assert len(actual) == config.topk + config.window_size // BLOCK
    assert forced(position, config) <= set(actual) <= set(range(position // BLOCK + 1))
    free = set(actual) - forced(position, config)
    rest = set(range(position // BLOCK + 1)) - set(actual)
    if free and rest:
        assert min(block_scores[b] for b in free) >= max(block_scores[b] for b in rest) * (1 - slack)


def attention(queries: Any, keys: Any, values: Any, blocks: list[int], scale: float) -> Any:
    """Return attention [G, D] of one token's queries [G, D] over the tokens of these blocks."""
    seen = [i for i in range(len(keys)) if i // BLOCK in blocks]
    keys, values = keys[seen].astype(np.float64), values[seen].astype(np.float64)
    out = np.zeros(queries.shape, np.float64)
    for member, query in enumerate(queries.astype(np.float64)):
        logits = np.array([float(query @ key) * scale for key in keys])
        weights = np.exp(logits - logits.max())
        out[member] = (weights[:, None] * values).sum(axis=0) / weights.sum()
    return out
