"""InfLLM-v2's attention in torch, as the official modeling code composes it, inside a Llama of transformers.

Written from the formulas (arXiv 2509.24663; the modeling code of MiniCPM4.1; infllmv2_cuda_impl): unfold and mean for
the compressed keys, causal stage 1 with the log-sum-exp of the coarse keys, sum over the heads of a group, max-pooling
(5, 4, 1), infinity for the first and local blocks, topk, then dense attention under the mask of the chosen blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reference.tiny_models import MINICPM
from transformers import AttentionInterface

from golden.oracle import Oracle, Tensors

NUM_PROMPT, NUM_NEW = 600, 24
_SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "vocab_size": 99, "dim_model_base": 32,
    "max_position_embeddings": 1024,
}  # fmt: skip
_BASE = MINICPM | _SIZES


def _case(heads: int, kv_heads: int, **sparse: Any) -> dict[str, Any]:
    fixed = {"kernel_size": 32, "kernel_stride": 16, "block_size": 64}
    return _BASE | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "sparse_config": fixed | sparse}


CASES = {
    "group4": _case(8, 2, init_blocks=1, window_size=64, topk=4, dense_len=-1, use_nope=False),
    "group1": _case(2, 2, init_blocks=0, window_size=128, topk=3, dense_len=320, use_nope=False),
    "nope": _case(4, 1, init_blocks=2, window_size=64, topk=5, dense_len=-1, use_nope=True),
}
"""Name of the golden file -> config.json. dense_len is at most the tokens that the chosen blocks hold: for larger
values the official code decides by the length of the call."""


@dataclass
class SparseAttention:
    """The attention of a model whose sequences begin at position 0.

    `gap` is the smallest relative distance so far between the scores of the last block chosen and the first one left
    out, ties aside. `settings` is the sparse_config; `rotary` is needed only for `use_nope`.
    """

    settings: Mapping[str, Any]
    rotary: Callable[..., Any] | None = None
    gap: float = float("inf")

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention output [1, T, H, D] of query [1, H, T, D] over key and value [1, K, T, D], and None."""
        query, key, value = query[0], key[0], value[0]
        scored = (self._unrotated(query), self._unrotated(key)) if self.settings["use_nope"] else (query, key)
        num_tokens, group = query.shape[1], query.shape[0] // key.shape[0]
        positions = torch.arange(num_tokens)
        visible = positions[None, :] <= positions[:, None]
        blocks = self._blocks(*scored, scaling).repeat_interleave(64, dim=-1)[..., :num_tokens]
        dense = (positions + 1 < self.settings["dense_len"])[None, :, None]
        mask = (visible[None] & (blocks | dense)).repeat_interleave(group, dim=0)
        logits = query @ key.repeat_interleave(group, dim=0).transpose(-1, -2) * scaling
        weights = torch.softmax(logits.masked_fill(~mask, float("-inf")), dim=-1)
        return (weights @ value.repeat_interleave(group, dim=0)).transpose(0, 1)[None], None

    def _blocks(self, query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
        """Returns which blocks each token attends to: bool [K, T, blocks]."""
        num_heads, num_tokens, head_dim = key.shape
        fine, coarse = (key.unfold(1, size, stride).mean(-1) for size, stride in ((32, 16), (128, 64)))
        index = torch.arange(num_tokens)[:, None]
        groups = query.reshape(num_heads, -1, num_tokens, head_dim)
        scores, totals = (
            (groups @ keys[:, None].transpose(-1, -2) * scaling).masked_fill(
                torch.arange(keys.shape[1])[None, :] >= (index - (stride - 1)) // stride, float("-inf")
            )
            for keys, stride in ((fine, 16), (coarse, 64))
        )
        p = torch.exp(scores - torch.logsumexp(totals, dim=-1, keepdim=True)).nan_to_num(0.0, posinf=0.0).sum(1)
        num_blocks = -(-num_tokens // 64)
        padded = F.pad(p, (0, 4 * num_blocks + 4 - p.shape[-1]))
        pooled = F.max_pool1d(padded, kernel_size=5, stride=4, padding=1)[..., :num_blocks]
        block, own = torch.arange(num_blocks)[None, :], index // 64
        local = self.settings["window_size"] // 64
        always = (block < self.settings["init_blocks"]) | ((block <= own) & (block >= own - local))
        pooled = pooled.masked_fill(always, float("inf")).masked_fill(block > own, float("-inf"))
        budget = min(self.settings["topk"] + local, num_blocks)
        # Neighbouring blocks share a pooling window and often tie; the official topk leaves the order of ties open.
        ranked = pooled.sort(dim=-1, descending=True, stable=True)
        if budget < num_blocks:
            last, first_left = ranked.values[..., budget - 1], ranked.values[..., budget]
            gaps = (1 - first_left / last)[torch.isfinite(last) & torch.isfinite(first_left)]
            self.gap = min(self.gap, float(gaps[gaps > 0].min()))
        chosen = torch.zeros_like(pooled, dtype=torch.bool).scatter(-1, ranked.indices[..., :budget], True)
        return chosen & (block <= own)

    def _unrotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns rotated heads turned back by the angle of each position."""
        assert self.rotary is not None
        cos, sin = self.rotary(heads, torch.arange(heads.shape[1])[None])
        half = heads.shape[-1] // 2
        turned = torch.cat([heads[..., half:], -heads[..., :half]], dim=-1)
        return heads * cos + turned * sin


class SparseOracle(Oracle):
    """A MiniCPM model in transformers that uses `attention` as its attention."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors):
        settings = copy.deepcopy(dict(config))
        self.attention = SparseAttention(settings.pop("sparse_config"))
        super().__init__(settings, tensors, None)
        AttentionInterface.register("infllm_v2", self.attention)
        self._model.set_attn_implementation("infllm_v2")
        self.attention.rotary = self._model.model.rotary_emb

    @property
    def gap(self) -> float:
        """The `gap` of the attention."""
        return self.attention.gap
