"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, as MiniCPM3 has it) over pages of latents.

The rotary table is `rope` [2, positions, rope_dim / 2] in the storage type: the model's own code rounds cos and sin
before it rotates. Pages are `latent_pages`: of every token the normalised latent and the rotated part of the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.config.engine import FP8
from cpmrt.config.layers import LatentAttention, LayerConfig
from cpmrt.errors import ConfigError
from cpmrt.memory.caches import PAGE_SIZE, CacheSpec
from cpmrt.models.layers import ATTENTION, EMBED, HEAD, OUTPUT, QKV, Names, Pass, Table, Weights
from cpmrt.models.rope import rope_pieces
from cpmrt.ops import Handoff, LatentWeights
from cpmrt.tensor_spec import PLAIN_HEAD_DIM, BufferSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """The workspace of a pass: both latents of each row [T, q_rank + cached_dim]; in a prefill chunk the queries'
    latent once more, normalised; queries and attention; the rotary table."""

    latents: Any
    q_latent: Any
    q: Any
    attention: Any
    rope: Any


@dataclass(frozen=True, slots=True)
class BoundLatent:
    """The weights and the pages of one layer; `upcoming`: the first large weight of its mlp, if it has one."""

    norm: Any
    down: Any
    q_up: Any
    latent: LatentWeights
    output: Any
    pages: Any
    upcoming: Any


def tensors(layer: LayerConfig, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm, the fused projection to both latents, their norms, the two up projections from them, and the
    output projection."""
    mixer, hidden = _attention(layer), model.hidden_size
    yield names.weight("attention_norm", "input_layernorm.weight", hidden)
    q_down = "self_attn.q_a_proj.weight", (mixer.q_rank, hidden)
    kv_down = "self_attn.kv_a_proj_with_mqa.weight", (mixer.cached_dim, hidden)
    yield names.fused("latent_down", q_down, kv_down, product="qkv", head_dim=PLAIN_HEAD_DIM)
    yield names.weight("q_latent_norm", "self_attn.q_a_layernorm.weight", mixer.q_rank)
    yield names.weight("kv_latent_norm", "self_attn.kv_a_layernorm.weight", mixer.kv_rank)
    q_up = "self_attn.q_b_proj.weight"
    yield names.weight("q_up", q_up, mixer.q_size, mixer.q_rank, product="qkv", head_dim=PLAIN_HEAD_DIM)
    up_rows = mixer.num_heads * (mixer.nope_dim + mixer.value_dim)
    yield names.weight("kv_up", "self_attn.kv_b_proj.weight", up_rows, mixer.kv_rank, product="per_head")
    yield names.weight("output", "self_attn.o_proj.weight", hidden, mixer.value_size, product="residual")


def caches(mixer: LatentAttention, kv_dtype: str) -> tuple[CacheSpec, ...]:
    """Return the pages of latents. Raises ConfigError for pages in fp8."""
    if kv_dtype == FP8:
        what = "kv_dtype of a model with latent attention"
        raise ConfigError(what, expected="auto", actual=FP8, fix="leave kv_dtype out: a latent is small already")
    return (CacheSpec("latent_pages", (1, PAGE_SIZE, mixer.cached_dim)),)


def buffers(mixer: LatentAttention, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the buffers of latents, queries and attention."""
    yield BufferSpec("latents", (max_rows, mixer.q_rank + mixer.cached_dim), QKV, QKV)
    yield BufferSpec("q_latent", (max_rows, mixer.q_rank), QKV, QKV)
    yield BufferSpec("q", (max_rows, mixer.q_size), QKV, ATTENTION)
    yield BufferSpec("attention", (max_rows, mixer.value_size), ATTENTION, OUTPUT)


def tables(mixer: LatentAttention, model: ModelConfig, max_context: int, limit: int) -> Iterator[Table]:
    """Yield the rotary table."""
    spec = BufferSpec("rope", (2, max_context, mixer.rope_dim // 2), EMBED, HEAD)
    yield Table(spec, lambda: rope_pieces(model, mixer.rope_dim, max_context, limit))


def bind(layer: LayerConfig, weights: Weights, caches: Mapping[str, Any]) -> BoundLatent:
    """Return weights and pages as `run` takes them."""
    mixer = _attention(layer)
    up = weights["kv_up"]
    assert up is not None
    latent = LatentWeights(
        weights["q_latent_norm"], weights["kv_latent_norm"],
        up.reshape(mixer.num_heads, mixer.nope_dim + mixer.value_dim, mixer.kv_rank),
    )  # fmt: skip
    return BoundLatent(
        weights["attention_norm"], weights["latent_down"], weights["q_up"], latent, weights["output"],
        caches["latent_pages"], weights["gate_up"],
    )  # fmt: skip


def run(step: Pass, layer: LayerConfig, bound: BoundLatent) -> Handoff:
    """x += residual_scale * attention(latents of norm(x)) output^T."""
    ops, mixer, rows, scratch = step.ops, _attention(layer), step.rows, step.buffers.of(LatentBuffers)
    is_prefill, pages, weights = rows.is_prefill, bound.pages, bound.latent
    ops.project(scratch.latents, step.x, bound.norm, bound.down, step.eps, is_prefill=is_prefill)
    scale, eps = mixer.query_dim**-0.5, mixer.norm_eps
    if is_prefill:
        ops.append_latent(scratch.q_latent, pages, scratch.latents, weights, scratch.rope, rows, eps)
        ops.project(scratch.q, scratch.q_latent, None, bound.q_up, 0.0, is_prefill=True)
        ops.prefill_latent_attention(scratch.attention, scratch.q, pages, weights, scratch.rope, rows, scale)
    else:
        ops.decode_latent_attention(
            scratch.attention, scratch.q, scratch.latents, pages, weights, scratch.rope, rows, scale, eps,
            bound.upcoming, bound.q_up,
        )  # fmt: skip
    return ops.project_residual(
        step.x, scratch.attention, bound.output, None, step.residual_scale, is_prefill=is_prefill
    )  # fmt: skip


def _attention(layer: LayerConfig) -> LatentAttention:
    assert isinstance(layer.mixer, LatentAttention)
    return layer.mixer
