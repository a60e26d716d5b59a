"""The op contract on a GPU: each op is one launch, or one fixed sequence of launches, on one stream.

Steps of at most 64 rows take the fused kernels that stream the weights once; a prefill chunk goes through dense
products with small kernels between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig, SparseConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import row_boxes
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops import rows as row_ops
from cpmrt.cuda.ops.attention.plan import DecodeAttentionPlan, PrefillAttentionPlan, decode_launch
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.kv import codes_of, expand, scales_of
from cpmrt.cuda.ops.products import Products
from cpmrt.cuda.ops.selection import SparseKernels, SparsePlans, selected_arguments
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import (
    NOTHING,
    Fp8Pages,
    Handoff,
    KVPages,
    QkvWeights,
    Rows,
    Selection,
    check_shapes,
)


class CudaOps:
    """`ops.protocol.Ops` on CuPy arrays of storage words.

    `scratch` holds the buffers of `workspace.py` by name; it is looked into at each call. A draft has an instance of
    its own with its config, plans and scratch: `normed`, `qkv`, `gate_up` and those of attention and 4-bit products in
    its sizes; `slots` and `chunk` are those of the rows that it works on.
    """

    def __init__(
        self,
        config: ModelConfig,
        launcher: Launcher,
        gemm: Gemm,
        scratch: Mapping[str, Any],
        device: Device,
        decode_plan: DecodeAttentionPlan,
        prefill_plan: PrefillAttentionPlan,
        sparse: SparsePlans | None = None,
    ):
        self._config, self._launch, self._scratch = config, launcher, scratch
        self._decode_plan, self._prefill_plan = decode_plan, prefill_plan
        self.sparse = None if sparse is None else SparseKernels(config, launcher, scratch, sparse)
        self._products = products = Products(device, launcher, gemm, scratch)
        self.project_residual, self.gate_up = products.project_residual, products.gate_up
        self.lm_head = products.lm_head

    def embed(self, out: Any, token_ids: Any, table: Any, scale: float) -> None:
        row_ops.embed(self._launch, out, token_ids, self._scratch["slots"], table, scale)

    def qkv(
        self, q: Any, kv: KVPages, x: Any, weights: QkvWeights, rope: Any, rows: Rows, eps: float, q_nope: Any = None
    ) -> Handoff:
        left = self._products.qkv(q, kv, x, weights, rope, rows, eps, q_nope)
        if self.sparse is not None and kv.compressed is not None and rows.tree_masks is None:
            self.sparse.compress(kv, rows)
        return left

    def select_blocks(self, blocks: Any, q: Any, kv: KVPages, rows: Rows, scale: float, config: SparseConfig) -> None:
        assert self.sparse is not None and kv.compressed is not None, "planned without sparse attention"
        check_shapes(
            "select_blocks", blocks=blocks, q=q, k1=kv.compressed.k1, k2=kv.compressed.k2, k=kv.scored_keys,
            positions=rows.positions, slots=rows.slots, block_tables=rows.block_tables, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base,
        )  # fmt: skip
        self.sparse.select(blocks, q, kv, rows, scale, config)

    def decode_attention(
        self,
        out: Any,
        q: Any,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
        after: Handoff = NOTHING,
    ) -> None:
        check_shapes(
            "decode_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions, tree_masks=rows.tree_masks,
            tree_base=rows.tree_base, blocks=selection and selection.blocks,
        )  # fmt: skip
        is_tree, selected = rows.tree_masks is not None, int(selection is not None)
        one = decode_launch(self._decode_plan, len(q), is_tree=is_tree, window=window, selected=selected)
        sizes = np.int32(self._config.attention.num_kv_heads), np.int32(rows.block_tables.shape[1]), np.float32(scale)
        self._launch(
            one.kernel, one.constants, one.grid, one.threads,
            out, self._scratch["attention_partials"], self._scratch["attention_arrivals"], q, codes_of(kv.k),
            codes_of(kv.v), rows.positions, rows.slots, rows.block_tables, rows.tree_masks, rows.tree_base,
            *map(np.int32, one.sizes), *sizes, *selected_arguments(selection, one.kernel),
            *scales_of(kv.k, kv.v), smem=one.shared_bytes, prefers_shared=after.prefers_shared,
        )  # fmt: skip

    def prefill_attention(
        self,
        out: Any,
        q: Any,
        kv: KVPages,
        rows: Rows,
        scale: float,
        window: int = 0,
        selection: Selection | None = None,
    ) -> None:
        check_shapes(
            "prefill_attention", out=out, q=q, k=kv.k, v=kv.v, positions=rows.positions,
            blocks=selection and selection.blocks,
        )  # fmt: skip
        k_pages, v_pages = kv.k, kv.v
        if isinstance(k_pages, Fp8Pages):
            k_pages, v_pages, rows = expand(self._launch, self._scratch, k_pages, v_pages, rows)
        if selection is None:
            self._dense_chunk(out, q, k_pages, v_pages, rows, scale, window, self._scratch["chunk"])
            return
        assert self.sparse is not None, "planned without sparse attention"
        self._dense_chunk(out, q, k_pages, v_pages, rows, scale, 0, self.sparse.dense_rows(selection.config))
        self.sparse.attend_chunk(out, q, KVPages(k_pages, v_pages), rows, scale, selection)

    def _dense_chunk(
        self, out: Any, q: Any, k_pages: Any, v_pages: Any, rows: Rows, scale: float, window: int, chunk: Any
    ) -> None:
        """Rows of `chunk` (slot, start, count) over all that they see."""
        plan, constants = self._prefill_plan, self._prefill_plan.constants | {"WINDOW": window}
        sizes = np.int32(self._config.attention.num_kv_heads), np.int32(rows.block_tables.shape[1]), np.float32(scale)
        if plan.box_columns and not self._launch.is_recording:
            k_pages, v_pages = (row_boxes(pages, PAGE_SIZE, plan.box_columns) for pages in (k_pages, v_pages))
        self._launch(
            plan.kernel, constants, (plan.blocks_per_tile, plan.tiles(len(q))), plan.threads,
            out, q, k_pages, v_pages, rows.block_tables, chunk, *sizes, smem=plan.shared_bytes,
        )  # fmt: skip

    def rms_norm(self, out: Any, x: Any, norm: Any, eps: float) -> None:
        row_ops.rms_norm(self._launch, out, x, norm, eps)

    def join(self, joined: Any, a: Any, a_norm: Any | None, b: Any, b_norm: Any | None, eps: float) -> None:
        row_ops.join(self._launch, joined, a, a_norm, b, b_norm, eps)

    def copy_columns(self, out: Any, x: Any, first: int) -> None:
        row_ops.copy_columns(self._launch, out, x, first)

    def clear(self, out: Any) -> None:
        row_ops.clear(self._launch, out)
