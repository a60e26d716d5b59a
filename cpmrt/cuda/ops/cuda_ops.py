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
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.tensor_map import row_boxes
from cpmrt.cuda.ops import rows as row_ops
from cpmrt.cuda.ops.attention.plan import DecodeAttentionPlan, PrefillAttentionPlan, decode_launch
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.kv import codes_of, expand, fp8_constant, scales_of
from cpmrt.cuda.ops.linear import BLOCK_THREADS, LINEAR, MAX_ROWS, DeviceLimits, plan_linear
from cpmrt.cuda.ops.linear_packed.products import QuantizedProducts
from cpmrt.cuda.ops.rows import BLOCK, VECTOR, RowConstants
from cpmrt.cuda.ops.selection import SparseKernels, SparsePlans, selected_arguments
from cpmrt.memory.kv_pages import PAGE_SIZE
from cpmrt.ops import (
    NOTHING,
    Fp8Pages,
    Handoff,
    KVPages,
    QkvWeights,
    QuantizedWeight,
    Rows,
    Selection,
    check_shapes,
)

ROPE_APPEND = KernelSpec("rope_append", "attention/rope_append.cu", "qkv", ("HEAD_DIM", "FP8"), hot=True)
SILU_MUL = KernelSpec("silu_mul", "rows/activation.cu", "gate_up", ("INTERMEDIATE",), hot=True)
RESIDUAL_ADD = KernelSpec("residual_add", "rows/residual.cu", "project_residual", RowConstants, hot=True)


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
        limits: DeviceLimits,
        decode_plan: DecodeAttentionPlan,
        prefill_plan: PrefillAttentionPlan,
        *,
        portable: bool,
        sparse: SparsePlans | None = None,
    ):
        self._config, self._launch, self._gemm, self._scratch = config, launcher, gemm, scratch
        self._limits, self._decode_plan, self._prefill_plan = limits, decode_plan, prefill_plan
        self.sparse = None if sparse is None else SparseKernels(config, launcher, scratch, sparse)
        self._quantized = QuantizedProducts(config, launcher, gemm, scratch, limits, portable=portable)

    def embed(self, out: Any, token_ids: Any, table: Any, scale: float) -> None:
        row_ops.embed(self._launch, out, token_ids, self._scratch["slots"], table, scale)

    def qkv(self, q: Any, kv: KVPages, x: Any, weights: QkvWeights, rope: Any, rows: Rows, eps: float) -> Handoff:
        compressed = kv.compressed
        nope = (None, None) if compressed is None else (compressed.q_nope, compressed.nope)
        check_shapes(
            "qkv", q=q, k=kv.k, v=kv.v, x=x, norm=weights.norm, weight=weights.weight, bias=weights.bias,
            q_norm=weights.q_norm, k_norm=weights.k_norm, rope=rope, positions=rows.positions, locations=rows.locations,
            slots=rows.slots, block_tables=rows.block_tables, q_nope=nope[0], nope=nope[1],
        )  # fmt: skip
        left, bias = NOTHING, weights.bias
        if not rows.is_prefill and weights.q_norm is None and nope[0] is None and not isinstance(kv.k, Fp8Pages):
            left = self._fused_qkv(q, kv.k, kv.v, x, weights, rope, rows, eps)
        else:
            raw, weight = self._scratch["qkv"][: len(x)], weights.weight
            if rows.is_prefill:
                self._dense("qkv", raw, self._normalised(x, weights.norm, eps), weight)
            else:
                left, bias = self._fused_qkv(raw, None, None, x, weights, rope, rows, eps), None
            head_dim = self._config.head_dim
            grid = -(-len(x) * (weight.shape[0] // head_dim) * (4 if head_dim == 64 else 8) // BLOCK)
            sizes = (np.int32(len(x)), *self._head_counts(), *_table_sizes(rows, rope), np.float32(eps))
            self._launch(
                ROPE_APPEND, {"HEAD_DIM": head_dim} | fp8_constant(kv.k), grid, BLOCK,
                q, codes_of(kv.k), codes_of(kv.v), *nope, raw, bias, weights.q_norm, weights.k_norm, rope,
                rows.positions, rows.locations, rows.slots, rows.block_tables, *sizes, *scales_of(kv.k, kv.v),
            )  # fmt: skip
        if self.sparse is not None and compressed is not None and rows.tree_masks is None:
            self.sparse.compress(kv, rows)
        return left

    def _fused_qkv(
        self, q: Any, k: Any | None, v: Any | None, x: Any, weights: QkvWeights, rope: Any, rows: Rows, eps: float
    ) -> Handoff:
        """With null pages, q takes the projection as it is."""
        norm, weight = weights.norm, weights.weight
        return self._linear(
            "qkv", weight, x, norm, eps, q, k, v, x, norm, weight, weights.bias, rope, rows.positions,
            rows.locations, rows.slots, rows.block_tables, np.int32(len(x)), *self._head_counts(),
            *_table_sizes(rows, rope), np.float32(eps),
        )  # fmt: skip

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
        sizes = np.int32(self._config.num_kv_heads), np.int32(rows.block_tables.shape[1]), np.float32(scale)
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
        sizes = np.int32(self._config.num_kv_heads), np.int32(rows.block_tables.shape[1]), np.float32(scale)
        if plan.box_columns and not self._launch.is_recording:
            k_pages, v_pages = (row_boxes(pages, PAGE_SIZE, plan.box_columns) for pages in (k_pages, v_pages))
        self._launch(
            plan.kernel, constants, (plan.blocks_per_tile, plan.tiles(len(q))), plan.threads,
            out, q, k_pages, v_pages, rows.block_tables, chunk, *sizes, smem=plan.shared_bytes,
        )  # fmt: skip

    def project_residual(
        self, x: Any, inner: Any, weight: Any, bias: Any | None, scale: float, after: Handoff = NOTHING
    ) -> None:
        sizes = check_shapes("project_residual", x=x, inner=inner, weight=weight, bias=bias)
        if not self._is_chunk(x):
            counts = np.int32(len(x)), np.int32(sizes["C"]), np.float32(scale)
            self._linear("residual", weight, inner, None, 0.0, x, inner, weight, bias, *counts, after=after)
        elif bias is None:
            self._dense("residual", x, inner, weight, alpha=scale, beta=1.0)
        else:
            y = self._scratch["normed"][: len(x)]
            self._dense("residual", y, inner, weight)
            grid = -(-x.size // VECTOR // BLOCK)
            count, factor = np.int32(len(x)), np.float32(scale)
            self._launch(RESIDUAL_ADD, RowConstants(x.shape[1]), grid, BLOCK, x, y, bias, count, factor)

    def gate_up(self, out: Any, x: Any, norm: Any, weight: Any, eps: float) -> Handoff:
        check_shapes("gate_up", out=out, x=x, norm=norm, weight=weight)
        num_rows = np.int32(len(x))
        if not self._is_chunk(x):
            width = np.int32(self._config.intermediate_size)
            return self._linear("gate_up", weight, x, norm, eps, out, x, norm, weight, num_rows, width, np.float32(eps))
        both = self._scratch["gate_up"][: len(x)]
        self._dense("gate_up", both, self._normalised(x, norm, eps), weight)
        constants = {"INTERMEDIATE": self._config.intermediate_size}
        self._launch(
            SILU_MUL, constants, -(-out.size // VECTOR // BLOCK), BLOCK, out, both, num_rows
        )
        return NOTHING

    def lm_head(self, logits: Any, x: Any, norm: Any | None, weight: Any, eps: float, divisor: float) -> None:
        check_shapes("lm_head", logits=logits, x=x, norm=norm, weight=weight)
        counts, factors = (np.int32(len(x)), np.int32(weight.shape[0])), (np.float32(eps), np.float32(divisor))
        self._linear("head", weight, x, norm, eps, logits, x, norm, weight, *counts, *factors)

    def rms_norm(self, out: Any, x: Any, norm: Any, eps: float) -> None:
        row_ops.rms_norm(self._launch, out, x, norm, eps)

    def join(self, joined: Any, a: Any, a_norm: Any | None, b: Any, b_norm: Any | None, eps: float) -> None:
        row_ops.join(self._launch, joined, a, a_norm, b, b_norm, eps)

    def copy_columns(self, out: Any, x: Any, first: int) -> None:
        row_ops.copy_columns(self._launch, out, x, first)

    def clear(self, out: Any) -> None:
        row_ops.clear(self._launch, out)

    def _linear(
        self, product: str, weight: Any, source: Any, norm: Any | None, eps: float, *args: Any, after: Handoff = NOTHING
    ) -> Handoff:
        """The kernel of a step's product takes `args`; `source` of them are its rows, normalised with `norm`."""
        if isinstance(weight, QuantizedWeight):
            return self._quantized.skinny(product, weight, source, norm, eps, args, after)
        out_features, in_features = weight.shape
        has_norm = norm is not None
        plan = plan_linear(product, out_features, in_features, len(source), self._limits, has_norm=has_norm)
        constants = plan.constants | ({"HEAD_DIM": self._config.head_dim} if product == "qkv" else {})
        self._launch(
            LINEAR[product], constants, plan.grid, BLOCK_THREADS, *args, smem=plan.shared_bytes
        )
        return NOTHING

    def _dense(self, product: str, y: Any, x: Any, weight: Any, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """y = alpha x weight^T + beta y for the rows of a chunk."""
        if isinstance(weight, QuantizedWeight):
            self._quantized.chunk(product, y, x, weight, alpha=alpha, beta=beta)
        else:
            self._gemm(y, x, weight, alpha=alpha, beta=beta)

    def _normalised(self, x: Any, norm: Any | None, eps: float) -> Any:
        """The rows of a chunk as they enter a product."""
        if norm is None:
            return x
        normed = self._scratch["normed"][: len(x)]
        self.rms_norm(normed, x, norm, eps)
        return normed

    def _is_chunk(self, x: Any) -> bool:
        return len(x) > MAX_ROWS

    def _head_counts(self) -> tuple[np.int32, np.int32]:
        return np.int32(self._config.num_heads), np.int32(self._config.num_kv_heads)


def _table_sizes(rows: Rows, rope: Any) -> tuple[np.int32, np.int32]:
    """Pages of a slot, positions of the rotary table."""
    return np.int32(rows.block_tables.shape[1]), np.int32(rope.shape[1])
