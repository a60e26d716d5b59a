"""The operations of a draft in NumPy: those beside the target's other steps, and those of a speculative step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.config.speculation import LONGEST_MATCH
from cpmrt.dtypes import F32
from cpmrt.executor import SlotResult, TreeMasks
from cpmrt.ops import Rows
from cpmrt.reference.draft_tree import TreeGrowth, chain_nodes, lookup, top_k, without_others

if TYPE_CHECKING:
    from cpmrt.reference.drafting import Drafter


class Tip(Protocol):
    """The end of a sequence that is drafted for: its last token stands at `position`, and is not cached yet."""

    position: int

    @property
    def last_token(self) -> int: ...

    @property
    def finished(self) -> bool: ...


class DraftStep:
    """The operations of a draft beside the target's steps (`speculation.procedure.DraftOps`).

    `position` is that of the first slot's last token, or the first position of a chunk of its prompt.
    """

    def __init__(self, drafter: Drafter, slots: tuple[int, ...], position: int):
        self._drafter, self._slots, self._slot, self._position = drafter, slots, slots[0], position
        self._hidden: F32 | None = None
        self._lead = 0 if drafter.draft.config.reads_states else 1
        """The position of the draft's row for a token, counted from the position before the token. It is 0 for a draft
        that reads the target's state there, 1 for an independent model, whose row is at the token's own position."""

    def waiting(self, num_rows: int) -> None:
        drafter, newest = self._drafter, slice(num_rows - 1, num_rows)
        if drafter.draft.block_rows:
            drafter.see(self._rows, self._hidden)
        else:
            self._logits = drafter.run(self._rows, self._hidden, newest, is_first=True)

    def catch_up_begin(self, num_rows: int) -> None:
        self._set_waiting(num_rows)

    def catch_up_end(self) -> None:
        carry = self._drafter.carry
        if carry is not None:
            carry[self._slot, 0] = carry[self._slot, len(self._rows.token_ids) - 1]
        self._show_inner()

    def chunk_begin(self, num_rows: int) -> None:
        carry, first = self._drafter.carry, 0
        if carry is not None:
            # The chunk's first token needs the state before it, which a chunk before this one has left.
            first, hidden = 1 - self._drafter.waiting.of(self._slot), self._drafter.buffers["hidden"]
            hidden[0] = carry[self._slot, 0]
            carry[self._slot, 0] = hidden[num_rows]
            self._hidden = hidden[first:num_rows]
        self._set_rows(self._position + first, num_rows - first, is_prefill=True)

    def chunk(self, num_rows: int) -> None:
        if len(self._rows.token_ids):
            self._drafter.see(self._rows, self._hidden)
        self._show_inner()

    def carry(self, num_rows: int) -> None:
        drafter = self._drafter
        if drafter.carry is not None:
            for row, slot in enumerate(self._slots):
                behind = self._slots[row:].count(slot)
                drafter.carry[slot, drafter.waiting.of(slot) - behind] = drafter.buffers["hidden"][1 + row]

    def _show_inner(self) -> None:
        """Show a small model's own draft the tokens that the small model has just run."""
        if self._drafter.chains is not None:
            self._drafter.chains.see(self._rows)

    def _set_waiting(self, num_rows: int) -> None:
        carry = self._drafter.carry
        self._set_rows(self._position + 1 - num_rows, num_rows)
        self._hidden = None if carry is None else carry[self._slot, :num_rows]

    def _set_rows(self, first: int, count: int, *, is_prefill: bool = False) -> None:
        """Set up the draft's rows for the `count` tokens at `first` and on."""
        tokens = self._drafter.history[self._slot, first : first + count].astype(np.int64)
        positions, slots = first - 1 + self._lead + np.arange(count), np.full(count, self._slot)
        self._rows = Rows(tokens, positions, slots, self._drafter.block_tables, is_prefill)


class TreeStep(DraftStep):
    """The operations of `DraftStep`, and those of a speculative step (`BlockOps` and `ChainOps` of
    `speculation.procedure`)."""

    def __init__(self, drafter: Drafter, slot: int, running: Tip, shape: TreeShape, masks: TreeMasks | None = None):
        super().__init__(drafter, (slot,), running.position)
        self.results: list[SlotResult] = []
        """The result of each node of the accepted path."""
        self._running, self._growth, self._masks = running, TreeGrowth(shape), masks
        self._bits: Mapping[int, bytes | None] = {}
        """The mask bits of each node that the masks do not cut, by its number."""

    def begin(self, num_rows: int) -> None:
        if num_rows:
            self._set_waiting(num_rows)

    def top_k(self, shape: TreeShape, rows: slice) -> None:
        token_map = self._drafter.token_map
        found = [top_k(logits, shape.top_k) for logits in self._logits]
        ids, logprobs = (np.stack(of_rows) for of_rows in zip(*found, strict=True))
        has_room = (self._rows.slots[rows] >= 0)[:, None]
        self._growth.grow(ids if token_map is None else token_map[ids], np.where(has_room, logprobs, -np.inf))

    def grow(self, shape: TreeShape, depth: int, rows: slice) -> None:
        drafter, frontier = self._drafter, self._growth.frontier
        self._hidden = None
        if drafter.draft.config.is_eagle:
            parents: F32 = drafter.buffers["draft.parents"][: shape.top_k]
            parents[:] = drafter.buffers["draft.x"][rows][frontier.parent_rows]
            self._hidden = parents
        base = self._position + self._lead
        self._rows = drafter.tree_rows(
            self._slot, base, frontier.tokens, np.full(shape.top_k, base + depth - 1),
            base + (depth - 1) * shape.top_k + np.arange(shape.top_k), frontier.masks,
        )  # fmt: skip

    def frontier(self, num_rows: int) -> None:
        self._logits = self._drafter.run(self._rows, self._hidden, slice(num_rows), is_first=False)

    def finish(self, shape: TreeShape) -> None:
        self.nodes = self._growth.nodes(self._running.last_token)

    def block(self, num_rows: int) -> None:
        drafter, block = self._drafter, self._drafter.draft.config.block
        assert block is not None
        tokens = np.full(num_rows, block.mask_token_id)
        tokens[0] = self._running.last_token
        positions = self._position + np.arange(num_rows)
        fits = (positions < drafter.capacities[self._slot]) & (positions < drafter.max_context)
        self._rows = Rows(
            tokens, np.where(fits, positions, 0), np.where(fits, self._slot, -1), drafter.block_tables, False,
            reach=np.full(num_rows, positions[fits][-1]),
        )  # fmt: skip
        self._states, self._logits = drafter.run_block(self._rows)

    def chain(self, shape: TreeShape) -> None:
        num_rows = int(np.count_nonzero(self._rows.slots >= 0))
        tokens = self._drafter.chosen(
            self._states, self._logits, self._running.last_token, min(shape.tree_size - 1, num_rows)
        )
        self.nodes = chain_nodes(self._running.last_token, tokens, shape.tree_size)

    def inner_steps(self, shape: TreeShape) -> None:
        chains = self._drafter.chains
        assert chains is not None
        # The inner draft's passes use the memory in which the logits are.
        logits = self._logits[0].copy()
        self._show_inner()
        tokens = chains.chain(self._slot, self._position, logits, shape.tree_depth)
        self.nodes = chain_nodes(self._running.last_token, tokens, shape.tree_size)

    def root_alone(self) -> None:
        """Set up a tree that is the root alone: nothing is drafted."""
        self.nodes = chain_nodes(self._running.last_token, (), 1)

    def lookup(self, shape: TreeShape) -> None:
        text = self._drafter.history[self._slot, : self._position + 1]
        self.nodes = chain_nodes(self._running.last_token, lookup(text, shape.tree_size - 1), shape.tree_size)

    def lookup_instead(self, shape: TreeShape) -> None:
        text = self._drafter.history[self._slot, : self._position + 1]
        found = lookup(text, shape.lookup_length, LONGEST_MATCH)
        if found:
            self.nodes = chain_nodes(self._running.last_token, found, len(found) + 1)

    def verify(self, shape: TreeShape) -> None:
        if self._masks is not None:
            self._bits = self._masks.of_nodes(self.nodes.tokens.tolist(), self.nodes.parents.tolist())
            self.nodes = without_others(self.nodes, self._bits)
        nodes, base, numbers = self.nodes, self._position, np.arange(len(self.nodes.tokens))
        self._rows = self._drafter.tree_rows(
            self._slot, base, nodes.tokens, base + nodes.depths, base + numbers, nodes.masks,
            (nodes.parents >= 0) | (numbers == 0),
        )  # fmt: skip
        self._logits = self._drafter.target.run(self._rows)

    def sample(self, shape: TreeShape) -> None:
        running, nodes, self._path = self._running, self.nodes, list[int]()
        children = np.zeros(1, np.int64)
        while len(children) and not running.finished:
            self._path.append(int(children[0]))
            running.position += 1
            node = self._path[-1]
            self.results.append(self._drafter.target.sample(self._slot, self._logits[node], self._bits.get(node)))
            fits = (nodes.parents == self._path[-1]) & (self._rows.slots >= 0)
            children = np.flatnonzero(fits & (nodes.tokens == running.last_token))

    def accept(self, shape: TreeShape) -> None:
        drafter, path = self._drafter, self._path
        drafter.target.keep(self._slot, self._position, path)
        if drafter.carry is not None:
            drafter.carry[self._slot, : len(path)] = drafter.buffers["hidden"][1 + np.array(path)]
        drafter.waiting.accepted(self._slot, len(path))
