"""The oracle in NumPy of the kernels of a speculative step: rows, state, history, pages and pending rows after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.reference.draft_tree import Frontier, Nodes, accept

Row = tuple[int, int, int, int, int, int]
"""The token, position, slot, location, mask and base of a row."""
PADDING: Row = (0, 0, -1, 0, 1, 0)


@dataclass
class Running:
    """A sequence in a slot.

    `tokens` are all its tokens; the newest, the root of the next tree, has no keys yet. `pending` [count, width] are
    the hidden states that the draft has not seen.
    """

    slot: int
    tokens: list[int]
    capacity: int
    max_context: int
    num_generated: int = 1
    max_new_tokens: int = 1000
    stop_token_ids: tuple[int, ...] = ()
    finished: bool = False
    pending: Any = field(default_factory=lambda: np.zeros((0, 8), np.uint16))

    @property
    def position(self) -> int:
        return len(self.tokens) - 1

    def place(self, token: int, position: int, location: int, mask: int, base: int) -> Row:
        """Return the row, or padding if there is no room for it or the sequence is finished."""
        fits = location < self.capacity and position < self.max_context and not self.finished
        return (token, position, self.slot, location, mask, base) if fits else PADDING

    def pending_rows(self, num_rows: int, offset: int) -> list[tuple[int, int, int, int]]:
        """Return (token, position, slot, location) of the rows of the draft's first pass, padding first."""
        count = 0 if self.finished else min(len(self.pending), num_rows)
        first = self.position - count
        own = [(self.tokens[q + 1], q + 1 - offset, self.slot, q + 1 - offset) for q in range(first, self.position)]
        return [(0, 0, -1, 0)] * (num_rows - count) + own

    def frontier_rows(self, frontier: Frontier, depth: int, offset: int) -> list[Row]:
        """Return the rows of the draft's pass `depth`, one for each token of the frontier."""
        base, k = self.position + 1 - offset, len(frontier.tokens)
        places = enumerate(zip(frontier.tokens.tolist(), frontier.masks.tolist(), strict=True), (depth - 1) * k)
        return [self.place(token, base + depth - 1, base + i, mask, base) for i, (token, mask) in places]

    def node_rows(self, nodes: Nodes) -> list[Row]:
        """Return the rows of the target's pass, one for each node."""
        p = self.position
        columns = (nodes.tokens, nodes.parents, nodes.depths, nodes.masks)
        rows = enumerate(zip(*(column.tolist() for column in columns), strict=True))
        return [
            self.place(token, p + depth, p + node, mask, p) if parent >= 0 or node == 0 else PADDING
            for node, (token, parent, depth, mask) in rows
        ]

    def accept(self, nodes: Nodes, sampled: list[int], hidden: Any) -> list[int]:
        """Find the accepted path, cut at a stop token and at the limit, and take it in; return it."""
        if self.finished:
            return []
        there = [row != PADDING for row in self.node_rows(nodes)]
        parents = np.where(there, nodes.parents, -2)
        path = accept(Nodes(nodes.tokens, parents, nodes.depths, nodes.masks), sampled)
        emitted = [sampled[node] for node in path]
        stops = [i for i, token in enumerate(emitted) if token in self.stop_token_ids]
        length = min(len(path), self.max_new_tokens - self.num_generated, *(stop + 1 for stop in stops[:1]))
        return self.take(path[:length], sampled, hidden)

    def take(self, path: list[int], sampled: list[int], hidden: Any) -> list[int]:
        """Append the tokens sampled at the path's nodes and keep its hidden states as pending; return the path."""
        emitted = [sampled[node] for node in path]
        self.tokens += emitted
        self.num_generated += len(path)
        self.finished = emitted[-1] in self.stop_token_ids or self.num_generated == self.max_new_tokens
        self.pending = hidden[path].copy()
        return path


def move_rows(pages: Any, table: Any, root: int, path: list[int]) -> Any:
    """Return pages [layers, pages, heads, 64, D] in which a path's keys or values have moved to their positions."""
    moved = pages.copy()
    for j, node in enumerate(path):
        source, target = root + node, root + j
        row = pages[:, table[source // PAGE_SIZE], :, source % PAGE_SIZE]
        moved[:, table[target // PAGE_SIZE], :, target % PAGE_SIZE] = row
    return moved
