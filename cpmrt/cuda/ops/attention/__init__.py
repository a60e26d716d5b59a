"""Attention kernels: a module for each kind of rows, `attention` for the ops; here what all of them have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.ops import KVPages, Rows, Selection

QUERY_TILE = 16
"""Query rows of a tile of the tensor cores (m16n8k16)."""


@dataclass(frozen=True)
class HeadConstants:
    """Elements of a head, and query heads of a KV head."""

    head_dim: int
    group: int


@dataclass(frozen=True)
class Operands:
    """What attention and the choice of blocks take: where their result goes, queries [T, HD], the pages of a layer, the
    rows, and what these chose."""

    out: DeviceArray
    q: DeviceArray
    kv: KVPages
    rows: Rows
    scale: float
    selection: Selection | None = None

    @property
    def sizes(self) -> tuple[np.int32, np.int32, np.float32]:
        """What every attention kernel takes behind its arrays: KV heads, pages of a sequence, factor of the scores."""
        return np.int32(self.kv.k.shape[1]), np.int32(self.rows.block_tables.shape[1]), np.float32(self.scale)

    def part(self, part: slice) -> Operands:
        """Return those of some of the rows."""
        rows, chosen = self.rows, self.selection
        rows = replace(rows, positions=rows.positions[part], slots=rows.slots[part])
        if rows.tree_masks is not None:
            rows = replace(rows, tree_masks=rows.tree_masks[part], tree_base=rows.tree_base[part])
        chosen = chosen and replace(chosen, blocks=chosen.blocks[part])
        return replace(self, out=self.out[part], q=self.q[part], rows=rows, selection=chosen)
