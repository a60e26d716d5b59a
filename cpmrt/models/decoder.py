"""The decoder of the Llama, MiniCPM, Qwen2 and Qwen3 families: one forward, written once for every executor.

Differences between families are values of `ModelConfig`, never branches on a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.models.attention import attend, layer_pages
from cpmrt.ops import Ops, QkvWeights, Rows
from cpmrt.tensor_spec import BufferSpec, Source, TensorSpec

Arrays = Mapping[str, Any]

# Phases of a forward pass, for buffer lifetimes; those of a layer repeat.
EMBED, QKV, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD = range(7)


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every weight, packed as the forward reads it, with the checkpoint tensors it is made of."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = [_single("embed_tokens", "model.embed_tokens.weight", vocab, hidden)]
    for layer in range(config.num_layers):
        specs.extend(layer_specs(config, f"layers.{layer}", f"model.layers.{layer}"))
    specs.append(_single("norm", "model.norm.weight", hidden))
    if not config.tie_word_embeddings:
        specs.append(_single("lm_head", "lm_head.weight", vocab, hidden))
    return tuple(specs)


def layer_specs(config: ModelConfig, ours: str, theirs: str, inputs: int | None = None) -> Iterator[TensorSpec]:
    """The weights of one layer, under its name here and in the checkpoint; `inputs`: columns that q, k and v read
    (None: hidden_size)."""
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv_rows = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
    yield _single(f"{ours}.attention_norm", f"{theirs}.input_layernorm.weight", hidden)
    qkv = ((f"{theirs}.self_attn.{part}_proj.weight", rows, inputs or hidden) for part, rows in qkv_rows.items())
    yield replace(_fused(f"{ours}.qkv", *qkv), head_dim=config.head_dim)
    if config.qkv_bias:
        yield _fused(
            f"{ours}.qkv_bias", *((f"{theirs}.self_attn.{part}_proj.bias", rows) for part, rows in qkv_rows.items())
        )
    if config.qk_norm:
        yield _single(f"{ours}.q_norm", f"{theirs}.self_attn.q_norm.weight", config.head_dim)
        yield _single(f"{ours}.k_norm", f"{theirs}.self_attn.k_norm.weight", config.head_dim)
    yield _single(f"{ours}.output", f"{theirs}.self_attn.o_proj.weight", hidden, config.q_size)
    if config.output_bias:
        yield _single(f"{ours}.output_bias", f"{theirs}.self_attn.o_proj.bias", hidden)
    yield _single(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm.weight", hidden)
    yield _fused(
        f"{ours}.gate_up", *((f"{theirs}.mlp.{part}_proj.weight", inner, hidden) for part in ("gate", "up"))
    )
    yield _single(f"{ours}.down", f"{theirs}.mlp.down_proj.weight", hidden, inner)


def _single(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, (Source(source, shape),))


def _fused(name: str, *parts: tuple[Any, ...]) -> TensorSpec:
    sources = tuple(Source(part[0], tuple(part[1:])) for part in parts)
    rows = sum(source.shape[0] for source in sources)
    return TensorSpec(name, (rows, *sources[0].shape[1:]), sources)


def buffer_specs(config: ModelConfig, max_rows: int, logit_rows: int) -> tuple[BufferSpec, ...]:
    """The workspace of a forward pass of at most `max_rows` rows, of which `logit_rows` reach the head."""
    return (
        BufferSpec("x", (max_rows, config.hidden_size), EMBED, HEAD),
        BufferSpec("q", (max_rows, config.q_size), QKV, ATTENTION),
        BufferSpec("attention", (max_rows, config.q_size), ATTENTION, OUTPUT),
        BufferSpec("inner", (max_rows, config.intermediate_size), GATE_UP, DOWN),
        BufferSpec("logits", (logit_rows, config.vocab_size), HEAD, HEAD, itemsize=4),
        *_sparse_buffer_specs(config, max_rows),
    )


def _sparse_buffer_specs(config: ModelConfig, max_rows: int) -> Iterator[BufferSpec]:
    if config.sparse is not None:
        blocks = (max_rows, config.num_kv_heads, config.sparse.num_selected)
        yield BufferSpec("blocks", blocks, ATTENTION, ATTENTION, itemsize=4)
        if config.sparse.use_nope:
            yield BufferSpec("q_nope", (max_rows, config.q_size), QKV, ATTENTION)


def forward(
    ops: Ops,
    config: ModelConfig,
    weights: Arrays,
    buffers: Arrays,
    rows: Rows,
    logit_rows: slice | None,
    taps: tuple[int, ...] = (),
) -> None:
    """Run the rows of one step through every layer; fill `buffers["logits"]` for `logit_rows` of them.

    `buffers` are views with exactly the step's rows; the pages [layers, P, ...] of `KVLayout` and `rope` are among
    them. `logit_rows` None skips the head (a prefill chunk that is not the last). A draft's `hidden` among them
    [T, w] is filled with what enters the layers `taps`, side by side, or without taps with the final norm's output.
    """
    hidden = buffers.get("hidden")
    x, q, attention, inner = (buffers[name] for name in ("x", "q", "attention", "inner"))
    eps, residual_scale = config.rms_norm_eps, config.residual_scale
    ops.embed(x, rows.token_ids, weights["embed_tokens"], config.scale_emb)
    for layer in range(config.num_layers):
        weight = LayerWeights(weights, f"layers.{layer}.")
        kv = layer_pages(config, buffers, layer)
        for place, tap in enumerate(taps):
            if hidden is not None and tap == layer:
                ops.copy_columns(hidden, x, place * config.hidden_size)
        after = ops.qkv(q, kv, x, weight.qkv(weight["attention_norm"]), buffers["rope"], rows, eps)
        attend(ops, config, buffers, kv, rows, after)
        ops.project_residual(x, attention, weight["output"], weight["output_bias"], residual_scale)
        after = ops.gate_up(inner, x, weight["mlp_norm"], weight["gate_up"], eps)
        ops.project_residual(x, inner, weight["down"], None, residual_scale, after)
    if hidden is not None and not taps:
        ops.rms_norm(hidden, x, weights["norm"], eps)
    if logit_rows is not None:
        lm_head(ops, config, weights, buffers["logits"], x[logit_rows])


def lm_head(ops: Ops, config: ModelConfig, weights: Arrays, logits: Any, x: Any) -> None:
    """Logits of these rows of the last layer's output."""
    head = weights["lm_head" if "lm_head" in weights else "embed_tokens"]
    ops.lm_head(logits, x, weights["norm"], head, config.rms_norm_eps, config.logit_divisor)


class LayerWeights:
    """One layer's weights by short name; None for those that the architecture does not have."""

    def __init__(self, weights: Arrays, prefix: str):
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name: str) -> Any | None:
        return self.weights.get(self.prefix + name)

    def qkv(self, norm: Any | None) -> QkvWeights:
        """Return the weights of the q, k and v projection, behind this RMSNorm."""
        return QkvWeights(norm, self["qkv"], self["qkv_bias"], self["q_norm"], self["k_norm"])
