"""Measures the exact share of dense attention that lies inside the blocks that would be chosen, layer by layer.

The hidden states are those of dense attention, so that each layer is judged by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmrt import LLM
from cpmrt.config import SparseConfig
from cpmrt.dtypes import F32, Array, DType
from cpmrt.log_probabilities import log_softmax
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.ops import KVPages, Rows, Selection
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.reference.kv_rows import gather_row
from cpmrt.reference.ops import NumpyOps
from cpmrt.reference.sparse_attention import block_scores, choose_blocks, compressed_of_row


@dataclass(frozen=True)
class Shares:
    """The attention shares of a row in a layer, [K, G] for each KV head and its query heads.

    `chosen` is the share inside the chosen blocks, `best` that inside the best blocks that could have been chosen.
    """

    chosen: F32
    best: F32


class MassProbe(NumpyOps):
    """NumPy ops with dense attention throughout, which record the attention that a choice of blocks would cover.

    They record it in `shares[index of the config][layer]`, at those of the `positions` that leave blocks out under that
    config.
    """

    def __init__(self, dtype: DType, configs: Sequence[SparseConfig], num_layers: int, positions: Collection[int]):
        super().__init__(dtype)
        self.configs, self.num_layers, self.positions = configs, num_layers, positions
        self.shares: dict[int, dict[int, list[Shares]]] = defaultdict(lambda: defaultdict(list))
        self._calls = 0

    @classmethod
    def attached(cls, llm: LLM, configs: Sequence[SparseConfig], positions: Collection[int]) -> MassProbe:
        """Returns a probe that replaces the ops of a NumPy executor, whose model must be sparse for every token."""
        executor = llm.executor
        assert isinstance(executor, ReferenceExecutor)
        probe = cls(executor.ops.dtype, configs, llm.config.num_layers, positions)
        executor.ops = probe
        return probe

    def select_blocks(
        self, blocks: Array, q: F32, kv: KVPages, rows: Rows, scale: float, config: SparseConfig
    ) -> None:
        """Records the shares. The model's own `blocks` and `config` are not used."""
        layer = self._calls % self.num_layers
        self._calls += 1
        for row, position in enumerate(rows.positions.tolist()):
            if position not in self.positions:
                continue
            counted = [index for index, each in enumerate(self.configs) if each.leaves_out(position + 1)]
            if not counted:
                continue
            k1, k2 = compressed_of_row(kv, rows, row, self.dtype)
            groups = q[row].reshape(k1.shape[0], -1, k1.shape[2])
            scores = block_scores(groups, k1, k2, scale)
            mass = block_mass(groups, gather_row(kv.scored_keys, rows, row, 0), scale)
            for index in counted:
                self.shares[index][layer].append(shares(mass, scores, position, self.configs[index]))

    def prefill_attention(self, *operands: Any, selection: Selection | None = None, **others: Any) -> None:
        """Computes dense attention, whatever blocks were selected."""
        super().prefill_attention(*operands, **others)


def block_mass(groups: F32, keys: F32, scale: float) -> F32:
    """Returns the share of attention in each block, [K, G, blocks], for a row's q [K, G, D] and keys [K, tokens, D]."""
    num_blocks = pages_for(keys.shape[1])
    weights = np.exp(log_softmax(groups @ keys.transpose(0, 2, 1) * np.float32(scale)))
    padded = np.pad(weights, ((0, 0), (0, 0), (0, num_blocks * PAGE_SIZE - keys.shape[1])))
    mass: F32 = padded.reshape(*weights.shape[:2], num_blocks, PAGE_SIZE).sum(axis=-1)
    return mass


def shares(mass: F32, scores: F32, position: int, config: SparseConfig) -> Shares:
    """Returns the shares of a row that leaves blocks out, from `block_mass` and `block_scores`.

    The best blocks are those with the most attention summed over the heads of a group, beside the forced blocks.
    """
    own = position // PAGE_SIZE
    ideal = mass.sum(axis=1)[:, :own]
    chosen, best = (
        np.take_along_axis(mass, choose_blocks(ranking, position, config)[:, None], axis=2).sum(axis=2)
        for ranking in (scores, ideal)
    )
    return Shares(chosen, best)


def summary(layers: Mapping[int, Sequence[Shares]]) -> dict[str, float]:
    """Returns the mean over rows, layers and heads, the tenth percentile, and the mean of the worst layer.

    Rows that leave no blocks out do not count.
    """
    if not layers:
        return {}
    figures: dict[str, float] = {"rows": len(layers[0])}
    for prefix, name in (("", "chosen"), ("best_", "best")):
        by_layer = [np.stack([getattr(row, name) for row in layers[layer]]) for layer in sorted(layers)]
        figures[f"{prefix}mean"] = float(np.mean(by_layer))
        figures[f"{prefix}tenth"] = float(np.quantile(by_layer, 0.1))
        figures[f"{prefix}layer"] = float(min(values.mean() for values in by_layer))
    return figures
