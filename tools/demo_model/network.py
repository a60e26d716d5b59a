"""The network in torch, with the tensor names and the arithmetic of a MiniCPM checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes and scales, under the field names of `config.json`.

    Models of other kinds have subclasses with their own fields, `architecture`, `model_type` and mixers.
    """

    architecture: ClassVar[str] = "MiniCPMForCausalLM"
    model_type: ClassVar[str] = "minicpm"

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_reach: float = 4.0
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 64

    def mixer(self, layer: int) -> nn.Module:
        """Returns the mixer module of a layer; it takes rows (count, length, hidden), cosines and sines."""
        return Attention(self)

    @property
    def rope_dim(self) -> int:
        """The number of elements of a head that are rotated."""
        return self.head_dim

    @property
    def residual_scale(self) -> float:
        """The factor of each sublayer's output."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logit_divisor(self) -> float:
        """The divisor of the last hidden state."""
        return self.hidden_size / self.dim_model_base

    @property
    def rope_factors(self) -> list[float]:
        """LongRoPE factors, growing smoothly from 1 at the fastest frequency to `rope_reach` at the slowest."""
        last = self.rope_dim // 2 - 1
        return [round(self.rope_reach ** (index / last), 6) for index in range(last + 1)]


class RMSNorm(nn.Module):
    """Root-mean-square norm: fp32 statistics, rounded to the compute type before the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


class Projection(nn.Linear):
    """A matrix kept in fp32 and applied in the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rope_table(config: NetworkConfig) -> tuple[Tensor, Tensor]:
    """Returns fp32 cosines and sines (max_position_embeddings, rope_dim / 2) from fp64 angles."""
    half = config.rope_dim // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    inverse = config.rope_theta**-exponents / torch.tensor(config.rope_factors, dtype=torch.float64)
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates split halves in fp32 and rounds back to the type of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Projection(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.k_proj = Projection(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = Projection(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = Projection(config.num_attention_heads * config.head_dim, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.o_proj(self.mixed(x, (cos, sin)))

    def mixed(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns the values of all heads side by side; without cosines and sines nothing is rotated."""
        rows, length, _ = x.shape
        query, key, value = (
            projection(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, length, -1)


class FeedForward(nn.Module):
    """The SwiGLU feed-forward of a layer."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Projection(hidden, inner), Projection(hidden, inner)
        self.down_proj = Projection(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A mixer and the feed-forward, each added with the depth scale."""

    def __init__(self, config: NetworkConfig, number: int) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = config.mixer(number)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), cos, sin) * self.residual_scale
        return h + self.mlp(self.post_attention_layernorm(h)) * self.residual_scale


class Decoder(nn.Module):
    """The part of the checkpoint under `model.`."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MiniCPM(nn.Module):
    """A causal language model with tied embeddings; `compute_dtype` is the type of all activations."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NetworkConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.model = Decoder(config)
        # Stored, not computed in `forward`: torch.compile would inline the fp64 sines into every rotation.
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws MiniCPM's initial weights: deviation 0.1, for matrices divided by the root of the width ratio."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                width = 1.0 if "embed_tokens" in name else self.config.logit_divisor
                nn.init.normal_(parameter, std=0.1 / math.sqrt(width))

    def hidden_states(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the last hidden states, normed and divided for the head; `positions` [L] default to 0, 1, 2, ..."""
        h = F.embedding(tokens, self.model.embed_tokens.weight).to(self.compute_dtype) * self.config.scale_emb
        at = slice(tokens.shape[1]) if positions is None else positions
        cos, sin = self.cos[at], self.sin[at]
        for layer in self.model.layers:
            h = layer(h, cos, sin)
        return self.model.norm(h) / self.config.logit_divisor

    def head(self, h: Tensor) -> Tensor:
        """Returns the logits of normed and divided hidden states."""
        return F.linear(h, self.model.embed_tokens.weight.to(h.dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden_states(tokens))


def token_loss(network: MiniCPM, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the cross entropy, in nats, of all tokens of each row except its first."""
    logits = network(rows[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)
