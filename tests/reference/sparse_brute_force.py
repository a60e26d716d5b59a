"""Block-sparse attention once more, by its formulas, one token and one KV head at a time, in float64.

Nothing here knows pages, entries or rows: `keys` [n, D] are the tokens up to and with the one that looks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpmrt.config import SparseConfig

BLOCK = 64


def windows(keys: Any, size: int, stride: int) -> list[Any]:
    """Means of the complete windows."""
    found = []
    while stride * len(found) + size <= len(keys):
        first = stride * len(found)
        found.append(sum(keys[first + i].astype(np.float64) for i in range(size)) / size)
    return found


def scores(queries: Any, k1: list[Any], k2: list[Any], scale: float, num_blocks: int) -> list[float]:
    """queries [G, D] of one token and KV head, compressed keys it may see -> score of each block before its own."""
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
    """The blocks, ascending, of a token that leaves some out; equal scores: the lower block first."""
    kept = forced(position, config)
    rest = [b for b in range(position // BLOCK) if b not in kept]
    rest.sort(key=lambda b: (-block_scores[b], b))
    kept.update(rest[: config.topk + config.window_size // BLOCK - len(kept)])
    return sorted(kept)


def check_choice(actual: Any, block_scores: list[float], position: int, config: SparseConfig, slack: float) -> None:
    """A right choice up to rounding: nothing chosen scores less than something left out by more than `slack` of it."""
    actual = [int(block) for block in actual]
    assert actual == sorted(set(actual)), actual
    assert len(actual) == config.topk + config.window_size // BLOCK
    assert forced(position, config) <= set(actual) <= set(range(position // BLOCK + 1))
    free = set(actual) - forced(position, config)
    rest = set(range(position // BLOCK + 1)) - set(actual)
    if free and rest:
        assert min(block_scores[b] for b in free) >= max(block_scores[b] for b in rest) * (1 - slack)


def attention(queries: Any, keys: Any, values: Any, blocks: list[int], scale: float) -> Any:
    """queries [G, D] of one token over the tokens of these blocks: [G, D]."""
    seen = [i for i in range(len(keys)) if i // BLOCK in blocks]
    keys, values = keys[seen].astype(np.float64), values[seen].astype(np.float64)
    out = np.zeros(queries.shape, np.float64)
    for member, query in enumerate(queries.astype(np.float64)):
        logits = np.array([float(query @ key) * scale for key in keys])
        weights = np.exp(logits - logits.max())
        out[member] = (weights[:, None] * values).sum(axis=0) / weights.sum()
    return out
