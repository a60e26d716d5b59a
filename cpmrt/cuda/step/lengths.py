"""How long sequences are, as far as the host knows before it has read the results of the last steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpmrt.config import TreeShape
from cpmrt.executor import Decode, Prefill, Speculate, Step
from cpmrt.ops import SHORT_KEYS, RowLength


class Lengths:
    """The tokens of each slot at most, once the steps so far have run, also if they accept all that is drafted."""

    def __init__(self, shapes: Sequence[TreeShape]):
        self._shapes, self._tokens = shapes, dict[int, int]()

    def add(self, step: Step) -> None:
        """Count what the step adds, before it runs."""
        tokens = self._tokens
        if isinstance(step, Prefill):
            tokens[step.slot] = step.position + len(step.token_ids)
        elif isinstance(step, Decode):
            for slot, certain in zip(step.slots, step.certain or ((),) * len(step.slots), strict=True):
                tokens[slot] = tokens.get(slot, 0) + len(certain) + 1
        elif isinstance(step, Speculate):
            for slot in step.slots:
                tokens[slot] = tokens.get(slot, 0) + self._shapes[step.shape].max_emitted

    def are(self, length: RowLength, slots: Sequence[int], num_rows: int) -> bool:
        """Whether the rows of these slots in a step of so many are all short, or all long and none of them padding."""
        if length == "short":
            return self.are_within(slots, SHORT_KEYS)
        return len(slots) == num_rows and all(self._tokens.get(slot, 0) > SHORT_KEYS for slot in slots)

    def are_within(self, slots: Iterable[int], most: int) -> bool:
        """Whether all of these have at most so many tokens."""
        return all(self._tokens.get(slot, 0) <= most for slot in slots)
