"""Drafting in NumPy: a draft's text and states of each slot, and its passes. `draft_steps` has a step's operations.

A draft model is behind the target by the tokens that wait in `carry`: with EAGLE, the draft's row at position q joins
the embedding of token q + 1 and the target's hidden state of token q. Keys and values that the draft itself writes past
the last token are overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.dtypes import F32, Array, DType
from cpmrt.executor import SlotResult, TreeMasks
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout, pages_for
from cpmrt.models.draft import PREFIX, Draft, DraftModel
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.ops import Fp8Pages, KVPages, Ops, Rows
from cpmrt.reference.blas_threads import BlasThreads
from cpmrt.reference.draft_block import choose_block
from cpmrt.reference.draft_steps import DraftStep, Tip, TreeStep
from cpmrt.reference.draft_tree import Nodes
from cpmrt.reference.fp8_pages import accept_nodes
from cpmrt.reference.quantized import Matrix, rows_of
from cpmrt.reference.sparse_attention import append_compressed
from cpmrt.speculation.procedure import (
    MAX_WAITING,
    Waiting,
    after_chunk,
    catch_up,
    propose,
    propose_block,
    propose_chain,
    verify,
)
from cpmrt.tensor_spec import BufferSpec

if TYPE_CHECKING:
    from cpmrt.reference.inner_draft import ChainDrafter

_UNKNOWN = -1


def drafting_tables(draft: Draft, max_context: int, max_sequences: int) -> tuple[BufferSpec, ...]:
    """Return the buffers that live as long as the executor: `history`, int32, the token at each position of a slot, and
    `carry`, the target's hidden states of the tokens that wait. `draft.carry` has a small model's, for its own draft.
    """
    tables = [BufferSpec("history", (max_sequences, pages_for(max_context) * PAGE_SIZE), EMBED, HEAD, np.int32)]
    for name, one in (("carry", draft), (f"{PREFIX}carry", draft.inner)):
        if one is not None and one.config.hidden_width:
            tables.append(BufferSpec(name, (max_sequences, MAX_WAITING, one.config.hidden_width), EMBED, HEAD))
    return tuple(tables)


@dataclass(frozen=True)
class Target:
    """The target's part in a speculative step, as functions of the executor.

    `run` gives the logits of every row, `sample(slot, logits, bits)` the token after the sequence's last one, among
    those of `bits`. `keep(slot, base, path)` moves the keys and values of the path's nodes to positions `base` and on,
    and takes the path into recurrent states.
    """

    run: Callable[[Rows], F32]
    sample: Callable[[int, F32, bytes | None], SlotResult]
    keep: Callable[[int, int, Sequence[int]], None]


def bound_model(
    draft: Draft, arrays: Mapping[str, Any], caches: CacheLayout | None, taps: tuple[int, ...] = ()
) -> DraftModel | None:
    """Bind the passes of a draft to its arrays; None: it has no layers. `taps` as in `DraftModel.bind`."""
    if caches is None:
        return None
    whole, halves = arrays.get(f"{PREFIX}fc_halves"), list[Matrix]()
    if whole is not None:
        hidden = draft.config.layers_config.hidden_size
        halves = [rows_of(whole, slice(first, first + hidden)) for first in (0, hidden)]
    return DraftModel.bind(draft.config, arrays, caches, tuple(halves), taps)


class Drafter:
    """Drafts for all slots. `model` None: prompt lookup. `arrays` are the executor's, `capacities` the positions that
    the pages of each slot hold."""

    def __init__(
        self,
        draft: Draft,
        model: DraftModel | None,
        target: Target,
        ops: Ops,
        arrays: Mapping[str, Any],
        block_tables: Array,
        capacities: Array,
        max_context: int,
        threads: BlasThreads,
    ):
        self.model, self.target, self.buffers, self._ops, self._threads = model, target, arrays, ops, threads
        self.block_tables, self.capacities, self.max_context = block_tables, capacities, max_context
        self.history: Array = arrays["history"]
        self.carry: F32 | None = arrays.get("carry")
        self.token_map: Array | None = arrays.get("draft.token_map")
        self.draft = draft
        self.waiting = Waiting()
        self.chains: ChainDrafter | None = None
        """Drafts the chains of a small model with a draft of its own; None for any other draft."""
        self.num_passes = 0
        """The number of passes of the draft that have given logits so far, without those over blocks (`run_block`)."""
        self._num_recalled = [0] * len(block_tables)

    def admit(self, slot: int) -> None:
        """Forget the slot's text."""
        self.history[slot] = _UNKNOWN
        self.waiting.admitted(slot)
        self._num_recalled[slot] = 0
        if self.chains is not None:
            self.chains.admit(slot)

    def recall(self, slot: int, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of a prompt that is in the pages already."""
        start = self._num_recalled[slot]
        self._num_recalled[slot] += len(token_ids)
        self.history[slot, start : self._num_recalled[slot]] = token_ids

    def sampled(self, slot: int, position: int, token: int) -> None:
        """Note that `token` stands at `position`."""
        if position < self.history.shape[1]:
            self.history[slot, position] = token

    def prefilled(self, slot: int, token_ids: Sequence[int], start: int) -> None:
        """Take in a chunk of the prompt; its hidden states of the target are in rows 1 and on of `hidden`."""
        count = len(token_ids)
        self.history[slot, start : start + count] = token_ids
        if self.model is not None:
            after_chunk(DraftStep(self, (slot,), start), count)
            self.waiting.prefilled(slot)

    def decoding(self, positions: Mapping[int, int], counts: Mapping[int, int]) -> None:
        """Make room among the waiting tokens for those of a plain decode step: `counts` of each slot, of which the
        first is the slot's last token so far and stands at `positions`."""
        if self.model is not None:
            waited = {slot: self.waiting.of(slot) for slot in counts}
            for slot in self.waiting.before_decode(counts):
                catch_up(DraftStep(self, (slot,), positions[slot]), waited[slot])

    def decoded(self, slots: Sequence[int]) -> None:
        """Take in the states that a plain decode step has left in `hidden`; `slots` has the slot of each row."""
        if self.model is not None:
            DraftStep(self, tuple(slots), 0).carry(len(slots))

    def speculate(
        self, slot: int, running: Tip, shape: TreeShape, masks: TreeMasks | None = None
    ) -> list[SlotResult]:
        """Carry out a speculative step; return the result of each node of the accepted path."""
        step = TreeStep(self, slot, running, shape, masks)
        self._propose(step, slot, shape)
        verify(step, shape)
        return step.results

    def proposed(self, slot: int, running: Tip, shape: TreeShape) -> Nodes:
        """Return the tree that a speculative step would verify."""
        step = TreeStep(self, slot, running, shape)
        self._propose(step, slot, shape)
        return step.nodes

    def _propose(self, step: TreeStep, slot: int, shape: TreeShape) -> None:
        num_waiting = self._num_waiting(slot)
        if self.draft.block_rows:
            propose_block(step, shape, num_waiting, self.draft.block_rows)
        elif self.chains is not None:
            propose_chain(step, shape, num_waiting)
        else:
            propose(step, shape, num_waiting)

    def step_alone(self, slot: int, running: Tip, shape: TreeShape) -> None:
        """Carry out a step in which nothing is drafted."""
        step = TreeStep(self, slot, running, shape)
        step.root_alone()
        verify(step, shape)

    def beside(self, draft: Draft, model: DraftModel | None, target: Target, arrays: Mapping[str, Any]) -> Drafter:
        """Return a drafter of another draft and target for the same slots."""
        return Drafter(
            draft, model, target, self._ops, arrays, self.block_tables, self.capacities, self.max_context, self._threads
        )

    def _num_waiting(self, slot: int) -> int:
        return 0 if self.model is None else self.waiting.of(slot)

    def see(self, rows: Rows, hidden: F32 | None) -> None:
        """Run rows of the draft after which nothing is drafted."""
        assert self.model is not None
        hidden = self.chains.states(len(rows.token_ids)) if self.chains else hidden
        with self._threads.for_step():
            self.model.see(self._ops, rows, hidden)

    def run(self, rows: Rows, hidden: F32 | None, logit_rows: slice, *, is_first: bool) -> F32:
        """Run a pass of the draft; return the logits of `logit_rows`."""
        assert self.model is not None
        self.num_passes += 1
        hidden = self.chains.states(len(rows.token_ids)) if self.chains else hidden
        with self._threads.for_step():
            _, logits = self.model.forward(self._ops, rows, hidden, logit_rows, is_first=is_first)
        found: F32 = logits
        return found

    def run_block(self, rows: Rows) -> tuple[F32, F32]:
        """Run the one pass of a DSpark draft over a block; return the outputs and the logits of its rows."""
        assert self.model is not None
        with self._threads.for_step():
            states, logits = self.model.block(self._ops, rows)
        return states, logits

    def chosen(self, states: F32, logits: F32, root_token: int, length: int) -> list[int]:
        """Return the tokens that the Markov head chooses for a block, at most `length` of them (`choose_block`)."""
        assert self.model is not None
        markov = self.model.markov_weights()
        least, token_map = self.draft.min_confidence, self.token_map
        return choose_block(logits, states, root_token, length, markov, least, token_map)

    def tree_rows(
        self, slot: int, base: int, tokens: Array, positions: Array, locations: Array, masks: Array,
        there: Array | bool = True,
    ) -> Rows:
        """Return the rows of tree nodes behind the `base` decided positions. A row that does not fit the slot's pages
        or the context, or is not `there`, is padding (slot -1)."""
        fits = there & (locations < self.capacities[slot]) & (positions < self.max_context)
        return Rows(
            tokens.astype(np.int64), np.where(fits, positions, 0), np.where(fits, slot, -1), self.block_tables, False,
            np.where(fits, locations, 0), masks, np.full(len(tokens), base),
        )  # fmt: skip


def move_path(moved: Iterable[F32], block_table: Array, base: int, path: Sequence[int]) -> None:
    """Move the rows of the path's nodes in the caches `moved` [layers, P, ..., 64, D] to positions `base` and on."""
    for cache in moved:
        for position, node in enumerate(path):
            if position != node:
                to, source = (divmod(base + place, PAGE_SIZE) for place in (position, node))
                cache[:, block_table[to[0]], :, to[1]] = cache[:, block_table[source[0]], :, source[1]]


def keep_path(
    moved: Iterable[F32], pages: Iterable[KVPages], block_table: Array, base: int, path: Sequence[int], dtype: DType
) -> None:
    """Move the path as `move_path` does. In the `pages` of each layer, fp8 pages get the path's codes, and the windows
    of sparse attention that end within the path are compressed."""
    move_path(moved, block_table, base, path)
    for kv in pages:
        for part in (kv.k, kv.v):
            if isinstance(part, Fp8Pages):
                accept_nodes(part, block_table, base, path)
        if kv.compressed is not None:
            positions = range(base, base + len(path))
            append_compressed(kv.compressed.k1, kv.compressed.k2, kv.scored_keys, block_table, positions, dtype)
