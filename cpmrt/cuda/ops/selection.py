"""The choice of blocks (`select_blocks`): every block's score from the compressed keys, then the best blocks.

A score's bits depend neither on the grid nor on the other rows of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from cpmrt.config import SparseConfig
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention import HeadConstants, Operands
from cpmrt.cuda.ops.kv import codes_of
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import pages_for
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.ops import Fp8Pages, Rows
from cpmrt.tensor_spec import BufferSpec


@dataclass(frozen=True)
class ScoreConstants(HeadConstants):
    """Compile-time constants of select_blocks.cu. `tree`: rows of draft trees; `fp8`: keys of their paths are codes."""

    tree: bool
    fp8: bool | None = None


COARSE_LOG_SUMS = KernelSpec(
    "coarse_log_sums", "attention/select_blocks.cu", "select_blocks", ScoreConstants, hot=True
)  # fmt: skip
SCORE_BLOCKS = replace(COARSE_LOG_SUMS, name="score_blocks")
SCORE_CHUNK = KernelSpec(
    "score_chunk", "attention/score_chunk.cu", "select_blocks", HeadConstants, hot=True, arch="sm_90"
)
PICK_BLOCKS = KernelSpec("pick_blocks", "attention/pick_blocks.cu", "select_blocks", ("THREADS",), hot=True)
_HEAD_TILE = 16
_MOST_WARPS, _RESIDENT_BLOCKS = 4, 3
"""`select_blocks.cu`: the most warps of a block, and how many of its blocks run on a multiprocessor."""
_COARSE_KEYS, _FINE_BLOCKS = 32, 8
"""`select_blocks.cu`: entries of K2 that a warp takes at a time, and blocks of tokens whose entries of K1 it takes."""
_CHUNK_ROWS, _CHUNK_KEYS, _CHUNK_STAGES, _CHUNK_BLOCKS = 16, 64, 8, 16
"""`score_chunk`: rows of a block, compressed keys of a tile, tiles in shared memory, blocks of tokens of a tile."""
_CHUNK_THREADS = (_CHUNK_ROWS + 4) * 32
"""`score_chunk`: a warp for each row, and four that copy keys."""
_PICK_THREADS, _CHUNK_PICK_THREADS = 512, 128
_WORKSPACE_BYTES = 48 << 20


@dataclass(frozen=True)
class SelectionPlan:
    """The plan by which blocks are chosen, `rows_per_pass` rows at a time, among at most `pages` blocks of a sequence.

    `coarse_tiles`: the most tiles of coarse keys (K2) that a row needs; `scores` and `log_sums` are the numbers of
    float32 elements of the workspace. With `has_chunk_kernel` the rows of a prefill chunk are scored by `score_chunk`,
    which needs no log sums; its scores have other bits than those of the rows of other steps.
    """

    heads: HeadConstants
    num_kv_heads: int
    num_sms: int
    pages: int
    coarse_tiles: int
    rows_per_pass: int
    scores: int
    log_sums: int
    has_chunk_kernel: bool

    @classmethod
    def of(cls, shape: GroupedAttention, device: Device, max_context: int, max_rows: int) -> SelectionPlan:
        """Plan for steps of at most `max_rows` rows."""
        group, pages = shape.num_heads // shape.num_kv_heads, pages_for(max_context)
        has_chunk_kernel, coarse_tiles = device.capability == 90 and group == _HEAD_TILE, ceil(pages / _COARSE_KEYS)
        scores = shape.num_kv_heads * pages * 2
        log_sums = shape.num_kv_heads * coarse_tiles * ceil(group / _HEAD_TILE) * _HEAD_TILE
        # Passes of equal length; one pass takes all rows of a decode step, whatever the context.
        limit = max(MAX_ROWS, _WORKSPACE_BYTES // (4 * (scores + (0 if has_chunk_kernel else log_sums))))
        rows = min(max_rows, ceil(ceil(max_rows / ceil(max_rows / limit)) / _CHUNK_ROWS) * _CHUNK_ROWS)
        return cls(
            heads=HeadConstants(shape.head_dim, group),
            num_kv_heads=shape.num_kv_heads,
            num_sms=device.num_sms,
            pages=pages,
            coarse_tiles=coarse_tiles,
            rows_per_pass=rows,
            scores=rows * scores,
            log_sums=min(rows, MAX_ROWS if has_chunk_kernel else rows) * log_sums,
            has_chunk_kernel=has_chunk_kernel,
        )

    @property
    def tables(self) -> tuple[BufferSpec, ...]:
        """The workspace of a pass, which lives as long as the executor."""
        sizes = {"block_scores": self.scores, "block_log_sums": self.log_sums}
        return tuple(BufferSpec(name, (size,), EMBED, HEAD, np.float32) for name, size in sizes.items())

    @property
    def fine_tiles(self) -> int:
        """The most tiles of fine keys (K1) that a row needs."""
        return ceil(self.pages / _FINE_BLOCKS)

    @staticmethod
    def rows_per_block(rows: int) -> int:
        """Return how many neighbouring rows share a block, whose warps take the same keys for different rows."""
        return min(_MOST_WARPS, 1 << (rows.bit_length() - 1))

    def shape(self, rows: int, tiles: int) -> tuple[tuple[int, int, int], int]:
        """Return grid and threads of a block for `rows` rows of at most `tiles` tiles of keys each, a warp for a tile.

        Few tiles are spread over all multiprocessors; many take as many blocks as fit on them at once.
        """
        together = self.rows_per_block(rows)
        groups = ceil(rows / together) * self.num_kv_heads
        per_sm = ceil(tiles * groups * together / self.num_sms)
        warps = min(_MOST_WARPS, max(together, 1 << (per_sm - 1).bit_length()))
        wanted = max(1, _RESIDENT_BLOCKS * self.num_sms // groups)
        return (min(wanted, ceil(tiles * together / warps)), ceil(rows / together), self.num_kv_heads), warps * 32

    def chunk_grid(self, rows: int) -> tuple[int, int, int]:
        """Return the grid of `score_chunk`: a block for each multiprocessor, also for few rows."""
        groups = ceil(rows / _CHUNK_ROWS)
        wanted = max(1, self.num_sms // (groups * self.num_kv_heads))
        return min(wanted, ceil(self.pages / _CHUNK_BLOCKS)), groups, self.num_kv_heads


class BlockChoice:
    """The op `select_blocks`; `arrays` holds the plan's workspace by name."""

    def __init__(self, launcher: Launcher, plan: SelectionPlan, arrays: Mapping[str, DeviceArray]):
        self._launch, self._plan = launcher, plan
        self._scores, self._log_sums = arrays["block_scores"], arrays["block_log_sums"]

    def __call__(self, given: Operands, sparse: SparseConfig) -> None:
        """Store in `out` the blocks that each row chooses, as many rows at a time as the workspace holds."""
        plan = self._plan
        for first in range(0, len(given.q), plan.rows_per_pass):
            part = given.part(slice(first, first + plan.rows_per_pass))
            if given.rows.is_prefill and plan.has_chunk_kernel:
                self._score_chunk(part, sparse)
            else:
                self._score(part, sparse)
            self._pick(part.out, part.rows, sparse)

    def _score_chunk(self, given: Operands, sparse: SparseConfig) -> None:
        plan, rows, keys, num_rows = self._plan, given.rows, given.kv.compressed, len(given.q)
        assert keys is not None
        _, pages, scale = given.sizes
        self._launch(
            SCORE_CHUNK, plan.heads, plan.chunk_grid(num_rows), _CHUNK_THREADS,
            self._scores, given.q, keys.k1, keys.k2, rows.positions, rows.slots, rows.block_tables, np.int32(num_rows),
            pages, *_forced(sparse), np.int32(sparse.dense_context), scale,
            smem=_CHUNK_STAGES * _CHUNK_KEYS * plan.heads.head_dim * 2,
        )  # fmt: skip

    def _score(self, given: Operands, sparse: SparseConfig) -> None:
        plan, rows, keys, num_rows = self._plan, given.rows, given.kv.compressed, len(given.q)
        assert keys is not None
        is_tree, scored = rows.tree_masks is not None, given.kv.scored_keys
        # Only rows of trees read keys besides the compressed ones.
        has_codes = is_tree and isinstance(scored, Fp8Pages)
        constants = ScoreConstants(plan.heads.head_dim, plan.heads.group, tree=is_tree, fp8=has_codes or None)
        codes = (scored.scales, scored.nodes, scored.node_scales) if has_codes else ()
        _, pages, scale = given.sizes
        sizes = num_rows, plan.rows_per_block(num_rows), int(rows.is_prefill), int(pages), plan.coarse_tiles
        counts, dense_context = tuple(map(np.int32, sizes)), np.int32(sparse.dense_context)
        self._launch(
            COARSE_LOG_SUMS, constants, *plan.shape(num_rows, plan.coarse_tiles),
            self._log_sums, given.q, keys.k2, codes_of(scored), rows.positions, rows.slots,
            rows.block_tables, rows.tree_masks, rows.tree_base, *counts, dense_context, scale, *codes,
        )  # fmt: skip
        self._launch(
            SCORE_BLOCKS, constants, *plan.shape(num_rows, plan.fine_tiles),
            self._scores, self._log_sums, given.q, keys.k1, rows.positions, rows.slots, rows.block_tables,
            rows.tree_base, *counts, *_forced(sparse), dense_context, scale,
        )  # fmt: skip

    def _pick(self, blocks: DeviceArray, rows: Rows, sparse: SparseConfig) -> None:
        num_rows, num_kv_heads, num_selected = blocks.shape
        pages_per_sequence = rows.block_tables.shape[1]
        threads = _CHUNK_PICK_THREADS if rows.is_prefill else _PICK_THREADS
        self._launch(
            PICK_BLOCKS, {"THREADS": threads}, (num_rows, num_kv_heads), threads,
            blocks, self._scores, rows.positions, rows.slots, np.int32(pages_per_sequence), np.int32(num_selected),
            *_forced(sparse), np.int32(sparse.dense_context), smem=4 * pages_per_sequence, prefers_shared=True,
        )  # fmt: skip


def _forced(sparse: SparseConfig) -> tuple[np.int32, np.int32]:
    """Return the numbers of blocks that every row looks at: the first of the sequence, and those before its own."""
    return np.int32(sparse.init_blocks), np.int32(sparse.local_blocks)
