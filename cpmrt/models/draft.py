"""Drafts as executors hold them: their weights, buffers and caches beside the target's, and their passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.config.draft import DraftConfig
from cpmrt.config.speculation import MAX_NODES
from cpmrt.dtypes import Array
from cpmrt.memory.caches import CacheLayout
from cpmrt.models import decoder
from cpmrt.models.decoder import Decoder
from cpmrt.models.drafts import dspark, eagle
from cpmrt.models.drafts.dspark import DSpark, MarkovWeights
from cpmrt.models.drafts.eagle import Eagle
from cpmrt.models.layers import EMBED, HEAD, Table
from cpmrt.ops import Ops, Rows
from cpmrt.tensor_spec import BufferSpec, TensorSpec

PREFIX = "draft."
# The phases of a draft pass come after all of the target's, whose buffers are free by then.
_LATER = HEAD + 1
LAST_PHASE = _LATER + HEAD


@dataclass(frozen=True)
class Draft:
    """A draft that was opened: its config, the shapes of its trees, and its weights as they are to be held.

    `specs` are weights of the draft's checkpoint; `head` is a weight of the target's: its whole head in fewer bits, or
    the rows `token_map` of it. Without a weight `draft.lm_head` the draft uses the target's head. `token_map` gives the
    target's token id of each row of the draft's head; None: the ids are the same. `forced_accept`: the tokens that a
    step gives on average, whatever was sampled; None: a step gives those that the target agrees with. `min_confidence`:
    see `SpeculationConfig`. `inner` is the draft of a small model that drafts, and has that model as its target; its
    arrays have the names of any draft's behind one more `draft.`.
    """

    config: DraftConfig
    shapes: tuple[TreeShape, ...]
    specs: tuple[TensorSpec, ...] = ()
    head: TensorSpec | None = None
    token_map: tuple[int, ...] | None = None
    forced_accept: float | None = None
    min_confidence: float = 0.0
    inner: Draft | None = None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        own = self.specs if self.head is None else (*self.specs, self.head)
        return own if self.inner is None else (*own, *self.inner.tensors)

    @property
    def vocab_size(self) -> int:
        """The number of rows of its head."""
        return self.config.draft_vocab if self.token_map is None else len(self.token_map)

    @property
    def max_logit_rows(self) -> int:
        """The most rows of a pass that reach the draft's head."""
        if self.inner is not None:
            return self.inner.max_tree_size
        return self.block_rows or max(shape.top_k for shape in self.shapes)

    @property
    def block_rows(self) -> int:
        """The rows of the one pass that drafts a whole chain; 0 for a draft that drafts token by token."""
        return 0 if self.config.block is None else self.config.block.size

    @property
    def max_tree_size(self) -> int:
        """The most rows of the target's pass over a tree."""
        return max(shape.num_nodes for shape in self.shapes)

    def cache_layout(self, max_context: int, max_sequences: int) -> CacheLayout | None:
        """Return the draft's own caches, whose pages have the same numbers as the target's; None: it has none."""
        if self.config.decoder is None:
            return None
        return decoder.cache_layout(self.config.decoder, max_context, max_sequences, prefix=PREFIX)

    def inner_cache_layout(self, max_context: int, max_sequences: int) -> CacheLayout | None:
        """Return the caches of the inner draft; None: there are none."""
        layout = None if self.inner is None else self.inner.cache_layout(max_context, max_sequences)
        return layout and replace(layout, prefix=PREFIX + layout.prefix)


def prefixed(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the weights with the prefix of a draft's names, and in the part of the plan that is for drafts."""
    return tuple(replace(spec, name=PREFIX + spec.name, part="draft") for spec in specs)


def tensor_specs(draft: DraftConfig) -> tuple[TensorSpec, ...]:
    """Return every weight of the draft's checkpoint in 16 bits, without the prefix."""
    if draft.decoder is None:
        return ()
    if draft.block is not None:
        return tuple(dspark.tensor_specs(draft))
    return tuple(eagle.tensor_specs(draft)) if draft.is_eagle else decoder.tensor_specs(draft.decoder)


def buffer_specs(draft: Draft, max_rows: int, num_sequences: int = 1) -> tuple[BufferSpec, ...]:
    """Return the workspace of the draft's passes, of at most `max_rows` rows (a prefill chunk, or 64), in which trees
    of `num_sequences` sequences grow.

    The buffer `hidden` keeps the target's states of a step from the forward that writes them to the last draft pass. In
    a prefill they begin in its row 1, and row 0 has the state that the chunk before has left. So the draft's row i
    finds the state that it reads in row i. Sampling comes before the draft's passes, which overwrite the target's
    workspace.
    """
    config = draft.config.decoder
    if config is None:
        return ()
    made = list(decoder.layer_buffers(config, max_rows))
    logit_rows = max(draft.max_logit_rows, min(num_sequences * draft.max_logit_rows, MAX_NODES))
    made.append(BufferSpec("logits", (logit_rows, draft.vocab_size), HEAD, HEAD, np.float32))
    if draft.config.is_eagle:
        made += eagle.buffer_specs(draft.config, max_rows)
    if draft.config.block is not None:
        made += dspark.buffer_specs(draft.config, max_rows, logit_rows)
    if draft.inner is not None:
        made += buffer_specs(draft.inner, max_rows)
    ours = [replace(spec, name=PREFIX + spec.name, first=spec.first + _LATER, last=spec.last + _LATER) for spec in made]
    if draft.config.hidden_width:
        ours.append(BufferSpec("hidden", (max_rows + 1, draft.config.hidden_width), EMBED, LAST_PHASE))
    return tuple(ours)


def tables(draft: Draft, max_context: int, limit: int) -> tuple[Table, ...]:
    """Return the tables, which are computed once: those of the draft's layers, and `draft.token_map` (int32)."""
    found = [] if draft.config.decoder is None else list(decoder.tables(draft.config.decoder, max_context, limit))
    if draft.token_map is not None:
        token_map = draft.token_map
        spec = BufferSpec("token_map", (len(token_map),), EMBED, HEAD, np.int32)

        def pieces() -> Iterator[Array]:
            yield np.array(token_map, np.int32)

        found.append(Table(spec, pieces))
    if draft.inner is not None:
        found += tables(draft.inner, max_context, limit)
    return tuple(
        replace(table, spec=replace(table.spec, name=PREFIX + table.spec.name, last=LAST_PHASE)) for table in found
    )


@dataclass(frozen=True)
class DraftModel:
    """The passes of a draft with layers on the arrays of an executor."""

    model: Eagle | DSpark | Decoder
    arrays: Mapping[str, Any]

    @classmethod
    def bind(
        cls,
        draft: DraftConfig,
        arrays: Mapping[str, Any],
        caches: CacheLayout,
        halves: tuple[Any, ...] = (),
        taps: tuple[int, ...] = (),
    ) -> DraftModel:
        """Find the weights and caches by name. `halves` are the two matrices of a split fc of EAGLE-2, or empty; `taps`
        are the layers of a small model whose inputs its own draft reads."""
        if draft.is_eagle:
            return cls(Eagle.bind(draft, arrays, caches, halves), arrays)
        if draft.block is not None:
            return cls(DSpark.bind(draft, arrays, caches), arrays)
        return cls(Decoder.bind(draft.layers_config, arrays, caches, taps), arrays)

    def forward(
        self, ops: Ops, rows: Rows, hidden: Any | None, logit_rows: slice | None, *, is_first: bool
    ) -> tuple[Any, Any]:
        """Run rows through the draft; return x, its output, and the logits of `logit_rows` of them (None: of none).

        `hidden` has the states that an EAGLE draft reads (`Eagle.forward`); an independent model writes those that its
        own draft reads to it (`Decoder.forward`). A DSpark draft has `see` and `block` instead.
        """
        assert not isinstance(self.model, DSpark)
        if isinstance(self.model, Eagle):
            x = self.model.forward(ops, self.arrays, rows, hidden, is_first=is_first)
        else:
            x = self.model.forward(ops, self.arrays, rows, hidden)
        chosen = x[:0] if logit_rows is None else x[logit_rows]
        logits = self.arrays[f"{PREFIX}logits"][: len(chosen)]
        if logit_rows is not None:
            self.model.logits(ops, logits, chosen)
        return x, logits

    def see(self, ops: Ops, rows: Rows, hidden: Any | None) -> None:
        """Run rows after which nothing is drafted; `hidden` has the target's states as in `Eagle.forward`."""
        if isinstance(self.model, DSpark):
            self.model.commit(ops, self.arrays, rows, hidden)
        else:
            self.forward(ops, rows, hidden, None, is_first=True)

    def block(self, ops: Ops, rows: Rows) -> tuple[Any, Any]:
        """Run the rows of a DSpark draft's block; see `DSpark.block`."""
        assert isinstance(self.model, DSpark)
        return self.model.block(ops, self.arrays, rows)

    def markov_weights(self) -> MarkovWeights:
        """Return the weights of the heads that choose the tokens of a DSpark draft's block."""
        assert isinstance(self.model, DSpark)
        return self.model.markov_weights()
