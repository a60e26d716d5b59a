"""The frozen target in torch: hidden states of whole rows, and one decoding step over a KV cache.

It computes what `cpmrt/models/decoder.py` does (Llama, MiniCPM, Qwen2, Qwen3), with the same weights and names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from demo_model.network import rotate
from torch import Tensor

from cpmrt.errors import ConfigError
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.rope import rope_table
from cpmrt.quantization.checkpoint_writer import check_plain
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_folder import ModelFolder

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Target:
    """A 16- or 32-bit checkpoint on one device, computing in `dtype`, for rows of at most `context` tokens."""

    def __init__(self, folder: ModelFolder, device: torch.device, dtype: torch.dtype, context: int) -> None:
        self.config, self.device, self.dtype = folder.config, device, dtype
        if self.config.quantization is not None:
            raise ConfigError(
                f"{folder.path} is quantised", expected="a 16-bit checkpoint",
                fix="train on the 16-bit model: the draft fits its quantised ones too",
            )  # fmt: skip
        check_plain(folder)
        if context > self.config.max_positions:
            raise ConfigError("row length", expected=f"at most {self.config.max_positions}", actual=context)
        with Checkpoint.open(folder.path) as checkpoint:
            self.weights = {
                spec.name: torch.cat([_tensor(checkpoint, source.name) for source in spec.sources]).to(device, dtype)
                for spec in tensor_specs(self.config)
            }
        table = torch.from_numpy(rope_table(self.config, self.config.attention.head_dim, context, context)).to(device)
        self.cos, self.sin = table[0], table[1]

    @property
    def head(self) -> Tensor:
        """The output head [V, h]. Logits are the product with it divided by `logit_divisor`."""
        return self.weights.get("lm_head", self.weights["embed_tokens"])

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns scaled embeddings [..., h]."""
        return F.embedding(tokens, self.weights["embed_tokens"]) * self.config.scale_emb

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [..., V] of hidden states after the final norm."""
        return F.linear(hidden / self.config.logit_divisor, self.head)

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Returns the hidden states of rows [B, L] after the final norm [B, L, h], and the residual stream that enters
        the layers `taps`, side by side [B, L, h * taps] (None without taps)."""
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        entering = {}
        for layer in range(self.config.num_layers):
            if layer in taps:
                entering[layer] = x
            x = self._layer(layer, x, cos, sin, causal_attention)
        tapped = torch.cat([entering[layer] for layer in taps], dim=-1) if taps else None
        return self._norm("norm", x), tapped

    def new_cache(self, rows: int, length: int) -> Tensor:
        """Allocates keys and values of `rows` sequences: [layers, 2, B, kv heads, L, D]."""
        config = self.config
        shape = (config.num_layers, 2, rows, config.attention.num_kv_heads, length, config.attention.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def step(self, tokens: Tensor, position: int, cache: Tensor) -> Tensor:
        """Returns the hidden states [B, h], after the final norm, of one token [B] per sequence, all at `position`."""
        x = self.embed(tokens)[:, None]
        cos, sin = self.cos[position : position + 1], self.sin[position : position + 1]
        for layer in range(self.config.num_layers):
            x = self._layer(layer, x, cos, sin, _cached_attention(cache[layer], position))
        return self._norm("norm", x)[:, 0]

    def _layer(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        config, name = self.config, f"layers.{layer}"
        attention, normed = config.attention, self._norm(f"{name}.attention_norm", x)
        qkv = F.linear(normed, self.weights[f"{name}.qkv"], self.weights.get(f"{name}.qkv_bias"))
        pairs, value = (
            part.unflatten(-1, (-1, config.attention.head_dim)).transpose(1, 2)
            for part in qkv.split((attention.q_size + attention.kv_size, attention.kv_size), dim=-1)
        )
        if config.attention.qk_norm:
            query, key = pairs.split((config.attention.num_heads, config.attention.num_kv_heads), dim=1)
            pairs = torch.cat((self._norm(f"{name}.q_norm", query), self._norm(f"{name}.k_norm", key)), dim=1)
        # Queries and keys are rotated in one call: small targets wait for launches, not for arithmetic.
        query, key = rotate(pairs, cos, sin).split((config.attention.num_heads, config.attention.num_kv_heads), dim=1)
        mixed = attend(query, key, value).transpose(1, 2).flatten(2)
        output = F.linear(mixed, self.weights[f"{name}.output"], self.weights.get(f"{name}.output_bias"))
        x = x + output * config.residual_scale
        gate, up = F.linear(self._norm(f"{name}.mlp_norm", x), self.weights[f"{name}.gate_up"]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.weights[f"{name}.down"]) * config.residual_scale

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.rms_norm_eps)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes grouped-query attention of whole rows, [B, heads, L, D]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _cached_attention(cache: Tensor, position: int) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache[0, :, :, position] = key[:, :, 0]
        cache[1, :, :, position] = value[:, :, 0]
        keys, values = cache[:, :, :, : position + 1]
        # The query heads of a KV head go together, so that each key is read once and none is copied.
        grouped = query[:, :, 0].unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
        weights = (grouped @ keys.mT).float().softmax(-1).to(values.dtype)
        return (weights @ values).flatten(1, 2)[:, :, None]

    return attend


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """Returns a tensor of the checkpoint in its stored type."""
    words, kind = np.array(checkpoint.view(name)), checkpoint.entries[name].dtype
    if kind not in _TYPES:
        raise ConfigError(f"{checkpoint.folder}: type of {name}", expected=" | ".join(_TYPES), actual=kind)
    tensor = torch.from_numpy(words.view(np.int16) if kind == "BF16" else words)
    return tensor.view(_TYPES[kind])
