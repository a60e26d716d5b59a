"""Attention kernels: a module for each kind of rows, and `attention` for the ops. Here are the parts that all use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.ops import KVPages, Rows, Selection

QUERY_TILE = 16
"""Query rows of an MMA tile (m16n8k16)."""


@dataclass(frozen=True)
class HeadConstants:
    """Compile-time constants that attention kernels share: elements of a head, and query heads of a KV head."""

    head_dim: int
    group: int


@dataclass(frozen=True)
class Operands:
    """The operands of attention and of the choice of blocks: output, queries [T, HD], pages of a layer, rows, factor of
    the scores, and the blocks that the rows chose."""

    out: DeviceArray
    q: DeviceArray
    kv: KVPages
    rows: Rows
    scale: float
    selection: Selection | None = None

    @property
    def sizes(self) -> tuple[np.int32, np.int32, np.float32]:
        """Scalars that attention kernels take after their arrays: KV heads, pages of a sequence, score factor."""
        return np.int32(self.kv.k.shape[1]), np.int32(self.rows.block_tables.shape[1]), np.float32(self.scale)

    def part(self, part: slice) -> Operands:
        """Return the operands of a slice of the rows."""
        rows, chosen = self.rows, self.selection
        rows = replace(rows, positions=rows.positions[part], slots=rows.slots[part])
        if rows.tree_masks is not None:
            rows = replace(rows, tree_masks=rows.tree_masks[part], tree_base=rows.tree_base[part])
        chosen = chosen and replace(chosen, blocks=chosen.blocks[part])
        return replace(self, out=self.out[part], q=self.q[part], rows=rows, selection=chosen)
