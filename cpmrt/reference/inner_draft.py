"""A small model that drafts and has a draft of its own, in NumPy: its chains come from its own speculative steps.

To its draft the small model is a target: the inner drafter has the small model's arrays under the names that a target's
have. The small model always samples its most likely token, so that a chain is the one that it would have drafted token
by token; only the passes over its weights are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cpmrt.dtypes import F32
from cpmrt.executor import SlotResult
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.draft import PREFIX
from cpmrt.ops import Rows
from cpmrt.reference.draft_steps import DraftStep
from cpmrt.reference.draft_tree import top_k
from cpmrt.reference.drafting import Drafter, Target, bound_model, move_path
from cpmrt.speculation.procedure import after_chunk


@dataclass
class Chain:
    """The `wanted` tokens that a small model drafts, as a sequence (`Tip`) whose last token stands at `position`."""

    wanted: int
    position: int
    tokens: list[int] = field(default_factory=list)

    @property
    def last_token(self) -> int:
        return self.tokens[-1]

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.wanted


class ChainDrafter:
    """Drafts chains for all slots with the model of the drafter `small` and that model's own draft.

    `caches` and `inner_caches` are those of the two; without the latter the inner draft is prompt lookup.
    Between two chains the inner draft has seen the same tokens of the text as the small model. The keys and values that
    both have of a chain are overwritten when they see the text that the target has made of it.
    """

    def __init__(self, small: Drafter, caches: CacheLayout, inner_caches: CacheLayout | None):
        inner = small.draft.inner
        assert inner is not None
        arrays = {name.removeprefix(PREFIX): array for name, array in small.buffers.items() if name.startswith(PREFIX)}
        arrays["history"] = small.history
        self._small, self._caches = small, caches
        model = bound_model(inner, arrays, inner_caches and replace(inner_caches, prefix=PREFIX))
        self.inner = small.beside(inner, model, Target(self._logits, self._choose, self._keep), arrays)
        self._chains: dict[int, Chain] = {}
        self._num_seen: dict[int, int] = {}
        """The number of tokens of each slot's text that the small model has seen, and the inner draft with it."""

    def admit(self, slot: int) -> None:
        """Note that the slot has a new sequence, of which nothing is seen yet."""
        self.inner.admit(slot)
        self._num_seen[slot] = 0

    def states(self, num_rows: int) -> F32 | None:
        """Return the array to which a pass of the small model writes the states that the inner draft reads, if any."""
        hidden: F32 | None = self.inner.buffers.get("hidden")
        return None if hidden is None else hidden[1 : num_rows + 1]

    def see(self, rows: Rows) -> None:
        """Run the inner draft over tokens of the text that the small model has just run."""
        if self.inner.model is None:
            return
        slot, first, count = int(rows.slots[0]), int(rows.positions[0]), len(rows.token_ids)
        if first != self._num_seen[slot]:
            self.inner.waiting.admitted(slot)  # tokens that were seen are run again
        after_chunk(DraftStep(self.inner, (slot,), first), count)
        self.inner.waiting.prefilled(slot)
        self._num_seen[slot] = first + count

    def chain(self, slot: int, position: int, logits: F32, length: int) -> list[int]:
        """Return the `length` tokens that the small model gives behind `position`, or as many as there is room for.

        `logits` [V] are the small model's for the first of them. The inner draft has seen the text up to `position`.
        """
        inner, (shape,) = self.inner, self.inner.draft.shapes
        state = None if inner.carry is None else inner.carry[slot, 0].copy()
        chain = self._chains[slot] = Chain(length, position + 1)
        self._choose(slot, logits, None)
        limit = min(int(inner.capacities[slot]), inner.max_context)
        while not chain.finished and chain.position < limit:
            if len(chain.tokens) + 1 < length:
                inner.speculate(slot, chain, shape)
            else:
                inner.step_alone(slot, chain, shape)
        if inner.model is not None:
            inner.waiting.prefilled(slot)
        if inner.carry is not None:
            inner.carry[slot, 0] = state
        return chain.tokens

    def _logits(self, rows: Rows) -> F32:
        return self._small.run(rows, None, slice(None), is_first=False)

    def _choose(self, slot: int, logits: F32, bits: bytes | None) -> SlotResult:
        chain, token = self._chains[slot], int(top_k(logits, 1)[0][0])
        chain.tokens.append(token)
        self.inner.sampled(slot, chain.position, token)
        return SlotResult((token,))

    def _keep(self, slot: int, base: int, path: Sequence[int]) -> None:
        move_path(self._caches.moved(self._small.buffers), self._small.block_tables[slot], base, path)
