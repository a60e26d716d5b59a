"""Counts the tokens of sequences as far as the host knows them before it has read the results of the last steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpmrt.config import TreeShape
from cpmrt.executor import Decode, Pending, Prefill, Speculate, Step, StepResult
from cpmrt.ops import SHORT_KEYS, WINDOW_STRIDE, RowKind


class Lengths:
    """Upper bounds of the tokens that each slot has once the steps so far have run, with all drafted tokens accepted.

    A bound is exact where the results of all steps that drafted have been read, except for a sequence that ends within
    those steps.
    """

    def __init__(self, shapes: Sequence[TreeShape], dense_context: int = 0):
        self._shapes, self._dense_context, self._tokens = shapes, dense_context, dict[int, int]()
        self._prefills = dict[int, int]()
        """How many prefills each slot has had: the result of a step before the last prefill no longer counts."""

    def add(self, step: Step) -> None:
        """Count the tokens that the step adds, before it runs."""
        tokens = self._tokens
        if isinstance(step, Decode):
            for slot in step.slots:
                tokens[slot] = tokens.get(slot, 0) + 1
            if step.certain:
                for slot, certain in zip(step.slots, step.certain, strict=True):
                    tokens[slot] += len(certain)
        elif isinstance(step, Prefill):
            tokens[step.slot] = step.position + len(step.token_ids)
            self._prefills[step.slot] = self._prefills.get(step.slot, 0) + 1
        elif isinstance(step, Speculate):
            for slot in step.slots:
                tokens[slot] = self.of(slot) + self._shapes[step.shape].max_emitted

    def followed(self, step: Speculate, pending: Pending) -> Pending:
        """Return the pending result of an added step; reading it corrects the bounds to the tokens that came."""
        prefills = [self._prefills.get(slot, 0) for slot in step.slots]

        def tell(result: StepResult) -> None:
            for slot, before, found in zip(step.slots, prefills, result.slots, strict=True):
                if self._prefills.get(slot, 0) == before:
                    self._tokens[slot] -= self._shapes[step.shape].max_emitted - len(found.token_ids)

        return _Telling(pending, tell)

    def of(self, slot: int) -> int:
        """Return the most tokens that the slot may have."""
        return self._tokens.get(slot, 0)

    def narrowest(self, kinds: Sequence[RowKind], slots: Sequence[int], num_rows: int) -> RowKind:
        """Return the first of these kinds that holds for all rows of these slots; the last kind is ANY_ROWS."""
        for kind in kinds[:-1]:
            if self.are(kind, slots, num_rows):
                return kind
        return kinds[-1]

    def are(self, kind: RowKind, slots: Sequence[int], num_rows: int) -> bool:
        """Whether all rows of a step of `num_rows` rows on these slots, which has been added, are of this kind.

        A step of long rows has no padding. Where steps draft, it is not known whether rows are inside windows.
        """
        tokens = [self.of(slot) for slot in slots]
        if kind.length == "short" and max(tokens) > SHORT_KEYS:
            return False
        if kind.length == "long" and (len(slots) < num_rows or min(tokens) <= SHORT_KEYS):
            return False
        if kind.is_inside and (self._shapes or not all(count % WINDOW_STRIDE for count in tokens)):
            return False
        return not kind.is_dense or max(tokens) <= self._dense_context


class _Telling:
    """A pending result that calls `tell` with the result when it is first read."""

    def __init__(self, pending: Pending, tell: Callable[[StepResult], None]):
        self._pending = pending
        self._tell: Callable[[StepResult], None] | None = tell

    def is_done(self) -> bool:
        return self._pending.is_done()

    def wait(self) -> StepResult:
        result, tell, self._tell = self._pending.wait(), self._tell, None
        if tell is not None:
            tell(result)
        return result
