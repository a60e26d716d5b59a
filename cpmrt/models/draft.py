"""The draft models of speculation: weights, buffers and forwards, written once for every executor.

Everything of a draft is named `draft.*`, beside the target's. EAGLE-2 (arXiv 2406.16858) and EAGLE-3 (arXiv
2503.01840) continue the target's hidden states and use its embedding; EAGLE-2 its head too, or some rows of it
(FR-Spec, arXiv 2502.14856). An independent model is a decoder like any other. Prompt lookup has no forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpmrt.config import ModelConfig, TreeShape
from cpmrt.config.draft import DraftConfig
from cpmrt.config.speculation import MAX_NODES
from cpmrt.memory.kv_pages import KVLayout
from cpmrt.models import decoder
from cpmrt.models.attention import attend, layer_pages
from cpmrt.models.decoder import ATTENTION, DOWN, EMBED, GATE_UP, HEAD, OUTPUT, QKV, LayerWeights
from cpmrt.ops import Ops, Rows
from cpmrt.tensor_spec import BufferSpec, Source, TensorSpec

Arrays = Mapping[str, Any]
PREFIX = "draft."
MAX_PENDING = MAX_NODES
"""Tokens of a slot that may wait for the draft, and rows of the target's states that are kept for them."""
# The phases of a draft pass come after all of the target's, whose buffers are free by then.
_LATER = HEAD + 1
LAST_PHASE = _LATER + HEAD


@dataclass(frozen=True)
class Draft:
    """A draft as an executor holds it.

    `specs` are made of the draft's checkpoint, `head` of the target's: all of its head in fewer bits, or the rows
    `token_map`. The draft's head without a weight `draft.lm_head` is the target's. `token_map` gives the target's id of
    each row of the head; None: they are the same.
    """

    config: DraftConfig
    shapes: tuple[TreeShape, ...]
    specs: tuple[TensorSpec, ...] = ()
    head: TensorSpec | None = None
    token_map: tuple[int, ...] | None = None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.specs if self.head is None else (*self.specs, self.head)

    @property
    def vocab_size(self) -> int:
        """Rows of its head."""
        return self.config.draft_vocab if self.token_map is None else len(self.token_map)

    @property
    def max_logit_rows(self) -> int:
        """Rows of a pass that reach the draft's head."""
        return max(shape.top_k for shape in self.shapes)

    @property
    def max_tree_size(self) -> int:
        """Rows of the target's pass over a tree."""
        return max(shape.tree_size for shape in self.shapes)

    def kv_layout(self, max_context: int, max_sequences: int) -> KVLayout | None:
        """Of its own pages, which have the target's numbers; None: it has none."""
        if self.config.decoder is None:
            return None
        return KVLayout.of(self.config.decoder, max_context, max_sequences)


def prefixed(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Under the names that the draft's weights have beside the target's."""
    return tuple(replace(spec, name=PREFIX + spec.name) for spec in specs)


def own(arrays: Arrays) -> dict[str, Any]:
    """The draft's arrays among all, by their names without `draft.`."""
    return {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}


def tensor_specs(draft: DraftConfig) -> tuple[TensorSpec, ...]:
    """Every weight of the draft's checkpoint in 16 bits, without the prefix.

    A split `fc` is the spec `fc_halves` [2h, h]: the executor hands its two halves of rows to `draft_forward` as
    `draft.fc_embedding` and `draft.fc_hidden`.
    """
    if draft.decoder is None:
        return ()
    if not draft.is_eagle:
        return decoder.tensor_specs(draft.decoder)
    return tuple(_eagle_specs(draft, draft.decoder))


def _eagle_specs(draft: DraftConfig, config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, stem = config.hidden_size, draft.stem
    for name in ("input_norm1", "input_norm2") if draft.has_input_norms else ():
        yield _single(name, f"{stem}{name}.weight", hidden)
    columns = draft.hidden_width if draft.taps else 2 * hidden
    if draft.has_split_fc:
        yield _single("fc_halves", f"{stem}fc.weight", 2 * hidden, hidden)
    else:
        yield _single("fc", f"{stem}fc.weight", hidden, columns)
    if draft.has_fc_bias:
        yield _single("fc_bias", f"{stem}fc.bias", hidden)
    for layer in range(config.num_layers):
        theirs = draft.layer_name.format(layer)
        joined = bool(draft.taps) and layer == 0
        if joined:
            yield _single("hidden_norm", f"{theirs}.hidden_norm.weight", hidden)
        for spec in decoder.layer_specs(config, f"layers.{layer}", theirs, inputs=2 * hidden if joined else hidden):
            if layer or draft.has_attention_norm or not spec.name.endswith(".attention_norm"):
                yield spec
    if draft.taps:
        yield _single("norm", f"{stem}norm.weight", hidden)
        yield _single("lm_head", "lm_head.weight", draft.draft_vocab, hidden)


def _single(name: str, source: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, (Source(source, shape),))


def buffer_specs(draft: Draft, max_rows: int) -> tuple[BufferSpec, ...]:
    """The workspace of the draft's passes, of at most `max_rows` rows (a prefill chunk, or 64).

    `hidden` has the target's states of a step, from the forward that leaves them to the last draft pass; in a prefill
    they begin in its row 1, behind the state that the chunk before left (row 0), so that the draft's row i finds its
    state in row i. `draft.parents` holds the states that a later pass continues. Sampling comes before the draft's
    passes, which overwrite the target's workspace.
    """
    config = draft.config.decoder
    if config is None:
        return ()
    hidden, rows = config.hidden_size, max_rows
    made = [
        BufferSpec("x", (rows, hidden), EMBED, HEAD),
        BufferSpec("q", (rows, config.q_size), QKV, ATTENTION),
        BufferSpec("attention", (rows, config.q_size), ATTENTION, OUTPUT),
        BufferSpec("inner", (rows, config.intermediate_size), GATE_UP, DOWN),
        BufferSpec("logits", (draft.max_logit_rows, draft.vocab_size), HEAD, HEAD, itemsize=4),
    ]
    if draft.config.is_eagle:
        made += [
            BufferSpec("embedding", (rows, hidden), EMBED, EMBED),
            BufferSpec("parents", (MAX_NODES, hidden), EMBED, HEAD),
            BufferSpec("normed", (rows, hidden), EMBED, EMBED)
            if draft.config.has_split_fc
            else BufferSpec("joined", (rows, 2 * hidden), EMBED, QKV),
        ]
    ours = [replace(spec, name=PREFIX + spec.name, first=spec.first + _LATER, last=spec.last + _LATER) for spec in made]
    if draft.config.hidden_width:
        ours.append(BufferSpec("hidden", (rows + 1, draft.config.hidden_width), EMBED, LAST_PHASE))
    return tuple(ours)


def table_specs(draft: Draft, max_context: int) -> tuple[BufferSpec, ...]:
    """What lives as long as the executor: `draft.rope` of its own rotation, `draft.token_map` (int32)."""
    tables = []
    if draft.config.decoder is not None:
        tables.append(_table("rope", 2, max_context, draft.config.decoder.head_dim // 2))
    if draft.token_map is not None:
        tables.append(_table("token_map", len(draft.token_map)))
    return tuple(tables)


def _table(name: str, *shape: int) -> BufferSpec:
    return BufferSpec(PREFIX + name, shape, EMBED, LAST_PHASE, itemsize=4)


def draft_forward(
    ops: Ops,
    draft: DraftConfig,
    weights: Arrays,
    buffers: Arrays,
    rows: Rows,
    hidden: Any | None,
    logit_rows: slice | None,
    *,
    is_first: bool,
) -> None:
    """Run rows through the draft: its output is in `buffers["draft.x"]` [T, h], the logits of `logit_rows` of them
    (None: of none) in `buffers["draft.logits"]`.

    `weights` are the target's and the draft's. `buffers`: views of the `draft.*` buffers with exactly the pass's rows,
    with `draft.k_pages`, `draft.v_pages` and `draft.rope` among them. `hidden` [T, w]: with `is_first` the target's
    states, taps side by side for EAGLE-3, one position behind the rows' tokens; else the output of an earlier pass for
    each row's parent. It may not overlap `draft.x`. An independent model takes none.

    Rows of a prefill chunk and of tokens that wait are causal and have no tree masks; later passes have.
    """
    assert draft.decoder is not None, "prompt lookup has no forward"
    if not draft.is_eagle:
        decoder.forward(ops, draft.decoder, own(weights), own(buffers), rows, logit_rows)
        return
    if draft.taps:
        _enter_eagle3(ops, draft.decoder, weights, buffers, rows, hidden, is_first)
    else:
        _enter_eagle2(ops, draft, draft.decoder, weights, buffers, rows, hidden)
    _layers(ops, draft, draft.decoder, weights, buffers, rows)
    if logit_rows is not None:
        _head(ops, draft.decoder, weights, buffers["draft.logits"], buffers["draft.x"][logit_rows])


def _enter_eagle2(
    ops: Ops, draft: DraftConfig, config: ModelConfig, weights: Arrays, buffers: Arrays, rows: Rows, hidden: Any
) -> None:
    """x = [norm1(embedding) | norm2(hidden)] fc^T + bias."""
    x, embedding, eps = buffers["draft.x"], buffers["draft.embedding"], config.rms_norm_eps
    norms = weights.get("draft.input_norm1"), weights.get("draft.input_norm2")
    bias = weights.get("draft.fc_bias")
    ops.embed(embedding, rows.token_ids, weights["embed_tokens"], config.scale_emb)
    ops.clear(x)
    if not draft.has_split_fc:
        joined = buffers["draft.joined"]
        ops.join(joined, embedding, norms[0], hidden, norms[1], eps)
        ops.project_residual(x, joined, weights["draft.fc"], bias, 1.0)
        return
    for half, norm, name in ((embedding, norms[0], "fc_embedding"), (hidden, norms[1], "fc_hidden")):
        inner = half
        if norm is not None:
            inner = buffers["draft.normed"]
            ops.rms_norm(inner, half, norm, eps)
        ops.project_residual(x, inner, weights[PREFIX + name], bias if name == "fc_embedding" else None, 1.0)


def _enter_eagle3(
    ops: Ops, config: ModelConfig, weights: Arrays, buffers: Arrays, rows: Rows, hidden: Any, is_first: bool
) -> None:
    """x = hidden fc^T, or in later passes hidden itself; layer 0 reads [norm(embedding) | norm(x)]."""
    x, embedding = buffers["draft.x"], buffers["draft.embedding"]
    if is_first:
        ops.clear(x)
        ops.project_residual(x, hidden, weights["draft.fc"], weights.get("draft.fc_bias"), 1.0)
    else:
        ops.copy_columns(x, hidden, 0)
    ops.embed(embedding, rows.token_ids, weights["embed_tokens"], config.scale_emb)
    embedding_norm = weights["draft.layers.0.attention_norm"]
    ops.join(buffers["draft.joined"], embedding, embedding_norm, x, weights["draft.hidden_norm"], config.rms_norm_eps)


def _layers(ops: Ops, draft: DraftConfig, config: ModelConfig, weights: Arrays, buffers: Arrays, rows: Rows) -> None:
    """The decoder layers, in place on `draft.x`."""
    own_buffers = own(buffers)
    x, inner, rope = own_buffers["x"], own_buffers["inner"], own_buffers["rope"]
    eps, residual_scale = config.rms_norm_eps, config.residual_scale
    for layer in range(config.num_layers):
        weight, kv = LayerWeights(weights, f"{PREFIX}layers.{layer}."), layer_pages(config, own_buffers, layer)
        # What EAGLE-3 has joined is normalised already.
        source, norm = (x, weight["attention_norm"]) if layer or not draft.taps else (own_buffers["joined"], None)
        after = ops.qkv(own_buffers["q"], kv, source, weight.qkv(norm), rope, rows, eps)
        attend(ops, config, own_buffers, kv, rows, after, draft.window)
        ops.project_residual(x, own_buffers["attention"], weight["output"], weight["output_bias"], residual_scale)
        after = ops.gate_up(inner, x, weight["mlp_norm"], weight["gate_up"], eps)
        ops.project_residual(x, inner, weight["down"], None, residual_scale, after)


def _head(ops: Ops, config: ModelConfig, weights: Arrays, logits: Any, x: Any) -> None:
    """Over the draft's vocabulary. EAGLE-2's output is not normalised once more: the target's head reads it as it is,
    with the target's divisor."""
    names = ("draft.lm_head", "lm_head", "embed_tokens")
    head = next(weights[name] for name in names if name in weights)
    ops.lm_head(logits, x, weights.get("draft.norm"), head, config.rms_norm_eps, config.logit_divisor)
