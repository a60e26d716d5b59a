"""Drafting in NumPy: what a draft knows of each slot, and its passes from there to a tree.

A draft model is behind the target by the tokens that wait in `carry`: with EAGLE, the draft's row at position q joins
the embedding of token q + 1 and the target's hidden state of token q. What the draft itself writes past the last
token is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.dtypes import F32, Array
from cpmrt.memory.caches import PAGE_SIZE, pages_for
from cpmrt.models.draft import MAX_PENDING, Draft, DraftModel
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.ops import Ops, Rows
from cpmrt.reference.blas_threads import BlasThreads
from cpmrt.reference.draft_tree import Nodes, TreeGrowth, chain_nodes, lookup, top_k
from cpmrt.tensor_spec import BufferSpec

_UNKNOWN = -1


def drafting_tables(draft: Draft, max_context: int, max_sequences: int) -> tuple[BufferSpec, ...]:
    """What lives as long as the executor: `history`, int32, the token at each position of a slot; `carry`, the target's
    hidden states that the draft has not seen."""
    tables = [BufferSpec("history", (max_sequences, pages_for(max_context) * PAGE_SIZE), EMBED, HEAD, np.int32)]
    if draft.config.hidden_width:
        tables.append(BufferSpec("carry", (max_sequences, MAX_PENDING, draft.config.hidden_width), EMBED, HEAD))
    return tuple(tables)


class Drafter:
    """One draft for all slots; `model` None: prompt lookup. `arrays` are the executor's, `capacities` the positions
    that the pages of each slot hold."""

    def __init__(
        self,
        draft: Draft,
        model: DraftModel | None,
        ops: Ops,
        arrays: Mapping[str, Any],
        block_tables: Array,
        capacities: Array,
        max_context: int,
        threads: BlasThreads,
    ):
        self._draft, self._model, self._ops, self._buffers = draft, model, ops, arrays
        self._block_tables, self._capacities, self._max_context = block_tables, capacities, max_context
        self._threads = threads
        self._history: Array = arrays["history"]
        self._carry: F32 | None = arrays.get("carry")
        self._num_waiting = [0] * len(block_tables)
        self._num_recalled = [0] * len(block_tables)
        self._lead = 0 if draft.config.is_eagle else 1
        """Of a token over the draft's row for it: an independent model has its row at the token's own position."""

    def admit(self, slot: int) -> None:
        """Nothing is known of the slot's text."""
        self._history[slot] = _UNKNOWN
        self._num_waiting[slot] = self._num_recalled[slot] = 0

    def recall(self, slot: int, token_ids: Sequence[int]) -> None:
        """The next tokens of a prompt that is in the pages already."""
        start = self._num_recalled[slot]
        self._num_recalled[slot] += len(token_ids)
        self._history[slot, start : self._num_recalled[slot]] = token_ids

    def sampled(self, slot: int, position: int, token: int) -> None:
        """`token` stands at `position`."""
        if position < self._history.shape[1]:
            self._history[slot, position] = token

    def prefilled(self, slot: int, token_ids: Sequence[int], start: int) -> None:
        """The target has run a chunk of the prompt; its hidden states are rows 1 and on of `hidden`."""
        count = len(token_ids)
        self._history[slot, start : start + count] = token_ids
        if self._model is None:
            return
        hidden, first = self._buffers.get("hidden"), 0
        if hidden is not None and self._carry is not None:
            # The chunk's first token needs the state before it, which a chunk before this one has left.
            first = 1 - self._num_waiting[slot]
            hidden[0] = self._carry[slot, 0]
            self._carry[slot, 0] = hidden[count]
            hidden = hidden[first:count]
        self._num_waiting[slot] = 1
        if first < count:
            positions = start - 1 + self._lead + np.arange(first, count)
            rows = self._rows(token_ids[first:], positions, slot, is_prefill=True)
            self._run(rows, hidden, None, is_first=True)

    def before_decode(self, slot: int, position: int) -> None:
        """Make room for one more waiting token."""
        if self._model is not None and self._num_waiting[slot] == MAX_PENDING:
            self._catch_up(slot, position, None)
            self._num_waiting[slot] = 0

    def decoded(self, slot: int, row: int) -> None:
        """A plain step of the target, whose row `row` was this slot's."""
        if self._carry is not None:
            self._carry[slot, self._num_waiting[slot]] = self._buffers["hidden"][1 + row]
        self._num_waiting[slot] += 1

    def accepted(self, slot: int, path: Sequence[int]) -> None:
        """The target has run a tree, of which the nodes `path` stay."""
        if self._carry is not None:
            self._carry[slot, : len(path)] = self._buffers["hidden"][1 + np.array(path)]
        self._num_waiting[slot] = len(path)

    def propose(self, slot: int, position: int, shape: TreeShape) -> Nodes:
        """The tree for the next step of a slot, whose last token stands at `position`."""
        root = int(self._history[slot, position])
        if self._model is None:
            drafted = lookup(self._history[slot, : position + 1], shape.tree_size - 1)
            return chain_nodes(root, drafted, shape.tree_size)
        growth = TreeGrowth(shape)
        num_waiting = self._num_waiting[slot]
        logits = self._catch_up(slot, position, slice(num_waiting - 1, num_waiting))
        growth.add_root(*self._best(logits[0], shape.top_k))
        outputs = self._buffers["draft.x"][num_waiting - 1 : num_waiting]
        for depth in range(1, shape.num_passes):
            frontier = growth.frontier
            rows = self._frontier_rows(slot, position + self._lead, depth, frontier.tokens, frontier.masks)
            parents = None
            if self._draft.config.is_eagle:
                parents = self._buffers["draft.parents"][: shape.top_k]
                parents[:] = outputs[frontier.parent_rows]
            logits = self._run(rows, parents, slice(None), is_first=False)
            best = [self._best(row, shape.top_k) for row in logits]
            logprobs = np.where((rows.slots >= 0)[:, None], np.stack([found for _, found in best]), -np.inf)
            growth.grow(np.stack([ids for ids, _ in best]), logprobs)
            outputs = self._buffers["draft.x"][: shape.top_k]
        return growth.nodes(root)

    def _catch_up(self, slot: int, position: int, logit_rows: slice | None) -> F32:
        """Run the tokens that wait; the last of them is the one at `position`."""
        count = self._num_waiting[slot]
        tokens = self._history[slot, position - count + 1 : position + 1]
        rows = self._rows(tokens, position + self._lead - count + np.arange(count), slot)
        hidden = None if self._carry is None else self._carry[slot, :count]
        return self._run(rows, hidden, logit_rows, is_first=True)

    def _frontier_rows(self, slot: int, base: int, depth: int, tokens: Array, masks: Array) -> Rows:
        """Behind the `base` positions that are decided; what does not fit is padding."""
        count = len(tokens)
        position, locations = base + depth - 1, base + (depth - 1) * count + np.arange(count)
        fits = (locations < self._capacities[slot]) & (position < self._max_context)
        slots = np.where(fits, slot, -1)
        return Rows(
            tokens.astype(np.int64), np.where(fits, position, 0), slots, self._block_tables, False,
            np.where(fits, locations, 0), masks, np.full(count, base),
        )  # fmt: skip

    def _rows(self, tokens: Any, positions: Array, slot: int, *, is_prefill: bool = False) -> Rows:
        slots = np.full(len(positions), slot)
        return Rows(np.array(tokens, np.int64), positions, slots, self._block_tables, is_prefill)

    def _run(self, rows: Rows, hidden: F32 | None, logit_rows: slice | None, *, is_first: bool) -> F32:
        """A pass; the logits of `logit_rows`."""
        assert self._model is not None
        with self._threads.for_rows(len(rows.token_ids)):
            _, logits = self._model.forward(self._ops, rows, hidden, logit_rows, is_first=is_first)
        found: F32 = logits
        return found

    def _best(self, logits: F32, count: int) -> tuple[Array, F32]:
        """The best tokens of one row, as the target calls them, and their log-probabilities."""
        ids, logprobs = top_k(logits, count)
        return (ids if self._draft.token_map is None else self._buffers["draft.token_map"][ids]), logprobs
