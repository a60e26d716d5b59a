"""EAGLE drafts: they continue the target's hidden states with its embedding, through layers of their own.

EAGLE-2 (arXiv 2406.16858) also uses the target's head, or some rows of it (FR-Spec, arXiv 2502.14856); EAGLE-3 (arXiv
2503.01840) has its own. The names of a draft's arrays begin with `draft.`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpmrt.config.draft import DraftConfig
from cpmrt.config.speculation import MAX_NODES
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.decoder import BoundLayers, layer_tensors
from cpmrt.models.layers import EMBED, HEAD, QKV, Names, StepBuffers, Weights
from cpmrt.ops import Ops, Rows
from cpmrt.tensor_spec import BufferSpec, TensorSpec

_ROW_BUFFERS = ("embedding", "joined", "normed")


def tensor_specs(draft: DraftConfig) -> Iterator[TensorSpec]:
    """Yield every weight of the draft's checkpoint in 16 bits, without the prefix.

    A split `fc` is the one spec `fc_halves` [2h, h]: the embedding's half of rows, then the hidden state's.
    """
    config = draft.layers_config
    hidden, names = config.hidden_size, Names("", draft.stem)
    for name in ("input_norm1", "input_norm2") if draft.has_input_norms else ():
        yield names.weight(name, f"{name}.weight", hidden)
    columns = draft.hidden_width if draft.taps else 2 * hidden
    if draft.has_split_fc:
        yield names.weight("fc_halves", "fc.weight", 2 * hidden, hidden, product="residual")
    else:
        yield names.weight("fc", "fc.weight", hidden, columns, product="residual")
    if draft.has_fc_bias:
        yield names.weight("fc_bias", "fc.bias", hidden)
    for number, layer in enumerate(config.layers):
        theirs = f"{draft.layer_name.format(number)}."
        if layer.reads_joined:
            yield Names("", theirs).weight("hidden_norm", "hidden_norm.weight", hidden)
        yield from layer_tensors(layer, config, Names(f"layers.{number}.", theirs))
    if draft.taps:
        yield names.weight("norm", "norm.weight", hidden)
        head = Names("", "").weight("lm_head", "lm_head.weight", draft.draft_vocab, hidden, product="head")
        yield replace(head, part="lm head")


def buffer_specs(draft: DraftConfig, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the buffers of the layers' input. `parents` holds the states that a later pass continues."""
    hidden = draft.layers_config.hidden_size
    yield BufferSpec("embedding", (max_rows, hidden), EMBED, EMBED)
    yield BufferSpec("parents", (MAX_NODES, hidden), EMBED, HEAD)
    if draft.has_split_fc:
        yield BufferSpec("normed", (max_rows, hidden), EMBED, EMBED)
    else:
        yield BufferSpec("joined", (max_rows, 2 * hidden), EMBED, QKV)


@dataclass(frozen=True)
class Eagle:
    """An EAGLE draft on the arrays of an executor, with the target's embedding and whichever head it uses."""

    draft: DraftConfig
    layers: BoundLayers
    weights: Weights
    embedding: Any
    head: Any
    fc: tuple[Any, ...]
    """One matrix [h, columns], or the halves of a split one: the embedding's, then the hidden state's."""

    @classmethod
    def bind(cls, draft: DraftConfig, arrays: Mapping[str, Any], caches: CacheLayout, halves: tuple[Any, ...]) -> Eagle:
        """Find the weights and caches by name; `halves` are the two matrices of a split fc, or empty."""
        weights = Weights(arrays, caches.prefix)
        names = (f"{caches.prefix}lm_head", "lm_head", "embed_tokens")
        head = next(arrays[name] for name in names if name in arrays)
        layers = BoundLayers.bind(draft.layers_config, arrays, caches, _ROW_BUFFERS)
        return cls(draft, layers, weights, arrays["embed_tokens"], head, halves or (weights["fc"],))

    def forward(self, ops: Ops, arrays: Mapping[str, Any], rows: Rows, hidden: Any, *, is_first: bool) -> Any:
        """Run rows through the draft and return x, its output for each.

        `hidden` [T, w]: with `is_first` the target's states of the position before each row's token, taps side by side
        for EAGLE-3; else the output of an earlier pass for each row's parent. It may not overlap the draft's x. Rows of
        a prefill chunk and of tokens that wait are causal and have no tree masks; rows of later passes have them.
        """
        buffers = self.layers.buffers(arrays, len(rows.token_ids))
        x = buffers["x"]
        if self.draft.taps:
            self._enter_eagle3(ops, x, buffers, rows, hidden, is_first)
        else:
            self._enter_eagle2(ops, x, buffers, rows, hidden)
        self.layers.run(ops, x, rows, buffers, None, ())
        return x

    def logits(self, ops: Ops, out: Any, x: Any) -> None:
        """Fill `out` [rows, draft vocabulary] with the logits of rows of x.

        EAGLE-2's output is not normalised once more: the target's head reads it as it is, with the target's divisor.
        """
        config = self.draft.layers_config
        ops.lm_head(out, x, self.weights["norm"], self.head, config.rms_norm_eps, config.logit_divisor)

    def _embed(self, ops: Ops, buffers: StepBuffers, rows: Rows) -> Any:
        embedding = buffers["embedding"]
        ops.embed(embedding, rows.token_ids, self.embedding, self.draft.layers_config.scale_emb)
        return embedding

    def _enter_eagle2(self, ops: Ops, x: Any, buffers: StepBuffers, rows: Rows, hidden: Any) -> None:
        """x = [norm1(embedding) | norm2(hidden)] fc^T + bias."""
        norms, bias = (self.weights["input_norm1"], self.weights["input_norm2"]), self.weights["fc_bias"]
        embedding, eps = self._embed(ops, buffers, rows), self.draft.layers_config.rms_norm_eps
        ops.clear(x)
        if not self.draft.has_split_fc:
            ops.join(buffers["joined"], embedding, norms[0], hidden, norms[1], eps)
            ops.project_residual(x, buffers["joined"], self.fc[0], bias, 1.0, is_prefill=rows.is_prefill)
            return
        for half, norm, weight, added in zip((embedding, hidden), norms, self.fc, (bias, None), strict=True):
            inner = half
            if norm is not None:
                inner = buffers["normed"]
                ops.rms_norm(inner, half, norm, eps)
            ops.project_residual(x, inner, weight, added, 1.0, is_prefill=rows.is_prefill)

    def _enter_eagle3(self, ops: Ops, x: Any, buffers: StepBuffers, rows: Rows, hidden: Any, is_first: bool) -> None:
        """x = hidden fc^T, or in later passes hidden itself; layer 0 reads [norm(embedding) | norm(x)]."""
        if is_first:
            ops.clear(x)
            bias = self.weights["fc_bias"]
            ops.project_residual(x, hidden, self.fc[0], bias, 1.0, is_prefill=rows.is_prefill)
        else:
            ops.copy_columns(x, hidden, 0)
        embedding, norm = self._embed(ops, buffers, rows), self.weights["layers.0.attention_norm"]
        eps = self.draft.layers_config.rms_norm_eps
        ops.join(buffers["joined"], embedding, norm, x, self.weights["hidden_norm"], eps)
