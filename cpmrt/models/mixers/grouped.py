"""Grouped-query attention, mostly with rotary positions, over pages of keys and values: all of them, or chosen blocks.

The rotary table is `rope` float32 [2, positions, head_dim / 2]. Pages are `k_pages` and `v_pages`; in fp8 codes and
scales (`ops.Fp8Pages`); with sparse attention (`config.sparse`) compressed keys beside them (`ops.CompressedKeys`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.engine import FP8
from cpmrt.config.layers import GroupedAttention, LayerConfig
from cpmrt.memory.caches import PAGE_SIZE, CacheSpec
from cpmrt.models.layers import ATTENTION, EMBED, HEAD, OUTPUT, QKV, Names, Pass, Table, Weights
from cpmrt.models.rope import rope_pieces
from cpmrt.ops import NOTHING, CompressedKeys, Fp8Pages, Handoff, KVPages, QkvWeights, Selection
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, BufferSpec, TensorSpec

_COMPRESSED = "compressed keys"


@dataclass(frozen=True, slots=True)
class GroupedBuffers:
    """The workspace of a pass: queries q, their attention, queries before RoPE and output gate, each [T, HD]; the
    rotary table; the chosen blocks; the rows `joined`, which an EAGLE-3 draft's first layer reads in place of x."""

    q: Any
    attention: Any
    rope: Any
    q_nope: Any
    blocks: Any
    joined: Any
    gate: Any


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """The weights and the pages of one layer; `gate_up` is the weight that the layer reads next."""

    qkv: QkvWeights
    gate: Any | None
    output: Any
    output_bias: Any | None
    pages: KVPages
    gate_up: Any | None


def tensors(layer: LayerConfig, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm, the fused q, k and v projection with its extras, and the output projection."""
    mixer = _attention(layer)
    hidden, inputs = model.hidden_size, model.hidden_size * (2 if layer.reads_joined else 1)
    rows = {"q": mixer.q_size, "k": mixer.kv_size, "v": mixer.kv_size}
    if layer.has_mixer_norm:
        yield names.weight("attention_norm", "input_layernorm.weight", hidden)
    parts = ((f"self_attn.{part}_proj.weight", (count, inputs)) for part, count in rows.items())
    yield names.fused("qkv", *parts, product="qkv", head_dim=mixer.head_dim)
    if mixer.qkv_bias:
        biases = ((f"self_attn.{part}_proj.bias", (count,)) for part, count in rows.items())
        yield names.fused("qkv_bias", *biases)
    if mixer.qk_norm:
        yield names.weight("q_norm", "self_attn.q_norm.weight", mixer.head_dim)
        yield names.weight("k_norm", "self_attn.k_norm.weight", mixer.head_dim)
    if mixer.output_gate:
        gate = "self_attn.o_gate.weight"
        yield names.weight("output_gate", gate, mixer.q_size, inputs, product="qkv", head_dim=PLAIN_HEAD_DIM)
    yield names.weight("output", "self_attn.o_proj.weight", hidden, mixer.q_size, product="residual")
    if mixer.output_bias:
        yield names.weight("output_bias", "self_attn.o_proj.bias", hidden)


def caches(mixer: GroupedAttention, kv_dtype: str) -> tuple[CacheSpec, ...]:
    """Return the pages of keys and values [K, 64, D], in fp8 with a scale for each head, and the compressed keys.

    Beside fp8 pages the nodes of a draft tree have codes [K, D] and scales [K] of their own until they are accepted.
    """
    shape = (mixer.num_kv_heads, PAGE_SIZE, mixer.head_dim)
    if kv_dtype == FP8:
        kept: dict[str, Any] = {"scope": "chain", "on_accept": "encode"}
        found = [CacheSpec(f"{part}_codes", shape, np.uint8, on_accept="encode") for part in "kv"]
        found += [CacheSpec(f"{part}_scales", shape[:1], np.float32, on_accept="encode") for part in "kv"]
        found += [CacheSpec(f"{part}_nodes", (mixer.num_kv_heads, mixer.head_dim), np.uint8, **kept) for part in "kv"]
        found += [CacheSpec(f"{part}_node_scales", shape[:1], np.float32, **kept) for part in "kv"]
    else:
        found = [CacheSpec(f"{part}_pages", shape) for part in "kv"]
    if mixer.sparse is not None:
        fine, coarse = (mixer.num_kv_heads, 4, mixer.head_dim), (mixer.num_kv_heads, mixer.head_dim)
        found.append(CacheSpec("k1_pages", fine, on_accept="recompute", part=_COMPRESSED))
        found.append(CacheSpec("k2_pages", coarse, on_accept="recompute", part=_COMPRESSED))
        if mixer.sparse.use_nope:
            found.append(CacheSpec("nope_pages", shape, part=_COMPRESSED))
    return tuple(found)


def buffers(mixer: GroupedAttention, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the buffers of queries and attention, of the output gate, and of the choice of blocks."""
    yield BufferSpec("q", (max_rows, mixer.q_size), QKV, ATTENTION)
    yield BufferSpec("attention", (max_rows, mixer.q_size), ATTENTION, OUTPUT)
    if mixer.output_gate:
        yield BufferSpec("gate", (max_rows, mixer.q_size), QKV, OUTPUT)
    if mixer.sparse is not None:
        blocks = (max_rows, mixer.num_kv_heads, mixer.sparse.num_selected)
        yield BufferSpec("blocks", blocks, ATTENTION, ATTENTION, np.int32)
        if mixer.sparse.use_nope:
            yield BufferSpec("q_nope", (max_rows, mixer.q_size), QKV, ATTENTION)


def tables(mixer: GroupedAttention, model: ModelConfig, max_context: int, limit: int) -> Iterator[Table]:
    """Yield the rotary table."""
    if not mixer.rope:
        return
    spec = BufferSpec("rope", (2, max_context, mixer.head_dim // 2), EMBED, HEAD, np.float32)
    yield Table(spec, lambda: rope_pieces(model, mixer.head_dim, max_context, limit))


def kv_pages(caches: Mapping[str, Any]) -> KVPages:
    """Return the pages of one layer, or of all layers together, out of their arrays by the names of caches."""
    if "k_codes" in caches:
        parts = ("codes", "scales", "nodes", "node_scales")
        k, v = (Fp8Pages(*(caches.get(f"{name}_{part}") for part in parts)) for name in "kv")
    else:
        k, v = caches["k_pages"], caches["v_pages"]
    compressed = None
    if "k1_pages" in caches:
        compressed = CompressedKeys(caches["k1_pages"], caches["k2_pages"], caches.get("nope_pages"))
    return KVPages(k, v, compressed)


def bind(layer: LayerConfig, weights: Weights, caches: Mapping[str, Any]) -> BoundAttention:
    """Return weights and pages as `run` takes them."""
    norm = None if layer.reads_joined else weights["attention_norm"]
    qkv = QkvWeights(norm, weights["qkv"], weights["qkv_bias"], weights["q_norm"], weights["k_norm"])
    output, bias = weights["output"], weights["output_bias"]
    return BoundAttention(qkv, weights["output_gate"], output, bias, kv_pages(caches), weights["gate_up"])


def run(step: Pass, layer: LayerConfig, bound: BoundAttention) -> Handoff:
    """x += residual_scale * (attention(qkv(norm(x))) output^T + bias); an output gate scales attention before output^T.
    """
    ops, mixer, pages, scratch = step.ops, _attention(layer), bound.pages, step.buffers.of(GroupedBuffers)
    q, out, rows, scale, selection = scratch.q, scratch.attention, step.rows, mixer.head_dim**-0.5, None
    source, rope = scratch.joined if layer.reads_joined else step.x, scratch.rope if mixer.rope else None
    if mixer.output_gate:
        ops.project(scratch.gate, source, bound.qkv.norm, bound.gate, step.eps, is_prefill=rows.is_prefill)
    sees_all = mixer.sparse is None and mixer.window == 0
    after = ops.qkv(
        q, pages, source, bound.qkv, rope, rows, step.eps, scratch.q_nope, is_attended=sees_all and not rows.is_prefill
    )
    if mixer.sparse is not None and not rows.kind.is_dense:
        queries = scratch.q_nope if mixer.sparse.use_nope else q
        ops.select_blocks(scratch.blocks, queries, pages, rows, scale, mixer.sparse)
        selection = Selection(scratch.blocks, mixer.sparse)
    if rows.is_prefill:
        ops.prefill_attention(out, q, pages, rows, scale, window=mixer.window, selection=selection)
        after = NOTHING
    else:
        after = ops.decode_attention(
            out, q, pages, rows.of_attention(), scale, window=mixer.window, selection=selection, after=after,
            is_projected=not mixer.output_gate,
        )  # fmt: skip
    if mixer.output_gate:
        ops.gate_rows(out, None, scratch.gate, step.eps)
    return ops.project_residual(
        step.x, out, bound.output, bound.output_bias, step.residual_scale, after, ahead=bound.gate_up,
        is_prefill=rows.is_prefill,
    )  # fmt: skip


def store(step: Pass, bound: BoundAttention) -> None:
    """Store the keys and values of the rows x, which are normalised already, without any attention."""
    scratch, weights = step.buffers.of(GroupedBuffers), replace(bound.qkv, norm=None)
    step.ops.qkv(scratch.q, bound.pages, step.x, weights, scratch.rope, step.rows, step.eps)


def _attention(layer: LayerConfig) -> GroupedAttention:
    assert isinstance(layer.mixer, GroupedAttention)
    return layer.mixer
