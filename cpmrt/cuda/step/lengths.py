"""How long sequences are, as far as the host knows before it has read the results of the last steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpmrt.config import TreeShape
from cpmrt.executor import Decode, Pending, Prefill, Speculate, Step, StepResult
from cpmrt.ops import SHORT_KEYS, WINDOW_STRIDE, RowKind


class Lengths:
    """The tokens of each slot at most, once the steps so far have run, also if they accept all that is drafted.

    They are known exactly where the results of all steps that drafted have been read, but for a sequence that ends
    within those steps.
    """

    def __init__(self, shapes: Sequence[TreeShape], dense_context: int = 0):
        self._shapes, self._dense_context, self._tokens = shapes, dense_context, dict[int, int]()
        self._prefills = dict[int, int]()
        """How many prefills each slot has had: what came of a step before the last one counts no more."""

    def add(self, step: Step) -> None:
        """Count what the step adds, before it runs."""
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
        """Return the pending result of a step that has been added, which tells how many tokens came once it is read."""
        prefills = [self._prefills.get(slot, 0) for slot in step.slots]

        def tell(result: StepResult) -> None:
            for slot, before, found in zip(step.slots, prefills, result.slots, strict=True):
                if self._prefills.get(slot, 0) == before:
                    self._tokens[slot] -= self._shapes[step.shape].max_emitted - len(found.token_ids)

        return _Telling(pending, tell)

    def of(self, slot: int) -> int:
        """Return the tokens of the slot at most."""
        return self._tokens.get(slot, 0)

    def narrowest(self, kinds: Sequence[RowKind], slots: Sequence[int], num_rows: int) -> RowKind:
        """Return the first of these kinds, the last of which is ANY_ROWS, that all rows of these slots are of."""
        for kind in kinds[:-1]:
            if self.are(kind, slots, num_rows):
                return kind
        return kinds[-1]

    def are(self, kind: RowKind, slots: Sequence[int], num_rows: int) -> bool:
        """Whether the rows of these slots in a step of so many, which has been counted, are all of this kind; of long
        ones none is padding, and where steps draft it is not known whether rows are inside windows."""
        tokens = [self.of(slot) for slot in slots]
        if kind.length == "short" and max(tokens) > SHORT_KEYS:
            return False
        if kind.length == "long" and (len(slots) < num_rows or min(tokens) <= SHORT_KEYS):
            return False
        if kind.is_inside and (self._shapes or not all(count % WINDOW_STRIDE for count in tokens)):
            return False
        return not kind.is_dense or max(tokens) <= self._dense_context


class _Telling:
    """A pending result that tells what it is when it is read, once."""

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
