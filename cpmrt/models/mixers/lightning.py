"""Lightning attention: a state per slot that decays and takes up every token, and no pages.

The states are `lightning_states` float32 [H, D, D]; with a draft the rows of a chain that is verified keep their keys
and values in `lightning_chain` [2HD]. Tables: `lightning_rope` as `rope` of grouped attention, and `lightning_decay`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import LIGHTNING_BLOCK, LayerConfig, LightningAttention
from cpmrt.dtypes import Array
from cpmrt.memory.caches import CacheSpec
from cpmrt.models.layers import ATTENTION, EMBED, HEAD, OUTPUT, QKV, Names, Pass, Table, Weights
from cpmrt.models.rope import rope_pieces
from cpmrt.ops import Handoff, LightningHeads, LightningState, Ops
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, BufferSpec, TensorSpec

_PART = "states"


@dataclass(frozen=True, slots=True)
class LightningBuffers:
    """The workspace of a pass: the q, k and v projection [T, 3HD], the output gate and the output of attention [T, HD];
    the tables."""

    lightning_qkv: Any
    lightning_gate: Any
    lightning_out: Any
    lightning_rope: Any
    lightning_decay: Any


@dataclass(frozen=True, slots=True)
class BoundLightning:
    """The weights and the state of one layer; a norm or a gate that it does not have is None."""

    norm: Any
    qkv: Any
    q_norm: Any | None
    k_norm: Any | None
    output_norm: Any | None
    gate: Any | None
    output: Any
    state: LightningState

    def heads(self, scratch: LightningBuffers) -> LightningHeads:
        """Return the norms and tables with which the heads are made."""
        return LightningHeads(self.q_norm, self.k_norm, scratch.lightning_rope, scratch.lightning_decay)


def tensors(layer: LayerConfig, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm, the fused q, k and v projection, the norms of heads and output, the gate, the output projection.
    """
    mixer, hidden = _lightning(layer), model.hidden_size
    yield names.weight("attention_norm", "input_layernorm.weight", hidden)
    parts = ((f"self_attn.{part}_proj.weight", (mixer.width, hidden)) for part in "qkv")
    yield names.fused("qkv", *parts, product="qkv", head_dim=PLAIN_HEAD_DIM)
    if mixer.qk_norm:
        yield names.weight("q_norm", "self_attn.q_norm.weight", mixer.head_dim)
        yield names.weight("k_norm", "self_attn.k_norm.weight", mixer.head_dim)
    if mixer.output_norm:
        yield names.weight("output_norm", "self_attn.o_norm.weight", mixer.width)
    if mixer.output_gate:
        gate = "self_attn.z_proj.weight"
        yield names.weight("output_gate", gate, mixer.width, hidden, product="qkv", head_dim=PLAIN_HEAD_DIM)
    yield names.weight("output", "self_attn.o_proj.weight", hidden, mixer.width, product="residual")


def caches(mixer: LightningAttention, kv_dtype: str) -> tuple[CacheSpec, ...]:
    """Return the state, in float32 whatever `kv_dtype` says, and the keys and values of the rows of a draft chain."""
    shape = (mixer.num_heads, mixer.head_dim, mixer.head_dim)
    states = CacheSpec("lightning_states", shape, np.float32, scope="slot", on_accept="restore", part=_PART)
    chain = CacheSpec("lightning_chain", (2 * mixer.width,), scope="chain", on_accept="restore", part=_PART)
    return states, chain


def buffers(mixer: LightningAttention, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the buffers of the projection, of the gate, and of the output of attention."""
    yield BufferSpec("lightning_qkv", (max_rows, 3 * mixer.width), QKV, ATTENTION)
    yield BufferSpec("lightning_out", (max_rows, mixer.width), ATTENTION, OUTPUT)
    if mixer.output_gate:
        yield BufferSpec("lightning_gate", (max_rows, mixer.width), QKV, OUTPUT)


def tables(mixer: LightningAttention, model: ModelConfig, max_context: int, limit: int) -> Iterator[Table]:
    """Yield the rotary table, and the decay of each head over 0 to LIGHTNING_BLOCK tokens."""
    if mixer.rope:
        spec = BufferSpec("lightning_rope", (2, max_context, mixer.head_dim // 2), EMBED, HEAD, np.float32)
        yield Table(spec, lambda: rope_pieces(model, mixer.head_dim, max_context, limit))

    def decay() -> Iterator[Array]:
        yield np.exp(-np.outer(mixer.slopes, np.arange(LIGHTNING_BLOCK + 1))).astype(np.float32)

    yield Table(
        BufferSpec("lightning_decay", (mixer.num_heads, LIGHTNING_BLOCK + 1), EMBED, HEAD, np.float32), decay
    )


def bind(layer: LayerConfig, weights: Weights, caches: Mapping[str, Any]) -> BoundLightning:
    """Return weights and state as `run` takes them."""
    return BoundLightning(
        norm=weights["attention_norm"],
        qkv=weights["qkv"],
        q_norm=weights["q_norm"],
        k_norm=weights["k_norm"],
        output_norm=weights["output_norm"],
        gate=weights["output_gate"],
        output=weights["output"],
        state=LightningState(caches["lightning_states"], caches.get("lightning_chain")),
    )


def run(step: Pass, layer: LayerConfig, bound: BoundLightning) -> Handoff:
    """x += residual_scale * (norm(attention(qkv(norm(x)))) * sigmoid(gate(norm(x)))) output^T."""
    ops, rows, mixer, scratch = step.ops, step.rows, _lightning(layer), step.buffers.of(LightningBuffers)
    qkv, gate, out, is_prefill = scratch.lightning_qkv, scratch.lightning_gate, scratch.lightning_out, rows.is_prefill
    if mixer.output_gate:
        ops.project(gate, step.x, bound.norm, bound.gate, step.eps, is_prefill=is_prefill)
    ops.project(qkv, step.x, bound.norm, bound.qkv, step.eps, is_prefill=is_prefill)
    attend = ops.lightning_prefill if is_prefill else ops.lightning_decode
    attend(out, qkv, bound.heads(scratch), bound.state, rows, step.eps)
    if mixer.output_norm or mixer.output_gate:
        ops.gate_rows(out, bound.output_norm, gate if mixer.output_gate else None, step.eps)
    return ops.project_residual(step.x, out, bound.output, None, step.residual_scale, is_prefill=is_prefill)


def restore(ops: Ops, arrays: Mapping[str, Any], accepted: Any) -> None:
    """Take the accepted rows of a chain of drafts into the states of all layers."""
    state = LightningState(arrays["lightning_states"], arrays["lightning_chain"])
    ops.lightning_accept(state, arrays["lightning_decay"], accepted)


def _lightning(layer: LayerConfig) -> LightningAttention:
    assert isinstance(layer.mixer, LightningAttention)
    return layer.mixer
