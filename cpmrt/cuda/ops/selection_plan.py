"""Launch shapes and workspace of `select_blocks.cu`, `score_chunk.cu` and `pick_blocks.cu`, which choose blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cpmrt.config import ModelConfig
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import pages_for

_HEAD_TILE = 16
_MOST_WARPS, _RESIDENT_BLOCKS = 4, 3
"""Of a block of `select_blocks.cu`; blocks of so many on a multiprocessor."""
_COARSE_KEYS, _FINE_BLOCKS = 32, 8
"""What a warp takes at a time: entries of K2, and blocks' entries of K1."""
_CHUNK_ROWS, _CHUNK_KEYS, _CHUNK_STAGES, _CHUNK_BLOCKS = 16, 64, 8, 16
"""Of `score_chunk`: rows of a block, compressed keys of a tile, tiles in shared memory, blocks of tokens of a tile."""
_WORKSPACE_BYTES = 48 << 20


@dataclass(frozen=True)
class SelectionPlan:
    """How the choice of blocks is compiled and launched, `rows_per_pass` rows at a time; `pooled` and `log_sums` count
    the float32 elements of its workspace.

    A score's bits depend neither on the grid nor on what other rows there are. With `has_chunk_kernel` the rows of a
    prefill chunk are scored by `score_chunk`; their bits are others than those of a step of few rows.
    """

    constants: dict[str, int]
    num_kv_heads: int
    pages: int
    coarse_tiles: int
    rows_per_pass: int
    num_sms: int
    pooled: int
    log_sums: int
    has_chunk_kernel: bool

    @property
    def fine_tiles(self) -> int:
        """Most tiles of fine keys that a row needs, as `coarse_tiles` of coarse ones."""
        return ceil(self.pages / _FINE_BLOCKS)

    @staticmethod
    def rows_per_block(rows: int) -> int:
        """Warps of a block that take the same keys for neighbouring rows."""
        return min(_MOST_WARPS, 1 << (rows.bit_length() - 1))

    def shape(self, rows: int, tiles: int) -> tuple[tuple[int, int, int], int]:
        """Grid and threads a block for `rows` rows of at most `tiles` tiles of keys each.

        A tile is one warp's. Few are spread over all multiprocessors; many take all blocks that these hold.
        """
        together = self.rows_per_block(rows)
        groups = ceil(rows / together) * self.num_kv_heads
        per_sm = ceil(tiles * groups * together / self.num_sms)
        warps = min(_MOST_WARPS, max(together, 1 << (per_sm - 1).bit_length()))
        wanted = max(1, _RESIDENT_BLOCKS * self.num_sms // groups)
        return (min(wanted, ceil(tiles * together / warps)), ceil(rows / together), self.num_kv_heads), warps * 32

    def chunk_grid(self, rows: int) -> tuple[int, int, int]:
        """Of `score_chunk`: a block a multiprocessor, also for few rows."""
        groups = ceil(rows / _CHUNK_ROWS)
        wanted = max(1, self.num_sms // (groups * self.num_kv_heads))
        return min(wanted, ceil(self.pages / _CHUNK_BLOCKS)), groups, self.num_kv_heads

    @property
    def chunk_threads(self) -> int:
        """Threads of a block of `score_chunk`: a warp a row, and four that copy keys."""
        return (_CHUNK_ROWS + 4) * 32

    @property
    def chunk_shared_bytes(self) -> int:
        """Dynamic shared memory of `score_chunk`."""
        return _CHUNK_STAGES * _CHUNK_KEYS * self.constants["HEAD_DIM"] * 2


def plan_selection(
    config: ModelConfig, *, max_context: int, max_rows: int, num_sms: int, capability: int
) -> SelectionPlan:
    """max_rows: the most rows of a step; capability: compute capability as 90."""
    group = config.attention.num_heads // config.attention.num_kv_heads
    has_chunk_kernel = capability == 90 and group == _HEAD_TILE
    pages = pages_for(max_context)
    coarse_tiles = ceil(pages / _COARSE_KEYS)
    pooled = config.attention.num_kv_heads * pages * 2
    log_sums = config.attention.num_kv_heads * coarse_tiles * ceil(group / _HEAD_TILE) * _HEAD_TILE
    row_bytes = 4 * (pooled + (0 if has_chunk_kernel else log_sums))
    rows = _rows_per_pass(max_rows, max(MAX_ROWS, _WORKSPACE_BYTES // row_bytes))
    return SelectionPlan(
        constants={"HEAD_DIM": config.attention.head_dim, "GROUP": group},
        num_kv_heads=config.attention.num_kv_heads,
        pages=pages,
        coarse_tiles=coarse_tiles,
        rows_per_pass=rows,
        num_sms=num_sms,
        pooled=rows * pooled,
        log_sums=min(rows, MAX_ROWS if has_chunk_kernel else rows) * log_sums,
        has_chunk_kernel=has_chunk_kernel,
    )


def _rows_per_pass(max_rows: int, limit: int) -> int:
    """Passes of equal length; whatever the context, all rows of a decode step in one."""
    passes = ceil(max_rows / limit)
    return min(max_rows, ceil(ceil(max_rows / passes) / _CHUNK_ROWS) * _CHUNK_ROWS)
