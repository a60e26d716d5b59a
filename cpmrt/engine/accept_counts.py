"""What the draft steps of one sequence gave."""

from __future__ import annotations

from cpmrt.executor import ExecutorLimits


class AcceptCounts:
    """Counts of draft steps: by the tokens that they gave, and by depth. The token of the prefill is in none."""

    def __init__(self, limits: ExecutorLimits):
        self._shapes, self._parts = limits.tree_shapes, limits.step_parts
        self._given = [[0] * shape.max_emitted for shape in limits.tree_shapes]
        """For each shape, index n: steps that gave n + 1 tokens."""
        self._ended = [0] * max(map(len, self._given))
        """Of all these, the last one of a sequence."""

    def add(self, shape: int, num_tokens: int, *, is_last: bool) -> None:
        """A step of this shape. What the last step of a sequence might have given beyond its end is not known."""
        self._given[shape][num_tokens - 1] += 1
        if is_last:
            self._ended[num_tokens - 1] += num_tokens < self._shapes[shape].max_emitted

    def merge(self, other: AcceptCounts) -> None:
        """Add the counts of another sequence on the same executor."""
        for ours, theirs in zip((*self._given, self._ended), (*other._given, other._ended), strict=True):
            ours[:] = [mine + yours for mine, yours in zip(ours, theirs, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """Index n: steps that gave n + 1 tokens."""
        lengths = range(len(self._ended))
        return [sum(given[index] for given in self._given if index < len(given)) for index in lengths]

    @property
    def num_steps(self) -> int:
        return sum(map(sum, self._given))

    @property
    def num_tokens(self) -> int:
        return sum(count * number for number, count in enumerate(self.histogram, 1))

    @property
    def rates(self) -> tuple[float, ...]:
        """Depth by depth: of the steps that accepted the token above, how many accepted one there too."""
        rates = list[float]()
        for depth in range(1, len(self._ended)):
            deep = [given for given in self._given if depth < len(given)]
            accepted = sum(sum(given[depth:]) for given in deep)
            reached = accepted + sum(given[depth - 1] for given in deep) - self._ended[depth - 1]
            if reached:
                rates.append(accepted / reached)
        return tuple(rates)

    @property
    def parts_ms(self) -> tuple[float | None, float | None, float | None]:
        """Draft, verify and rest of a step on average; None: no step was made, or the executor has not measured it."""
        num_steps = self.num_steps
        if not self._parts or not num_steps:
            return None, None, None
        draft, verify, rest = (
            sum(sum(given) * getattr(parts, name) for given, parts in zip(self._given, self._parts, strict=True))
            for name in ("draft_s", "verify_s", "rest_s")
        )
        scale = 1e3 / num_steps
        return draft * scale, verify * scale, rest * scale
