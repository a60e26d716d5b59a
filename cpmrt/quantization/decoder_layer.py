"""A decoder layer in float32 that computes the inputs of each of its linears, which calibration needs.

The arithmetic is that of `cpmrt.models.decoder`, with the functions of `cpmrt.reference.ops`. It runs whole sequences,
each of which attends to itself, so there is no cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import GatedMlp
from cpmrt.quantization.arrays import module_of
from cpmrt.reference.ops import gated, rms_norm, rotate
from cpmrt.reference.tiles import softmax

QKV, OUTPUT, GATE_UP, DOWN = range(4)

STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The stages of a layer, in the order in which they run: the linears of a stage read the same input."""
NORM_OF = {QKV: "input_layernorm.weight", GATE_UP: "post_attention_layernorm.weight"}


class DecoderLayer:
    """A layer's float32 tensors by their Hugging Face names below `model.layers.N.`; they may be replaced.

    `rope` [2, T, D / 2] holds the rotary cos and sin of the first T positions.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Any], rope: Any):
        self.config, self.tensors, self.rope = config, dict(tensors), rope
        xp = module_of(rope)
        length = rope.shape[1]
        self._future = xp.triu(xp.full((length, length), -np.inf, np.float32), 1)

    def weight(self, linear: str) -> Any:
        """Return the weight [N, K] of a name in `STAGES`."""
        return self.tensors[linear + ".weight"]

    def inputs(self, stage: int, x: Any) -> Any:
        """Compute the inputs [T, K] of a stage's linears from the residual stream `x` [T, C].

        For QKV and OUTPUT `x` is the stream as it enters the layer, for GATE_UP and DOWN as `after(OUTPUT)` left it.
        """
        if stage in NORM_OF:
            return rms_norm(x, self.tensors[NORM_OF[stage]], self.config.rms_norm_eps)
        return self._attention(self.inputs(QKV, x)) if stage == OUTPUT else self._inner(self.inputs(GATE_UP, x))

    def after(self, stage: int, x: Any) -> Any:
        """Compute the residual stream [T, C] after OUTPUT or DOWN, the last stage of either half of the layer."""
        linear = STAGES[stage][0]
        return x + np.float32(self.config.residual_scale) * self._project(linear, self.inputs(stage, x))

    def _project(self, linear: str, x: Any) -> Any:
        projected = x @ self.weight(linear).T
        bias = self.tensors.get(linear + ".bias")
        return projected if bias is None else projected + bias

    def _heads(self, linear: str, x: Any) -> Any:
        """Project rows to heads [T, heads, D], each normalised where the model has a norm on heads."""
        heads = self._project(linear, x).reshape(len(x), -1, self.config.attention.head_dim)
        norm = self.tensors.get(linear.replace("_proj", "_norm") + ".weight")
        return heads if norm is None else rms_norm(heads, norm, self.config.rms_norm_eps)

    def _attention(self, x: Any) -> Any:
        """Compute the causal attention of one sequence: normalised rows [T, C] to [T, H D]."""
        config = self.config
        cos, sin = self.rope[0, : len(x)], self.rope[1, : len(x)]
        q, k = (rotate(self._heads(f"self_attn.{part}_proj", x), cos, sin) for part in "qk")
        values = self._heads("self_attn.v_proj", x)
        future = self._future[: len(x), : len(x)]
        q = q.reshape(len(x), config.attention.num_kv_heads, -1, config.attention.head_dim)
        out = module_of(x).empty_like(q)
        for head in range(config.attention.num_kv_heads):
            scores = q[:, head].transpose(1, 0, 2) @ k[:, head].T * np.float32(config.attention.head_dim**-0.5)
            out[:, head] = (softmax(scores + future) @ values[:, head]).transpose(1, 0, 2)
        return out.reshape(len(x), -1)

    def _inner(self, x: Any) -> Any:
        mlp = self.config.mlp
        assert isinstance(mlp, GatedMlp), "experts are refused before"
        return gated(self._project("mlp.gate_proj", x), self._project("mlp.up_proj", x), mlp.fatrelu)
