"""DSpark drafts: the target's hidden states become keys and values of a few layers, which then run a whole block.

The draft runs no rows for positions that the target has run. Each layer makes the key and value of such a position from
the same vector, the target's tapped states through `fc` and a norm. The block is the newest token and mask tokens
behind it, one pass in which every row sees all positions before the block and the whole block. Its tokens are chosen
one after another (`markov_weights`). Source: see `config.dspark`. The names of a draft's arrays begin with `draft.`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from cpmrt.config.draft import Block, DraftConfig
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.decoder import BoundLayers, layer_tensors
from cpmrt.models.layers import EMBED, HEAD, QKV, Names, Pass, Weights
from cpmrt.models.mixers import grouped
from cpmrt.ops import Ops, Rows
from cpmrt.tensor_spec import BufferSpec, TensorSpec

MARKOV_CANDIDATES = 32
"""Tokens of each part of the vocabulary (`markov_parts`) that the Markov head scores: those with the highest logits
without it. The 256 of a row are a thousandth of the bytes of the head's matrix, and drafts need not be exact."""
_ROW_BUFFERS = ("context", "states", "logits")


def block_of(draft: DraftConfig) -> Block:
    """Return the sizes of a DSpark draft's block."""
    assert draft.block is not None
    return draft.block


def markov_parts(vocab_size: int) -> int:
    """Return how many equal parts the vocabulary has for MARKOV_CANDIDATES: 8, or fewer where 8 does not divide it."""
    return gcd(vocab_size, 8)


def tensor_specs(draft: DraftConfig) -> Iterator[TensorSpec]:
    """Yield every weight of the draft's checkpoint in 16 bits, without the prefix."""
    config, block, names = draft.layers_config, block_of(draft), Names("", "")
    hidden, rank = config.hidden_size, block.markov_rank
    yield names.weight("fc", "fc.weight", hidden, draft.hidden_width, product="residual")
    yield names.weight("hidden_norm", "hidden_norm.weight", hidden)
    for number, layer in enumerate(config.layers):
        yield from layer_tensors(layer, config, Names(f"layers.{number}.", f"{draft.layer_name.format(number)}."))
    yield names.weight("norm", "norm.weight", hidden)
    for part in ("markov_w1", "markov_w2"):
        yield names.weight(part, f"markov_head.{part}.weight", config.vocab_size, rank)
    if block.has_confidence:
        yield names.weight("confidence", "confidence_head.proj.weight", 1, hidden + rank)
        yield names.weight("confidence_bias", "confidence_head.proj.bias", 1)


def cut_markov(specs: tuple[TensorSpec, ...], token_map: tuple[int, ...] | None) -> tuple[TensorSpec, ...]:
    """Return the weights with `second` of `MarkovWeights` cut to the tokens that the draft's head has (None: all)."""
    if token_map is None:
        return specs

    def cut(spec: TensorSpec) -> TensorSpec:
        (source,), shape = spec.sources, (len(token_map), spec.shape[1])
        return replace(spec, shape=shape, sources=(replace(source, shape=shape, rows=token_map),))

    return tuple(cut(spec) if spec.name == "markov_w2" else spec for spec in specs)


def buffer_specs(draft: DraftConfig, max_rows: int, block_rows: int) -> Iterator[BufferSpec]:
    """Yield `context`, the rows of which the keys and values of positions are made, and `states`, the normalised
    outputs of a pass over blocks of at most `block_rows` rows."""
    hidden = draft.layers_config.hidden_size
    yield BufferSpec("context", (max_rows, hidden), EMBED, QKV)
    yield BufferSpec("states", (block_rows, hidden), HEAD, HEAD)


@dataclass(frozen=True)
class MarkovWeights:
    """The heads that choose a block's tokens. For token u after token t, with the row's output h (`DSpark.block`):

        logit(u) = base logit(u) + second[u] . first[t];    confidence = sigmoid([h | first[t]] . confidence + bias)

    first [V, rank], second [rows of the draft's head, rank], confidence [1, hidden + rank] and bias [1], or None where
    there is no such head.
    """

    first: Any
    second: Any
    confidence: Any | None
    bias: Any | None


@dataclass(frozen=True)
class DSpark:
    """A DSpark draft on the arrays of an executor, with the target's embedding and whichever head it uses."""

    draft: DraftConfig
    layers: BoundLayers
    weights: Weights
    embedding: Any
    head: Any

    @classmethod
    def bind(cls, draft: DraftConfig, arrays: Mapping[str, Any], caches: CacheLayout) -> DSpark:
        """Find the weights and caches by name."""
        names = (f"{caches.prefix}lm_head", "lm_head", "embed_tokens")
        head = next(arrays[name] for name in names if name in arrays)
        layers = BoundLayers.bind(draft.layers_config, arrays, caches, _ROW_BUFFERS)
        return cls(draft, layers, Weights(arrays, caches.prefix), arrays["embed_tokens"], head)

    def commit(self, ops: Ops, arrays: Mapping[str, Any], rows: Rows, hidden: Any) -> None:
        """Store keys and values at the rows' positions, made of the target's states there: `hidden` [T, w] has those of
        all taps side by side."""
        buffers, eps = self.layers.buffers(arrays, len(rows.token_ids)), self.draft.layers_config.rms_norm_eps
        x, context = buffers["x"], buffers["context"]
        ops.clear(x)
        ops.project_residual(x, hidden, self.weights["fc"], None, 1.0, is_prefill=rows.is_prefill)
        ops.rms_norm(context, x, self.weights["hidden_norm"], eps)
        step = Pass(ops, context, rows, buffers, eps, 1.0)
        for layer in self.layers.layers:
            grouped.store(step, layer.mixer)

    def block(self, ops: Ops, arrays: Mapping[str, Any], rows: Rows) -> tuple[Any, Any]:
        """Run the rows of a block; return their normalised outputs [T, hidden] and their logits [T, V]."""
        config, buffers = self.draft.layers_config, self.layers.buffers(arrays, len(rows.token_ids))
        x, states, logits = buffers["x"], buffers["states"], buffers["logits"]
        ops.embed(x, rows.token_ids, self.embedding, config.scale_emb)
        self.layers.run(ops, x, rows, buffers, None, ())
        ops.rms_norm(states, x, self.weights["norm"], config.rms_norm_eps)
        ops.lm_head(logits, states, None, self.head, config.rms_norm_eps, config.logit_divisor)
        return states, logits

    def markov_weights(self) -> MarkovWeights:
        """Return the weights of the heads that choose the block's tokens."""
        names = ("markov_w1", "markov_w2", "confidence", "confidence_bias")
        return MarkovWeights(*(self.weights[name] for name in names))
