"""MiniCPM-SALA in torch and float64, written from its formulas: gated attention without RoPE, and lightning layers.

Lightning attention (arXiv 2405.17381; fla's simple_gla with a constant decay) is computed as the sum over all tokens
before each one, weighted by their age, without a state. Block-sparse attention is that of `golden.sparse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from reference.tiny_models import MINICPM

from golden.oracle import GreedyOracle, Tensors
from golden.sparse import SparseAttention

NUM_PROMPT, NUM_NEW = 400, 24
_BASE = MINICPM | {
    "architectures": ["MiniCPMSALAForCausalLM"], "model_type": "minicpm_sala", "hidden_size": 128,
    "intermediate_size": 192, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
    "dim_model_base": 32, "max_position_embeddings": 1024, "qk_norm": True, "attn_use_rope": False,
    "attn_use_output_gate": True, "use_output_gate": True, "use_output_norm": True, "lightning_use_rope": True,
    "lightning_scale": "1/sqrt(d)", "lightning_head_dim": 64,
}  # fmt: skip


def _case(mixers: str, heads: int, **changes: Any) -> dict[str, Any]:
    """Return a config.json. `mixers` has a letter for each layer: a for attention, l for lightning attention."""
    names = {"a": "minicpm4", "l": "lightning-attn"}
    sizes = {"num_hidden_layers": len(mixers), "mixer_types": [names[mixer] for mixer in mixers]}
    return _BASE | sizes | {"lightning_nh": heads, "lightning_nkv": heads} | changes


_SPARSE = {
    "kernel_size": 32, "kernel_stride": 16, "block_size": 64, "init_blocks": 1, "window_size": 64, "topk": 3,
    "dense_len": -1, "use_nope": False,
}  # fmt: skip
CASES = {
    "attention_first": _case("alla", 3, sparse_config=_SPARSE),
    "lightning_first": _case("lal", 2),
    "all_but_plain": _case(
        "all", 5, qk_norm=False, attn_use_rope=True, attn_use_output_gate=False, use_output_gate=False,
        use_output_norm=False, lightning_use_rope=False,
    ),
}  # fmt: skip


def slopes(num_heads: int) -> list[float]:
    """Returns ALiBi's slopes, computed by recursion as its authors do."""
    power = 2 ** int(np.log2(num_heads))
    if power == num_heads:
        start = 2 ** (-(2 ** -(np.log2(num_heads) - 3)))
        return [float(start ** (head + 1)) for head in range(num_heads)]
    return slopes(power) + slopes(2 * power)[0::2][: num_heads - power]


class HybridOracle(GreedyOracle):
    """The oracle: a MiniCPM-SALA model with given weights."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors):
        self._config = config
        self._tensors = {name: torch.from_numpy(np.array(values, np.float64)) for name, values in tensors.items()}
        self._sparse = SparseAttention(config["sparse_config"]) if "sparse_config" in config else None

    @property
    def gap(self) -> float:
        """The gap of `SparseAttention`; infinite for a model without sparse attention."""
        return float("inf") if self._sparse is None else self._sparse.gap

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Returns the logits of every position, float32 [T, V]."""
        config, weights = self._config, self._tensors
        x = weights["model.embed_tokens.weight"][token_ids] * config["scale_emb"]
        residual = config["scale_depth"] / sqrt(config["num_hidden_layers"])
        for number, kind in enumerate(config["mixer_types"]):
            layer = f"model.layers.{number}."
            mix = self._attended if kind == "minicpm4" else self._lightning
            x = x + residual * mix(self._norm(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
            inner = self._norm(x, f"{layer}post_attention_layernorm")
            gate, up = (inner @ weights[f"{layer}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + residual * (F.silu(gate) * up) @ weights[f"{layer}mlp.down_proj.weight"].T
        x = self._norm(x, "model.norm") / (config["hidden_size"] / config["dim_model_base"])
        logits: NDArray[np.float32] = (x @ weights["lm_head.weight"].T).numpy().astype(np.float32)
        return logits

    def _attended(self, x: torch.Tensor, name: str) -> torch.Tensor:
        dim = self._config["head_dim"]
        q, k, v = (self._heads(x, f"{name}{part}_proj", dim) for part in "qkv")
        if self._config["attn_use_rope"]:
            q, k = self._rotated(q), self._rotated(k)
        if self._sparse is not None:
            mixed = self._sparse(None, q[None], k[None], v[None], None, dim**-0.5)[0][0].flatten(1)
        else:
            k, v = (heads.repeat_interleave(len(q) // len(heads), dim=0) for heads in (k, v))
            future = ~torch.ones(len(x), len(x)).tril().bool()
            scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(future, -torch.inf)
            mixed = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1)
        if self._config["attn_use_output_gate"]:
            mixed = mixed * torch.sigmoid(x @ self._tensors[f"{name}o_gate.weight"].T)
        return mixed @ self._tensors[f"{name}o_proj.weight"].T

    def _lightning(self, x: torch.Tensor, name: str) -> torch.Tensor:
        config, dim = self._config, self._config["lightning_head_dim"]
        q, k, v = (self._heads(x, f"{name}{part}_proj", dim) for part in "qkv")
        if config["qk_norm"]:
            q, k = self._norm(q, f"{name}q_norm"), self._norm(k, f"{name}k_norm")
        if config["lightning_use_rope"]:
            q, k = self._rotated(q), self._rotated(k)
        age = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
        slope = torch.tensor(slopes(config["lightning_nh"]), dtype=torch.float64)[:, None, None]
        decay = torch.where(age >= 0, torch.exp(-slope * age.clamp(min=0)), 0.0)
        mixed = (dim**-0.5 * (q @ k.transpose(1, 2)) * decay @ v).transpose(0, 1).flatten(1)
        if config["use_output_norm"]:
            mixed = self._norm(mixed, f"{name}o_norm")
        if config["use_output_gate"]:
            mixed = mixed * torch.sigmoid(x @ self._tensors[f"{name}z_proj.weight"].T)
        return mixed @ self._tensors[f"{name}o_proj.weight"].T

    def _heads(self, x: torch.Tensor, name: str, dim: int) -> torch.Tensor:
        """Returns the heads [heads, T, dim] of a projection."""
        return (x @ self._tensors[f"{name}.weight"].T).unflatten(1, (-1, dim)).transpose(0, 1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return x * scale * self._tensors[f"{name}.weight"]

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        frequencies = self._config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        turns = torch.polar(torch.ones((), dtype=torch.float64), torch.arange(heads.shape[1])[:, None] * frequencies)
        turned = torch.complex(heads[..., :half], heads[..., half:]) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)
