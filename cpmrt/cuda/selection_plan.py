"""Launch shapes and workspace of the kernels that choose blocks (`select_blocks.cu`, `pick_blocks.cu`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.config import ModelConfig
from cpmrt.memory.kv_pages import pages_for

_HEAD_TILE = 16
_WARPS = 8
_COARSE_KEYS, _FINE_BLOCKS = 64, 8
"""What a warp takes at a time: entries of K2, and blocks' entries of K1."""
_WORKSPACE_BYTES = 32 << 20
_ROW_COUNT = 64
"""Rows that are scored at once whatever the context: all of a decode step."""


@dataclass(frozen=True)
class SelectionPlan:
    """How the choice of blocks is compiled and launched, `rows_per_pass` rows at a time; `pooled` and `log_sums` count
    the float32 elements of its workspace.

    A score's bits depend neither on the grid nor on what other rows there are.
    """

    constants: dict[str, int]
    num_kv_heads: int
    pages: int
    num_chunks: int
    rows_per_pass: int
    num_sms: int
    pooled: int
    log_sums: int

    @property
    def coarse_tiles(self) -> int:
        """Most that a row's coarse keys need."""
        return self.num_chunks

    @property
    def fine_tiles(self) -> int:
        """Most that a row's fine keys need."""
        return ceil(self.pages / _FINE_BLOCKS)

    @staticmethod
    def rows_per_block(rows: int) -> int:
        """Warps of a block that take the same keys for neighbouring rows."""
        return min(_WARPS, 1 << (rows.bit_length() - 1))

    def grid(self, rows: int, tiles: int) -> tuple[int, int, int]:
        """For `rows` rows of at most `tiles` tiles of keys each: two blocks a multiprocessor, if there is work."""
        together = self.rows_per_block(rows)
        groups = ceil(rows / together)
        wanted = 2 * self.num_sms // (groups * self.num_kv_heads)
        return max(1, min(wanted, tiles)), groups, self.num_kv_heads


def plan_selection(config: ModelConfig, *, max_context: int, max_rows: int, num_sms: int) -> SelectionPlan:
    """max_rows: the most rows of a step."""
    group = config.num_heads // config.num_kv_heads
    pages = pages_for(max_context)
    num_chunks = ceil(pages / _COARSE_KEYS)
    pooled = config.num_kv_heads * pages * 2
    log_sums = config.num_kv_heads * num_chunks * ceil(group / _HEAD_TILE) * _HEAD_TILE
    rows = min(max_rows, max(_ROW_COUNT, _WORKSPACE_BYTES // (4 * (pooled + log_sums))))
    return SelectionPlan(
        constants={"HEAD_DIM": config.head_dim, "GROUP": group},
        num_kv_heads=config.num_kv_heads,
        pages=pages,
        num_chunks=num_chunks,
        rows_per_pass=rows,
        num_sms=num_sms,
        pooled=rows * pooled,
        log_sums=rows * log_sums,
    )
