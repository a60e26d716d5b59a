"""Counts the blocks that neighbouring tokens choose together: a kernel that takes several tokens must read them all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpmrt import LLM
from cpmrt.config import SparseConfig
from cpmrt.dtypes import Array
from cpmrt.memory.caches import PAGE_SIZE

NEIGHBOURS = (4, 8, 12, 16)


class ChoiceProbe:
    """Wraps an executor's op `select_blocks`, and keeps the blocks that it chose in some chunks of one prefill.

    The prefill must have chunks of `chunk` tokens from position 0 on; `wanted` are first positions of chunks.
    `choices[first position of the chunk][layer]` is int32 [chunk, K, W].
    """

    def __init__(self, llm: LLM, chunk: int, wanted: Collection[int]):
        executor: Any = llm.executor
        self._stream = getattr(executor, "stream", None)
        ops = executor.ops
        self._select, ops.select_blocks = ops.select_blocks, self._record
        self._chunk, self._num_layers, self._calls = chunk, llm.config.num_layers, 0
        self.choices: dict[int, list[Array]] = {first: [] for first in wanted}

    def _record(self, blocks: Any, *operands: Any) -> None:
        self._select(blocks, *operands)
        first = self._calls // self._num_layers * self._chunk
        self._calls += 1
        if first in self.choices:
            self.choices[first].append(blocks.copy() if self._stream is None else blocks.get(stream=self._stream))


def unions(blocks: Array, together: int) -> NDArray[np.float64]:
    """Returns, per KV head [K], the mean number of different blocks in `together` neighbouring rows of [rows, K, W]."""
    rows, num_heads, _ = blocks.shape
    groups = blocks[: rows // together * together].reshape(-1, together, num_heads, blocks.shape[2])
    chosen = np.zeros((len(groups), num_heads, int(blocks.max()) + 1), bool)
    group, _, head, _ = np.ogrid[: len(groups), :1, :num_heads, :1]
    chosen[group, head, groups] = True
    mean: NDArray[np.float64] = chosen.sum(axis=2).mean(axis=0)
    return mean


def chance(position: int, together: int, config: SparseConfig) -> float:
    """Returns the mean number of blocks that `together` neighbours would choose if their scores were random.

    They are assumed to lie in the block of `position`.
    """
    free = position // PAGE_SIZE - config.local_blocks - config.init_blocks
    forced = config.num_selected - config.num_scored
    return float(forced + free * (1 - (1 - config.num_scored / free) ** together))


def summary(layers: Sequence[Array], last: int, config: SparseConfig) -> dict[str, Any]:
    """Returns the mean unions [layers][K] and `chance`, by number of neighbours, from a chunk's choices in each layer.

    `last` is the position of the chunk's last row.
    """
    return {
        str(together): {
            "unions": [unions(blocks, together).tolist() for blocks in layers],
            "chance": chance(last, together, config),
        }
        for together in NEIGHBOURS
    }
