"""EAGLE drafts by their papers' formulas, in float64 over whole sequences, with no KV cache and no code of cpmrt.

Tensors are those of the checkpoint, by Hugging Face name; settings are config.json's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensors = Mapping[str, Any]
Settings = Mapping[str, Any]


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def rotation(settings: Settings, positions, limit):
    """Return the angles [T, D/2] and the factor on cos and sin; `limit` decides which list of LongRoPE applies."""
    size = settings["head_dim"]
    inverse = 1.0 / settings.get("rope_theta", 10000.0) ** (np.arange(0, size, 2) / size)
    scaling, factor = settings.get("rope_scaling"), 1.0
    if scaling:
        original = scaling["original_max_position_embeddings"]
        inverse = inverse / np.array(scaling["long_factor" if limit > original else "short_factor"])
        stretch = settings["max_position_embeddings"] / original
        factor = np.sqrt(1 + np.log(stretch) / np.log(original)) if stretch > 1 else 1.0
    return np.outer(positions, inverse), factor


def layer(x, entering, tensors: Tensors, name: str, settings: Settings, scale, *, limit, window=0):
    """Run one decoder layer: `entering` [T, *] is the normalised input of q, k and v, `x` [T, h] the residual."""
    heads, kv_heads, size = (settings[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    count, weight = len(x), lambda part: np.asarray(tensors[f"{name}.{part}.weight"], np.float64)
    angles, factor = rotation(settings, np.arange(count), limit)
    cos, sin = (np.concatenate([f(angles)] * 2, axis=1)[:, None] * factor for f in (np.cos, np.sin))

    def heads_of(part, number):
        rows = (entering @ weight(f"self_attn.{part}_proj").T).reshape(count, number, size)
        if part == "v":
            return rows
        half = np.concatenate([-rows[..., size // 2 :], rows[..., : size // 2]], axis=-1)
        return rows * cos + half * sin

    q, k, v = heads_of("q", heads), heads_of("k", kv_heads), heads_of("v", kv_heads)
    out = np.zeros((count, heads, size))
    for row in range(count):
        first = max(row - window + 1, 0) if window else 0
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = k[first : row + 1, group] @ q[row, head] / np.sqrt(size)
            shares = np.exp(scores - scores.max())
            out[row, head] = shares @ v[first : row + 1, group] / shares.sum()
    x = x + scale * (out.reshape(count, -1) @ weight("self_attn.o_proj").T)
    normed = rms(x, tensors[f"{name}.post_attention_layernorm.weight"], settings["rms_norm_eps"])
    gate, up = normed @ weight("mlp.gate_proj").T, normed @ weight("mlp.up_proj").T
    return x + scale * ((gate / (1 + np.exp(-gate)) * up) @ weight("mlp.down_proj").T)


def target_states(token_ids: Sequence[int], tensors: Tensors, settings: Settings, limit):
    """Return the residual stream that enters each layer, and the final norm's output."""
    x = np.asarray(tensors["model.embed_tokens.weight"], np.float64)[list(token_ids)] * settings.get("scale_emb", 1)
    scale, entering = settings["scale_depth"] / np.sqrt(settings["num_hidden_layers"]), []
    for number in range(settings["num_hidden_layers"]):
        name = f"model.layers.{number}"
        entering.append(x)
        normed = rms(x, tensors[f"{name}.input_layernorm.weight"], settings["rms_norm_eps"])
        x = layer(x, normed, tensors, name, settings, scale, limit=limit)
    return entering, rms(x, tensors["model.norm.weight"], settings["rms_norm_eps"])


class PlainDraft:
    """A draft and its target; `predict` gives the draft's log-probabilities after a text and some drafted tokens."""

    def __init__(self, target: Tensors, target_settings: Settings, tensors: Tensors, settings: Settings, limit: int):
        self.target, self.target_settings, self.limit = target, target_settings, limit
        self.tensors, self.settings = tensors, settings
        self.embedding = np.asarray(target["model.embed_tokens.weight"], np.float64)
        self.embedding = self.embedding * target_settings.get("scale_emb", 1)
        self.window, self.kept = 0, None
        self.known: dict[Any, Any] = {}
        """Results kept from earlier calls: the target's states by text, the draft's outputs by text and path."""

    def predict(self, text: Sequence[int], path: Sequence[int]):
        """Return log-probabilities over the target's vocabulary after `path`, behind `text`, which ends in the root."""
        return self.log_probs(self.outputs_after(tuple(text), tuple(path))[-1])

    def outputs_after(self, text, path):
        if (text, path) not in self.known:
            if text not in self.known:
                self.known[text] = target_states(text[:-1], self.target, self.target_settings, self.limit)
            drafted = self.outputs_after(text, path[:-1])[len(text) - 2 :] if path else []
            self.known[text, path] = self.outputs(*self.known[text], [*text[1:], *path], drafted)
        return self.known[text, path]

    def log_probs(self, output):
        logits = self.logits(output)
        full = np.full(self.target_settings["vocab_size"], -np.inf)
        ids = np.arange(len(full)) if self.kept is None else np.array(self.kept)
        full[ids] = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        return full


class PlainEagle2(PlainDraft):
    """An EAGLE-2 or classic draft: `stem` and `layers` begin its tensors' names, `scale` scales its residual."""

    stem, layers, scale, has_norms = "model.", ("model.eagle_layers.0",), 1.0, True

    def outputs(self, entering, final, tokens, drafted):
        states = np.concatenate([final, *([drafted] if len(drafted) else [])])
        a, b = self.embedding[tokens], states
        eps = self.settings["rms_norm_eps"]
        if self.has_norms:
            a = rms(a, self.tensors[f"{self.stem}input_norm1.weight"], eps)
            b = rms(b, self.tensors[f"{self.stem}input_norm2.weight"], eps)
        x = np.concatenate([a, b], axis=1) @ np.asarray(self.tensors[f"{self.stem}fc.weight"], np.float64).T
        x = x + self.tensors.get(f"{self.stem}fc.bias", 0.0)
        for name in self.layers:
            norm = self.tensors.get(f"{name}.input_layernorm.weight")
            normed = x if norm is None else rms(x, norm, eps)
            x = layer(x, normed, self.tensors, name, self.settings, self.scale, limit=self.limit, window=self.window)
        return x

    def logits(self, output):
        head = np.asarray(self.target["lm_head.weight"], np.float64)
        divisor = self.settings["hidden_size"] / self.settings["dim_model_base"]
        return (head if self.kept is None else head[list(self.kept)]) @ output / divisor


class PlainEagle3(PlainDraft):
    """An EAGLE-3 draft, which reads the inputs of the target's layers `taps`."""

    taps: tuple[int, ...] = (0, 1, 2)

    def outputs(self, entering, final, tokens, drafted):
        states = np.concatenate([entering[tap] for tap in self.taps], axis=1)
        u = states @ np.asarray(self.tensors["fc.weight"], np.float64).T
        u = np.concatenate([u, *([drafted] if len(drafted) else [])])
        eps = self.settings["rms_norm_eps"]
        a = rms(self.embedding[tokens], self.tensors["midlayer.input_layernorm.weight"], eps)
        b = rms(u, self.tensors["midlayer.hidden_norm.weight"], eps)
        joined = np.concatenate([a, b], axis=1)
        return layer(u, joined, self.tensors, "midlayer", self.settings, 1.0, limit=self.limit, window=self.window)

    def logits(self, output):
        normed = rms(output, self.tensors["norm.weight"], self.settings["rms_norm_eps"])
        return np.asarray(self.tensors["lm_head.weight"], np.float64) @ normed
