"""Attention of one layer as the config wants it: over all tokens, or over chosen blocks of them (`config.sparse`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.ops import CompressedKeys, Handoff, KVPages, Ops, Rows, Selection


def layer_pages(config: ModelConfig, buffers: Mapping[str, Any], layer: int) -> KVPages:
    """Return the pages of one layer out of the `buffers` that a step uses."""
    compressed = None
    if config.sparse is not None:
        nope = (buffers["q_nope"], buffers["nope_pages"][layer]) if config.sparse.use_nope else ()
        compressed = CompressedKeys(buffers["k1_pages"][layer], buffers["k2_pages"][layer], *nope)
    return KVPages(buffers["k_pages"][layer], buffers["v_pages"][layer], compressed)


def attend(
    ops: Ops, config: ModelConfig, buffers: Mapping[str, Any], kv: KVPages, rows: Rows, after: Handoff, window: int = 0
) -> None:
    """Fill `buffers["attention"]` with the attention of `buffers["q"]` over the layer's pages."""
    q, out, scale, selection = buffers["q"], buffers["attention"], config.head_dim**-0.5, None
    if config.sparse is not None and kv.compressed is not None:
        queries, blocks = kv.compressed.q_nope if config.sparse.use_nope else q, buffers["blocks"]
        ops.select_blocks(blocks, queries, kv, rows, scale, config.sparse)
        selection = Selection(blocks, config.sparse)
    if rows.is_prefill:
        ops.prefill_attention(out, q, kv, rows, scale, window=window, selection=selection)
    else:
        ops.decode_attention(out, q, kv, rows, scale, window=window, selection=selection, after=after)
