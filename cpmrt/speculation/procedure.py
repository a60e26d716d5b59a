"""The drafting procedure of every executor: the operations of a speculative step, and those beside the other steps.

A draft has to see every token that the target sees. Tokens that it has not seen yet wait, with the target's hidden
states where the draft reads those, until the next pass over them. One token always waits after a pass that drafts
nothing: the newest, after which a speculative step begins to draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cpmrt.config import TreeShape
from cpmrt.config.speculation import MAX_NODES

MAX_WAITING = MAX_NODES
"""Tokens of a slot that may wait for the draft, and rows of the target's states that are kept for them."""


class DraftOps(Protocol):
    """The operations of a draft beside the target's steps, as an executor carries them out or captures them."""

    def waiting(self, num_rows: int) -> None:
        """Run the draft over the rows of tokens that wait. If it drafts token by token, the last row, the newest
        token's, has logits."""
        ...

    def catch_up_begin(self, num_rows: int) -> None:
        """Set up draft rows in a step that only catches up, the newest token's last."""
        ...

    def catch_up_end(self) -> None:
        """Leave the newest of the tokens waiting, and no other."""
        ...

    def chunk_begin(self, num_rows: int) -> None:
        """Set up draft rows for a chunk of the prompt that the target has just run; its last token waits."""
        ...

    def chunk(self, num_rows: int) -> None:
        """Run the draft over the rows that `chunk_begin` has set up."""
        ...

    def carry(self, num_rows: int) -> None:
        """Let the tokens of the target's decode step wait, a row each; those of a slot are consecutive."""
        ...


class TreeOps(DraftOps, Protocol):
    """The operations of a speculative step.

    Rows of a pass are counted from 0. Operations hand their results to the next ones in a form of the executor's own:
    the candidates of `top_k`, the nodes of the tree, the target's logits.
    """

    def begin(self, num_rows: int) -> None:
        """Set up draft rows for the tokens that wait, the newest in row `num_rows` - 1; 0: the draft has no model."""
        ...

    def top_k(self, shape: TreeShape, rows: slice) -> None:
        """Take the best `shape.top_k` tokens after each of these rows, which are those of the last pass with logits."""
        ...

    def grow(self, shape: TreeShape, depth: int, rows: slice) -> None:
        """Set up the rows of pass `depth` (from 1 on) for the best candidates; they follow `rows` of the last pass."""
        ...

    def frontier(self, num_rows: int) -> None:
        """Run the draft over the rows of the tree's newest level; all have logits."""
        ...

    def finish(self, shape: TreeShape) -> None:
        """Choose the tree's nodes among all candidates, and set up the target's rows for them."""
        ...

    def lookup(self, shape: TreeShape) -> None:
        """Draft a chain from the sequence's own text, and set up the target's rows for it."""
        ...

    def lookup_instead(self, shape: TreeShape) -> None:
        """Replace the tree by a chain from the sequence's own text, if its last tokens came before."""
        ...

    def verify(self, shape: TreeShape) -> None:
        """Run the target over the nodes."""
        ...

    def sample(self, shape: TreeShape) -> None:
        """Sample the target's token after each node that the path may reach."""
        ...

    def accept(self, shape: TreeShape) -> None:
        """Follow the tree as long as it has the sampled tokens; the path's keys and values go to their positions.

        The tokens sampled along the path are the step's result, and wait for the draft from then on.
        """
        ...


class BlockOps(TreeOps, Protocol):
    """The operations of a speculative step whose draft makes a whole chain in one pass."""

    def block(self, num_rows: int) -> None:
        """Run the draft over the newest token and the mask tokens behind it; all rows have logits."""
        ...

    def chain(self, shape: TreeShape) -> None:
        """Choose the tokens of the block one after another, and set up the target's rows for them."""
        ...


class ChainOps(TreeOps, Protocol):
    """The operations of a speculative step in which a small model with a draft of its own drafts a chain."""

    def inner_steps(self, shape: TreeShape) -> None:
        """Draft a chain behind the newest token by the small model's own speculative steps, and set up the target's
        rows for it. The small model has run the newest token already."""
        ...


def speculate(ops: TreeOps, shape: TreeShape, num_waiting: int) -> None:
    """Draft a tree, run the target over it, and accept what plain decoding would have given.

    `num_waiting`: rows of the first draft pass; 0: no model drafts, the text is looked up.
    """
    propose(ops, shape, num_waiting)
    verify(ops, shape)


def speculate_block(ops: BlockOps, shape: TreeShape, num_waiting: int, block_rows: int) -> None:
    """Draft a chain in one pass of `block_rows` rows, and go on as `speculate` does."""
    propose_block(ops, shape, num_waiting, block_rows)
    verify(ops, shape)


def speculate_chain(ops: ChainOps, shape: TreeShape, num_waiting: int) -> None:
    """Draft a chain by a small model's own speculative steps, and go on as `speculate` does."""
    propose_chain(ops, shape, num_waiting)
    verify(ops, shape)


def verify(ops: TreeOps, shape: TreeShape) -> None:
    """Run the target over what was drafted, and accept what plain decoding would have given."""
    ops.verify(shape)
    ops.sample(shape)
    ops.accept(shape)


def propose(ops: TreeOps, shape: TreeShape, num_waiting: int) -> None:
    """Draft a tree as `speculate` does, and no more; the next step overwrites all that this leaves."""
    ops.begin(num_waiting)
    if not num_waiting:
        ops.lookup(shape)
        return
    newest = slice(num_waiting - 1, num_waiting)
    ops.waiting(num_waiting)
    ops.top_k(shape, newest)
    for depth in range(1, shape.num_passes):
        ops.grow(shape, depth, newest)
        ops.frontier(shape.top_k)
        newest = slice(0, shape.top_k)
        ops.top_k(shape, newest)
    ops.finish(shape)
    _look_up_instead(ops, shape)


def propose_block(ops: BlockOps, shape: TreeShape, num_waiting: int, block_rows: int) -> None:
    """Draft a chain as `speculate_block` does, and no more; the next step overwrites all that this leaves."""
    ops.begin(num_waiting)
    ops.waiting(num_waiting)
    ops.block(block_rows)
    ops.chain(shape)
    _look_up_instead(ops, shape)


def propose_chain(ops: ChainOps, shape: TreeShape, num_waiting: int) -> None:
    """Draft a chain as `speculate_chain` does, and no more; the next step overwrites all that this leaves."""
    ops.begin(num_waiting)
    ops.waiting(num_waiting)
    ops.inner_steps(shape)
    _look_up_instead(ops, shape)


def _look_up_instead(ops: TreeOps, shape: TreeShape) -> None:
    if shape.lookup_length:
        ops.lookup_instead(shape)


def catch_up(ops: DraftOps, num_rows: int) -> None:
    """Run the draft over the waiting tokens, at most `num_rows`, without drafting anything."""
    ops.catch_up_begin(num_rows)
    ops.waiting(num_rows)
    ops.catch_up_end()


def after_chunk(ops: DraftOps, num_rows: int) -> None:
    """Run the draft over the chunk of a prompt that the target has just run."""
    ops.chunk_begin(num_rows)
    ops.chunk(num_rows)


class Waiting:
    """Counts the tokens of each slot that wait for the draft, on the host.

    Where the host does not know how many tokens a step has given, the most possible is counted: counts are upper
    bounds.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def of(self, slot: int) -> int:
        """Return how many tokens of a slot wait."""
        return self._counts[slot]

    def admitted(self, slot: int) -> None:
        """Note that the slot has a new sequence, of which no token waits."""
        self._counts[slot] = 0

    def prefilled(self, slot: int) -> None:
        """Note that the draft has seen a chunk except for its last token, which waits."""
        self._counts[slot] = 1

    def before_decode(self, counts: Mapping[int, int]) -> list[int]:
        """Add `counts` to the waiting tokens of each slot; return the slots whose draft has to catch up first."""
        late = [slot for slot, count in counts.items() if self._counts[slot] + count > MAX_WAITING]
        self._counts.update(dict.fromkeys(late, 1))
        for slot, count in counts.items():
            self._counts[slot] += count
        return late

    def before_speculation(self, slot: int, step_rows: int) -> bool:
        """Return whether the draft has to catch up before a speculative step, since more than `step_rows` tokens wait.

        `step_rows` is the number of rows of the step's first draft pass, that over the waiting tokens.
        """
        is_late = self._counts[slot] > step_rows
        if is_late:
            self._counts[slot] = 1
        return is_late

    def accepted(self, slot: int, count: int) -> None:
        """Note that a speculative step gives `count` tokens, which all wait."""
        self._counts[slot] = count
