"""Launches of sparse attention: compressed keys, the choice of blocks, and a prefill chunk over chosen blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig, SparseConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import row_boxes
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.plan import (
    DECODE_ATTENTION,
    SELECTED_ATTENTION,
    DecodeAttentionPlan,
    PrefillAttentionPlan,
    plan_selected_chunk,
    plan_selected_tiles,
)  # fmt: skip
from cpmrt.cuda.ops.kv import codes_of, fp8_constant, scales_of
from cpmrt.cuda.ops.selection_plan import SelectionPlan, plan_selection
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import KVPages, Rows, Selection

_HEADS = ("HEAD_DIM", "GROUP")
COMPRESS_KEYS = KernelSpec("compress_keys", "attention/compress_keys.cu", "qkv", ("HEAD_DIM", "FP8"), hot=True)
COMPRESS_PATH = replace(COMPRESS_KEYS, name="compress_path", op="", reason="an accepted path")
COARSE_LOG_SUMS = KernelSpec(
    "coarse_log_sums", "attention/select_blocks.cu", "select_blocks", (*_HEADS, "TREE"), hot=True
)
SCORE_BLOCKS = replace(COARSE_LOG_SUMS, name="score_blocks")
SCORE_CHUNK = KernelSpec("score_chunk", "attention/score_chunk.cu", "select_blocks", _HEADS, hot=True, arch="sm_90")
PICK_BLOCKS = KernelSpec("pick_blocks", "attention/pick_blocks.cu", "select_blocks", hot=True)
DENSE_ROWS = KernelSpec("dense_rows", "attention/pick_blocks.cu", "prefill_attention")
_PICK_THREADS, _CHUNK_PICK_THREADS = 512, 128
_WINDOW_ROWS = 16
"""Consecutive rows of which one ends a window."""
_PATH_WINDOWS = 5
_MOST_GRID_ROWS = 65535


@dataclass(frozen=True)
class SparsePlans:
    """Of the choice of blocks, and of a chunk's rows over chosen blocks: each row alone (`chunk`), or neighbours
    together (`tiled`; None: never) from `fewest_tiled` rows on, which are two thirds of what the device takes at once.
    """

    selection: SelectionPlan
    chunk: DecodeAttentionPlan
    tiled: PrefillAttentionPlan | None
    fewest_tiled: int

    @classmethod
    def of(cls, config: ModelConfig, device: Device, max_context: int, max_rows: int) -> SparsePlans:
        """max_rows: the most rows of a step."""
        attention = config.attention
        heads = {
            name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim")
        }
        arch, num_selected = device.capability, config.attention.sparse.num_selected if config.attention.sparse else 0
        tiled = plan_selected_tiles(
            **heads, num_selected=num_selected, max_context=max_context, arch=arch, num_sms=device.num_sms
        )  # fmt: skip
        return cls(
            plan_selection(
                config, max_context=max_context, max_rows=max_rows, num_sms=device.num_sms, capability=device.capability
            ),
            plan_selected_chunk(**heads, arch=arch),
            tiled,
            2 * device.num_sms * tiled.rows_per_tile // (3 * tiled.blocks_per_tile) if tiled else 0,
        )

    def tiled_for(self, rows: int) -> PrefillAttentionPlan | None:
        """How neighbours of a chunk of so many rows go together; None: each row goes alone."""
        return self.tiled if rows >= self.fewest_tiled else None


class SparseKernels:
    """`compress_keys.cu`, `select_blocks.cu`, `score_chunk.cu`, `pick_blocks.cu`; for a chunk's rows
    `prefill_selected_wgmma.cu` or `decode_attention.cu`.

    `scratch` holds `block_scores`, `block_log_sums`, `dense_chunk` and `chunk`, and what `CudaOps` needs.
    """

    def __init__(self, config: ModelConfig, launcher: Launcher, scratch: Mapping[str, Any], plans: SparsePlans):
        self._config, self._launch, self._scratch, self._plans = config, launcher, scratch, plans

    def compress(self, kv: KVPages, rows: Rows) -> None:
        """Store the compressed keys of the windows that end at a row's position; the keys are stored already."""
        assert kv.compressed is not None
        keys = kv.scored_keys
        num_rows, head_dim = len(rows.positions), self._config.attention.head_dim
        together = 1 if num_rows <= MAX_ROWS else _WINDOW_ROWS
        grid = (-(-num_rows // together), self._config.attention.num_kv_heads, 2)
        self._launch(
            COMPRESS_KEYS, {"HEAD_DIM": head_dim} | fp8_constant(keys), grid, head_dim // 2,
            kv.compressed.k1, kv.compressed.k2, codes_of(keys), rows.positions, rows.slots, rows.block_tables,
            np.int32(num_rows), np.int32(together), np.int32(rows.block_tables.shape[1]), *scales_of(keys),
        )  # fmt: skip

    def compress_path(self, arrays: Mapping[str, Any]) -> None:
        """After `accept`: the windows that end within its path, in the pages of all layers."""
        num_layers, num_pages, num_heads, _, head_dim = arrays["k_pages"].shape
        tables, keys = arrays["block_tables"], arrays.get("nope_pages", arrays["k_pages"])
        constants, grid = {"HEAD_DIM": head_dim, "FP8": 0}, (num_layers * num_heads, _PATH_WINDOWS)
        self._launch(
            COMPRESS_PATH, constants, grid, head_dim // 2, arrays["k1_pages"], arrays["k2_pages"],
            keys, arrays["draft_tree"], tables, np.int32(num_pages), np.int32(num_heads), np.int32(tables.shape[1]),
        )  # fmt: skip

    def select(self, blocks: Any, q: Any, kv: KVPages, rows: Rows, scale: float, sparse: SparseConfig) -> None:
        """The op `select_blocks`, as many rows at a time as the workspace holds."""
        plan = self._plans.selection
        for first in range(0, len(q), plan.rows_per_pass):
            part = slice(first, first + plan.rows_per_pass)
            if rows.is_prefill and plan.has_chunk_kernel:
                self._score_chunk(q[part], kv, rows, part, scale, sparse)
            else:
                self._score(q[part], kv, rows, part, scale, sparse)
            self._pick(blocks[part], rows, part, sparse)

    def _score_chunk(self, q: Any, kv: KVPages, rows: Rows, part: slice, scale: float, sparse: SparseConfig) -> None:
        assert kv.compressed is not None
        plan, table = self._plans.selection, rows.block_tables
        self._launch(
            SCORE_CHUNK, plan.constants, plan.chunk_grid(len(q)), plan.chunk_threads,
            self._scratch["block_scores"], q, kv.compressed.k1, kv.compressed.k2, rows.positions[part],
            rows.slots[part], table, np.int32(len(q)), np.int32(table.shape[1]), *_forced(sparse),
            np.int32(sparse.dense_context), np.float32(scale), smem=plan.chunk_shared_bytes,
        )  # fmt: skip

    def _score(self, q: Any, kv: KVPages, rows: Rows, part: slice, scale: float, sparse: SparseConfig) -> None:
        assert kv.compressed is not None
        plan, num_rows = self._plans.selection, len(q)
        pooled, log_sums = self._scratch["block_scores"], self._scratch["block_log_sums"]
        places, table = (rows.positions[part], rows.slots[part]), rows.block_tables
        tree = (None, None) if rows.tree_masks is None else (rows.tree_masks[part], rows.tree_base[part])
        constants = plan.constants | {"TREE": int(rows.tree_masks is not None)}
        together, is_chunk = plan.rows_per_block(num_rows), int(rows.is_prefill)
        sizes = tuple(map(np.int32, (num_rows, together, is_chunk, table.shape[1], plan.coarse_tiles)))
        dense, factor = np.int32(sparse.dense_context), np.float32(scale)
        self._launch(
            COARSE_LOG_SUMS, constants, *plan.shape(num_rows, plan.coarse_tiles),
            log_sums, q, kv.compressed.k2, codes_of(kv.scored_keys), *places, table, *tree, *sizes, dense, factor,
        )  # fmt: skip
        self._launch(
            SCORE_BLOCKS, constants, *plan.shape(num_rows, plan.fine_tiles),
            pooled, log_sums, q, kv.compressed.k1, *places, table, tree[1], *sizes, *_forced(sparse), dense, factor,
        )  # fmt: skip

    def _pick(self, blocks: Any, rows: Rows, part: slice, sparse: SparseConfig) -> None:
        num_rows, num_heads, num_selected = blocks.shape
        pages, threads = rows.block_tables.shape[1], _CHUNK_PICK_THREADS if rows.is_prefill else _PICK_THREADS
        self._launch(
            PICK_BLOCKS, {}, (num_rows, num_heads), threads, blocks,
            self._scratch["block_scores"], rows.positions[part], rows.slots[part], np.int32(pages),
            np.int32(num_selected), *_forced(sparse), np.int32(sparse.dense_context), smem=4 * pages,
        )  # fmt: skip

    def dense_rows(self, sparse: SparseConfig) -> Any:
        """The prefill chunk as far as its rows look at everything: slot, start, count."""
        dense_chunk = self._scratch["dense_chunk"]
        context = np.int32(sparse.dense_context)
        self._launch(DENSE_ROWS, {}, 1, 1, dense_chunk, self._scratch["chunk"], context)
        return dense_chunk

    def attend_chunk(
        self, out: Any, q: Any, kv: KVPages, rows: Rows, scale: float, selection: Selection
    ) -> None:
        """Attend from the rows of a chunk that choose blocks."""
        tiled = self._plans.tiled_for(len(q))
        if tiled is None:
            self._attend_rows(out, q, kv, rows, scale, selection)
        else:
            self._attend_tiles(tiled, out, q, kv, rows, scale, selection)

    def _attend_tiles(
        self, plan: PrefillAttentionPlan, out: Any, q: Any, kv: KVPages, rows: Rows, scale: float, selection: Selection
    ) -> None:
        """Attend with neighbouring rows together in a tile."""
        k_pages, v_pages = kv.k, kv.v
        if plan.box_columns and not self._launch.is_recording:
            k_pages, v_pages = (row_boxes(pages, PAGE_SIZE, plan.box_columns) for pages in (k_pages, v_pages))
        self._launch(
            plan.kernel, plan.constants, (plan.blocks_per_tile, plan.tiles(len(q))), plan.threads,
            out, q, k_pages, v_pages, rows.block_tables, self._scratch["chunk"], selection.blocks,
            np.int32(self._config.attention.num_kv_heads), np.int32(rows.block_tables.shape[1]), np.float32(scale),
            np.int32(selection.config.num_selected), np.int32(selection.config.dense_context), smem=plan.shared_bytes,
        )  # fmt: skip

    def _attend_rows(
        self, out: Any, q: Any, kv: KVPages, rows: Rows, scale: float, selection: Selection
    ) -> None:
        """Attend with each row alone."""
        plan = self._plans.chunk
        step = _MOST_GRID_ROWS // plan.units
        for first in range(0, len(q), step):
            part = slice(first, first + step)
            self._launch(
                DECODE_ATTENTION, plan.constants | {"SELECTED": 2}, plan.grid(len(q[part])),
                plan.threads, out[part], None, None, q[part], kv.k, kv.v, rows.positions[part],
                rows.slots[part], rows.block_tables, None, None, np.int32(plan.num_splits),
                np.int32(self._config.attention.num_kv_heads), np.int32(rows.block_tables.shape[1]), np.float32(scale),
                *selected_arguments(Selection(selection.blocks[part], selection.config)), smem=plan.shared_bytes,
            )  # fmt: skip


def selected_arguments(selection: Selection | None, kernel: KernelSpec = DECODE_ATTENTION) -> tuple[Any, ...]:
    """What `selected_attention`, or `decode_attention` if it is compiled with SELECTED, takes last."""
    if selection is None:
        return ()
    sparse = selection.config
    sizes = np.int32(sparse.num_selected), np.int32(sparse.dense_context)
    local = (np.int32(sparse.local_blocks),) if kernel is SELECTED_ATTENTION else ()
    return selection.blocks, *sizes, *local


def _forced(sparse: SparseConfig) -> tuple[np.int32, np.int32]:
    return np.int32(sparse.init_blocks), np.int32(sparse.local_blocks)
