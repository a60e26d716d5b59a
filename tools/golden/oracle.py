"""Hugging Face transformers as the oracle: fp32, eager attention, no KV cache.

MiniCPM checkpoints run as the Llama they are once their scales are folded into fp32 weights:
embeddings * scale_emb, o_proj and down_proj * scale_depth / sqrt(layers), head / (hidden_size / dim_model_base).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Tensors = Mapping[str, NDArray[np.float32]]

_CLASSES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "MiniCPMForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
}
_MUP_KEYS = ("scale_emb", "scale_depth", "dim_model_base", "mup_denominator")


def is_minicpm(config: Mapping[str, Any]) -> bool:
    return config["architectures"] == ["MiniCPMForCausalLM"]


def hugging_face_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration object of a config.json; MiniCPM's as that of its folded Llama."""
    settings = copy.deepcopy({key: value for key, value in config.items() if key not in _MUP_KEYS})
    if is_minicpm(config):
        settings |= {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        scaling = settings.get("rope_scaling") or {}
        if scaling.get("type") == "su":
            scaling["type"] = "longrope"
    settings.pop("model_type", None)
    made: PreTrainedConfig = _CLASSES[config["architectures"][0]][0](**settings, attn_implementation="eager")
    return made


def fold(config: Mapping[str, Any], tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """The weights of the Llama that a MiniCPM checkpoint is."""
    head_name = "model.embed_tokens.weight" if config.get("tie_word_embeddings", True) else "lm_head.weight"
    residual = np.float32(config["scale_depth"] / sqrt(config["num_hidden_layers"]))
    folded = {}
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values = values * residual
        folded[name] = values
    folded["lm_head.weight"] = tensors[head_name] / np.float32(config["hidden_size"] / config["dim_model_base"])
    folded["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * np.float32(config["scale_emb"])
    return folded


class Oracle:
    """A model of transformers on given weights; `limit` is the context that was asked for."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, limit: int | None):
        if is_minicpm(config):
            tensors = fold(config, tensors)
        made = hugging_face_config(config)
        if made.tie_word_embeddings:
            tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
        self._model = _CLASSES[config["architectures"][0]][1](made).to(torch.float32).eval()
        self._model.load_state_dict({name: torch.from_numpy(np.array(t)) for name, t in tensors.items()}, strict=True)
        if made.rope_parameters["rope_type"] == "dynamic" and limit is not None:
            # Dynamic NTK keeps the base of the longest sequence seen, as long as no shorter one than the native
            # length follows: from here on every position rotates as in a sequence of `limit` tokens.
            self.logits([0] * limit)

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """float32 [T, V]."""
        with torch.no_grad():
            out = self._model(torch.tensor([token_ids]), use_cache=False)
        logits: NDArray[np.float32] = out.logits[0].numpy()
        return logits

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """The continuation, and the smallest margin between the best and the second best logit on its way."""
        token_ids, margin = list(prompt), float("inf")
        for _ in range(count):
            last = self.logits(token_ids)[-1]
            second, best = np.sort(last)[-2:]
            margin = min(margin, float(best - second))
            token_ids.append(int(np.argmax(last)))
        return token_ids[len(prompt) :], margin
