"""Attention of one layer as the config wants it: over all tokens, or over chosen blocks of them (`config.sparse`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.ops import CompressedKeys, Ops, Rows, Selection


def compressed_keys(config: ModelConfig, buffers: Mapping[str, Any], layer: int) -> CompressedKeys | None:
    """Of one layer, out of the `buffers` that a step uses; None where tokens look at everything."""
    if config.sparse is None:
        return None
    nope = (buffers["q_nope"], buffers["nope_pages"][layer]) if config.sparse.use_nope else ()
    return CompressedKeys(buffers["k1_pages"][layer], buffers["k2_pages"][layer], *nope)


def attend(
    ops: Ops, config: ModelConfig, buffers: Mapping[str, Any], layer: int, compressed: CompressedKeys | None, rows: Rows
) -> None:
    """`buffers["attention"]` = the attention of `buffers["q"]` over the layer's pages."""
    q, out, scale = buffers["q"], buffers["attention"], config.head_dim**-0.5
    k_pages, v_pages = buffers["k_pages"][layer], buffers["v_pages"][layer]
    attention = ops.prefill_attention if rows.is_prefill else ops.decode_attention
    if config.sparse is None or compressed is None:
        attention(out, q, k_pages, v_pages, rows, scale)
        return
    queries, keys = (compressed.q_nope, compressed.nope_pages) if config.sparse.use_nope else (q, k_pages)
    blocks = buffers["blocks"]
    ops.select_blocks(blocks, queries, compressed.k1_pages, compressed.k2_pages, keys, rows, scale, config.sparse)
    attention(out, q, k_pages, v_pages, rows, scale, selection=Selection(blocks, config.sparse))
