"""DSpark drafts in torch and float64, written from the algorithm, without a cache: each block reads the whole text.

The target is a model of Hugging Face transformers, whose hidden states and head are used unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from reference.tiny_models import LLAMA

from golden.oracle import Oracle, Tensors

NUM_PROMPT, NUM_NEW = 35, 16
_TARGET = LLAMA | {"num_hidden_layers": 4, "vocab_size": 99, "head_dim": 24}
_DRAFT = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}, "block_size": 7, "mask_token_id": 41,
    "markov_rank": 8, "markov_head_type": "vanilla", "target_layer_ids": [0, 2], "num_target_layers": 4,
    "confidence_head_with_markov": True, "sample_from_anchor": True,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (_TARGET, _DRAFT),
    "qwen3": (
        _TARGET | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
        _DRAFT | {"block_size": 4, "num_hidden_layers": 1, "target_layer_ids": [2, 0, 1], "num_key_value_heads": 4},
    ),
}
"""Name of the golden file -> config.json of the target and of its draft."""


@dataclass(frozen=True)
class DraftedBlock:
    """The oracle's result for one block of T tokens; `margin` is the smallest gap between the best two choices."""

    tokens: list[int]
    confidences: list[float]
    logits: NDArray[np.float32]
    margin: float


class DSparkOracle(Oracle):
    """The oracle: a target of transformers and a draft, both with given weights."""

    def __init__(self, target: Mapping[str, Any], tensors: Tensors, draft: Mapping[str, Any], drafting: Tensors):
        super().__init__(target, tensors, None)
        self._config = draft
        self._tensors = {name: torch.from_numpy(np.array(values, np.float64)) for name, values in drafting.items()}

    def block(self, text: list[int]) -> DraftedBlock:
        """Returns the block drafted after a text, whose last token is the anchor."""
        with torch.no_grad():
            output = self._model(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True)
        tapped = [output.hidden_states[layer + 1][0].double() for layer in self._config["target_layer_ids"]]
        context = self._norm(torch.cat(tapped, dim=1) @ self._tensors["fc.weight"].T, "hidden_norm")
        size = self._config["block_size"]
        entering = torch.tensor([text[-1]] + [self._config["mask_token_id"]] * (size - 1))
        x = self._model.model.embed_tokens.weight[entering].detach().double()
        for layer in range(self._config["num_hidden_layers"]):
            x = self._layer(f"layers.{layer}.", x, context)
        states = self._norm(x, "norm")
        return self._chain(states, states @ self._model.lm_head.weight.detach().double().T, text[-1])

    def _chain(self, states: torch.Tensor, logits: torch.Tensor, anchor: int) -> DraftedBlock:
        first, second = (self._tensors[f"markov_head.markov_{part}.weight"] for part in ("w1", "w2"))
        tokens, confidences, margin, previous = [], [], float("inf"), anchor
        for state, base in zip(states, logits, strict=True):
            embedded = first[previous]
            confidence = F.linear(
                torch.cat([state, embedded]), self._tensors["confidence_head.proj.weight"],
                self._tensors["confidence_head.proj.bias"],
            )  # fmt: skip
            confidences.append(float(torch.sigmoid(confidence)))
            best = torch.topk(base + second @ embedded, 2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            previous = int(best.indices[0])
            tokens.append(previous)
        return DraftedBlock(tokens, confidences, logits.float().numpy(), margin)

    def _layer(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        normed, group = self._norm(x, f"{name}input_layernorm"), self._config["num_attention_heads"]
        group //= self._config["num_key_value_heads"]
        start, both = len(context), torch.cat([context, normed])
        queries = self._rotated(self._heads(normed, f"{name}self_attn.q_"), start)
        keys = self._rotated(self._heads(both, f"{name}self_attn.k_"), 0).repeat_interleave(group, dim=0)
        values = self._heads(both, f"{name}self_attn.v_").repeat_interleave(group, dim=0)
        shares = torch.softmax(queries @ keys.transpose(1, 2) * self._config["head_dim"] ** -0.5, dim=-1)
        mixed = (shares @ values).transpose(0, 1).flatten(1)
        x = x + mixed @ self._tensors[f"{name}self_attn.o_proj.weight"].T
        inner = self._norm(x, f"{name}post_attention_layernorm")
        gate, up = (inner @ self._tensors[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self._tensors[f"{name}mlp.down_proj.weight"].T

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the heads [heads, T, head_dim] of a projection, normalised if the draft has a norm for them."""
        heads = (x @ self._tensors[f"{name}proj.weight"].T).unflatten(1, (-1, self._config["head_dim"])).transpose(0, 1)
        return self._norm(heads, f"{name}norm") if f"{name}norm.weight" in self._tensors else heads

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return x * scale * self._tensors[f"{name}.weight"]

    def _rotated(self, heads: torch.Tensor, start: int) -> torch.Tensor:
        half, theta = heads.shape[-1] // 2, self._config["rope_parameters"]["rope_theta"]
        angles = torch.outer(
            torch.arange(start, start + heads.shape[1], dtype=torch.float64),
            theta ** (-torch.arange(half, dtype=torch.float64) / half),
        )
        turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)
