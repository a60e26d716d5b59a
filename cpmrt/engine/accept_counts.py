"""What the draft steps of one sequence gave."""

from __future__ import annotations

from cpmrt.executor import ExecutorLimits


class AcceptCounts:
    """Counts of draft steps: by the tokens that they gave, and by depth. The token of the prefill is in none."""

    def __init__(self, limits: ExecutorLimits):
        most = max(shape.max_emitted for shape in limits.tree_shapes)
        self._most_emitted = [shape.max_emitted for shape in limits.tree_shapes]
        self._parts = limits.step_parts
        self.histogram = [0] * most
        """Index n: steps that gave n + 1 tokens."""
        self._reached, self._accepted = [0] * (most - 1), [0] * (most - 1)
        self._steps = [0] * len(limits.tree_shapes)

    def add(self, shape: int, num_tokens: int, *, is_last: bool) -> None:
        """A step of this shape. What the last step of a sequence might have given beyond its end is not known."""
        self._steps[shape] += 1
        self.histogram[num_tokens - 1] += 1
        for depth in range(num_tokens - 1):
            self._reached[depth] += 1
            self._accepted[depth] += 1
        if num_tokens < self._most_emitted[shape] and not is_last:
            self._reached[num_tokens - 1] += 1

    def merge(self, other: AcceptCounts) -> None:
        """Add the counts of another sequence on the same executor."""
        for ours, theirs in (
            (self.histogram, other.histogram),
            (self._reached, other._reached),
            (self._accepted, other._accepted),
            (self._steps, other._steps),
        ):
            ours[:] = [mine + yours for mine, yours in zip(ours, theirs, strict=True)]

    @property
    def num_steps(self) -> int:
        return sum(self.histogram)

    @property
    def num_tokens(self) -> int:
        return sum(count * number for number, count in enumerate(self.histogram, 1))

    @property
    def rates(self) -> tuple[float, ...]:
        """Depth by depth: of the steps that accepted the token above, how many accepted one there too."""
        pairs = zip(self._accepted, self._reached, strict=True)
        return tuple(accepted / reached for accepted, reached in pairs if reached)

    @property
    def parts_ms(self) -> tuple[float | None, float | None, float | None]:
        """Draft, verify and rest of a step on average; None: no step was made, or the executor has not measured it."""
        if not self._parts or not self.num_steps:
            return None, None, None
        draft, verify, rest = (
            sum(count * getattr(parts, name) for count, parts in zip(self._steps, self._parts, strict=True))
            for name in ("draft_s", "verify_s", "rest_s")
        )
        scale = 1e3 / self.num_steps
        return draft * scale, verify * scale, rest * scale
