"""Hugging Face transformers as the oracle: fp32, eager attention, no KV cache.

MiniCPM checkpoints run as a Llama, into whose fp32 weights their scales are folded: embeddings * scale_emb, o_proj and
down_proj * scale_depth / sqrt(layers), head / (hidden_size / dim_model_base). With experts they run as a Mixtral, with
the experts' matrices stacked. MiniCPM3 has its own class in transformers, which knows the scales. The activation
fatrelu, which transformers does not know, is torch's Threshold in place of SiLU.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedConfig

Tensors = Mapping[str, NDArray[np.float32]]

_MUP_KEYS = ("scale_emb", "scale_depth", "dim_model_base", "mup_denominator")


def is_minicpm(config: Mapping[str, Any]) -> bool:
    return bool(config["architectures"] == ["MiniCPMForCausalLM"])


def has_experts(config: Mapping[str, Any]) -> bool:
    return "num_experts" in config


def _of_family(config: Mapping[str, Any], kind: str) -> Any:
    """Returns a class of transformers for the family of a model, such as LlamaConfig for `kind` "Config"."""
    family = "Llama" if is_minicpm(config) else config["architectures"][0].removesuffix("ForCausalLM")
    family = "Mixtral" if has_experts(config) else family
    return getattr(transformers, family + kind)


def hugging_face_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns transformers' configuration object for a config.json; for MiniCPM that of the folded Llama or Mixtral."""
    settings = copy.deepcopy(dict(config))
    if is_minicpm(config):
        for key in _MUP_KEYS:
            settings.pop(key, None)
        settings |= {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        scaling = settings.get("rope_scaling") or {}
        if scaling.get("type") == "su":
            scaling["type"] = "longrope"
    if has_experts(config):
        settings |= {"num_local_experts": settings.pop("num_experts"), "architectures": ["MixtralForCausalLM"]}
    settings.pop("model_type", None)
    if settings.get("hidden_act") == "fatrelu":
        settings["hidden_act"] = "silu"
    made: PreTrainedConfig = _of_family(config, "Config")(**settings, attn_implementation="eager")
    return made


def fold(config: Mapping[str, Any], tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """Returns the weights of a MiniCPM checkpoint as those of a Llama, with its scales folded in."""
    head_name = "model.embed_tokens.weight" if config.get("tie_word_embeddings", True) else "lm_head.weight"
    residual = np.float32(config["scale_depth"] / sqrt(config["num_hidden_layers"]))
    folded = {}
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight")):
            values = values * residual
        folded[name] = values
    folded["lm_head.weight"] = tensors[head_name] / np.float32(config["hidden_size"] / config["dim_model_base"])
    folded["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * np.float32(config["scale_emb"])
    return folded


def stack_experts(config: Mapping[str, Any], tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """Returns the weights with each layer's experts stacked as Mixtral has them: [E, 2 F, C] and [E, C, F]."""
    stacked = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        w1, w2, w3 = (
            np.stack([tensors[f"{prefix}{expert}.{part}.weight"] for expert in range(config["num_experts"])])
            for part in ("w1", "w2", "w3")
        )
        stacked[f"{prefix}gate_up_proj"], stacked[f"{prefix}down_proj"] = np.concatenate([w1, w3], axis=1), w2
    return stacked


class GreedyOracle(ABC):
    """The base of oracles, which need only give logits."""

    @abstractmethod
    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Returns the logits of every position, float32 [T, V]."""

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Returns the greedy continuation, and the smallest margin between the best two logits of its steps."""
        token_ids, margin = list(prompt), float("inf")
        for _ in range(count):
            last = self.logits(token_ids)[-1]
            second, best = np.sort(last)[-2:]
            margin = min(margin, float(best - second))
            token_ids.append(int(np.argmax(last)))
        return token_ids[len(prompt) :], margin


class Oracle(GreedyOracle):
    """A model of transformers with given weights; `limit` is the context that was asked for."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, limit: int | None):
        if is_minicpm(config):
            tensors = fold(config, tensors)
        if has_experts(config):
            tensors = stack_experts(config, tensors)
        made = hugging_face_config(config)
        if made.tie_word_embeddings:
            tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
        self._model = _of_family(config, "ForCausalLM")(made).to(torch.float32).eval()
        if config.get("hidden_act") == "fatrelu":
            for layer in self._model.model.layers:
                layer.mlp.act_fn = torch.nn.Threshold(config["hidden_act_param"], 0.0)
        self._model.load_state_dict({name: torch.from_numpy(np.array(t)) for name, t in tensors.items()}, strict=True)
        if made.rope_parameters["rope_type"] == "dynamic" and limit is not None:
            # Dynamic NTK keeps the base of the longest sequence seen, as long as no sequence shorter than the native
            # length follows. After this call every position rotates as in a sequence of `limit` tokens.
            self.logits([0] * limit)

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Returns the logits of every position, float32 [T, V]."""
        with torch.no_grad():
            out = self._model(torch.tensor([token_ids]), use_cache=False)
        logits: NDArray[np.float32] = out.logits[0].numpy()
        return logits
