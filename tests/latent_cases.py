"""Latent attention: operands of its ops for any executor, and the ops once more in float64, by their formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from reference import brute_force
from reference.operands import Data, make_rows, rope_of

from cpmrt.dtypes import DType, round_to
from cpmrt.ops import LatentWeights, Rows

PAGE, EPS = 64, 1e-6


@dataclass(frozen=True)
class Sizes:
    """Heads, ranks of the query and KV latents, elements of a query head before its rotated part, in it, of a value."""

    heads: int = 3
    q_rank: int = 56
    kv_rank: int = 40
    nope: int = 24
    rotated: int = 10
    value: int = 18

    @property
    def scale(self) -> float:
        return (self.nope + self.rotated) ** -0.5


MINICPM3 = Sizes(40, 768, 256, 64, 32, 64)


class LatentCase:
    """Weights, rotary table and pages of slots of these lengths, with values that `dtype` can hold.

    Pages are NaN where there is no token.
    """

    def __init__(self, sizes: Sizes, lengths: list[int], dtype: DType = DType.FLOAT32, seed: int = 0):
        self.sizes, self.data = sizes, Data(dtype, seed)
        data, pages = self.data, max(lengths) // PAGE + 2
        self.tables = data.tables(len(lengths), pages)
        self.rope = round_to(rope_of(pages * PAGE, sizes.rotated), dtype)
        up = data(sizes.heads, sizes.nope + sizes.value, sizes.kv_rank, scale=sizes.kv_rank**-0.5)
        self.weights = LatentWeights(data.norm(sizes.q_rank), data.norm(sizes.kv_rank), up)
        cached = sizes.kv_rank + sizes.rotated
        self.pages = np.full((self.tables.size, 1, PAGE, cached), np.nan, np.float32)
        for slot, length in enumerate(lengths):
            for position in range(length):
                self.pages[self.tables[slot, position // PAGE], 0, position % PAGE] = data(cached)

    def queries(self, count: int) -> Any:
        """Return random queries [count, heads * (nope + rotated)]."""
        return self.data(count, self.sizes.heads * (self.sizes.nope + self.sizes.rotated))

    def attention(self, q: Any, rows: Rows, seen: list[list[int]] | None = None) -> Any:
        """Return what the attention ops must give; `seen` has each row's locations, None: all to its position."""
        sizes, out = self.sizes, []
        heads = q.astype(np.float64).reshape(len(q), sizes.heads, -1)
        up = self.weights.up.astype(np.float64)
        for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            places = range(position + 1) if seen is None else seen[row]
            tokens = np.stack([brute_force.token(self.pages, self.tables[slot], place)[0] for place in places])
            latent, shared = tokens[:, : sizes.kv_rank], tokens[:, sizes.kv_rank :]
            for head in range(sizes.heads):
                keys = np.concatenate([latent @ up[head, : sizes.nope].T, shared], axis=1)
                turned = brute_force.rotate(heads[row, head, sizes.nope :], *self.rope[:, position])
                scores = keys @ np.concatenate([heads[row, head, : sizes.nope], turned]) * sizes.scale
                weights = np.exp(scores - scores.max())
                out.append(weights / weights.sum() @ (latent @ up[head, sizes.nope :].T))
        return np.array(out).reshape(len(q), -1)

    def appended(self, latents: Any, positions: Any) -> tuple[Any, Any]:
        """Return what `append_latent` must give for rows: the query latents, and the entries that go into the pages."""
        ends = self.sizes.q_rank, self.sizes.q_rank + self.sizes.kv_rank
        kept = brute_force.rms_norm(latents[:, ends[0] : ends[1]], self.weights.kv_norm, EPS)
        turned = [
            brute_force.rotate(row, *self.rope[:, position])
            for row, position in zip(latents[:, ends[1] :], positions, strict=True)
        ]
        return brute_force.rms_norm(latents[:, : ends[0]], self.weights.q_norm, EPS), np.hstack([kept, turned])


def tree_of(case: LatentCase, masks: list[int], base: int, slot: int) -> tuple[Rows, list[list[int]]]:
    """Return the rows of a tree with these masks behind `base` tokens, and each row's visible locations in order."""
    paths = [[*range(base), *(base + bit for bit in range(64) if mask >> bit & 1)] for mask in masks]
    rows = make_rows([len(path) - 1 for path in paths], [slot] * len(masks), case.tables)
    return replace(rows, tree_masks=np.array(masks, np.uint64), tree_base=np.full(len(masks), base)), paths
