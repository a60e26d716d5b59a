"""Counts and times of one generation, and the tokens that its draft steps gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpmrt.executor import ExecutorLimits


class AcceptCounts:
    """Counts draft steps by the number of tokens they gave. The token that the prefill gives is not counted."""

    def __init__(self, limits: ExecutorLimits):
        self._shapes, self._parts = limits.tree_shapes, limits.step_parts
        self._given = [[0] * shape.max_emitted for shape in limits.tree_shapes]
        """For each tree shape: at index n, the steps that gave n + 1 tokens."""
        self._cut = [0] * max(map(len, self._given), default=0)
        """At index n, the steps of any shape that gave n + 1 tokens and might have given more, but the text ended."""
        self._last: tuple[int, int, bool] | None = None
        """The arguments of the last `add`; None: another step has come since."""

    def add(self, shape: int, num_tokens: int, *, is_last: bool) -> None:
        """Count one step of this shape; `is_last`: whether it ended its sequence."""
        self._last = (shape, num_tokens, is_last)
        self._change(1, *self._last)

    def pass_by(self) -> None:
        """Note that a step that did not draft has given tokens."""
        self._last = None

    def take_back(self, count: int) -> None:
        """Count the last step, if it drafted, again as one that ended its sequence with `count` tokens less."""
        if self._last is not None:
            shape, num_tokens, _ = self._last
            self._change(-1, *self._last)
            self.add(shape, max(num_tokens - count, 1), is_last=True)

    def _change(self, by: int, shape: int, num_tokens: int, is_last: bool) -> None:
        self._given[shape][num_tokens - 1] += by
        if is_last and num_tokens < self._shapes[shape].max_emitted:
            self._cut[num_tokens - 1] += by

    def merge(self, other: AcceptCounts) -> None:
        """Add the counts of another sequence on the same executor."""
        for ours, theirs in zip((*self._given, self._cut), (*other._given, other._cut), strict=True):
            ours[:] = [mine + yours for mine, yours in zip(ours, theirs, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """Steps by the tokens they gave: index n counts those that gave n + 1."""
        lengths = range(len(self._cut))
        return [sum(given[index] for given in self._given if index < len(given)) for index in lengths]

    @property
    def num_steps(self) -> int:
        return sum(map(sum, self._given))

    @property
    def num_tokens(self) -> int:
        return sum(count * number for number, count in enumerate(self.histogram, 1))

    @property
    def rates(self) -> tuple[float, ...]:
        """Accept rate by depth: the share of the steps that accepted a token there, of those that accepted its parent.

        Steps that the end of the text cut short do not count at the depth where they were cut.
        """
        rates = list[float]()
        for depth in range(1, len(self._cut)):
            deep = [given for given in self._given if depth < len(given)]
            accepted = sum(sum(given[depth:]) for given in deep)
            reached = accepted + sum(given[depth - 1] for given in deep) - self._cut[depth - 1]
            if reached:
                rates.append(accepted / reached)
        return tuple(rates)

    @property
    def figures(self) -> dict[str, Any]:
        """The fields of `GenerationStats` about speculation; empty where no step was made."""
        num_steps = self.num_steps
        if not num_steps:
            return {}
        figures: dict[str, Any] = {"mean_accept_length": self.num_tokens / num_steps, "accept_rates": self.rates}
        figures["accept_histogram"] = tuple(self.histogram)
        for part in ("draft", "verify", "rest") if self._parts else ():
            pairs = zip(self._given, self._parts, strict=True)
            seconds = sum(sum(given) * getattr(parts, f"{part}_s") for given, parts in pairs)
            figures[f"{part}_ms"] = seconds * 1e3 / num_steps
        return figures


@dataclass(frozen=True)
class GenerationStats:
    """Counts and seconds of one sequence. Prefill ends with the first token, which decode therefore excludes.

    The fields about speculation are None or empty where no draft step was made; their milliseconds are those that were
    measured at start.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    mean_accept_length: float | None = None
    """Tokens that a speculative step gave on average."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    accept_histogram: tuple[int, ...] = ()
    """Speculative steps by the tokens that they gave: index n counts those that gave n + 1."""
    accept_rates: tuple[float, ...] = ()
    """By depth: the share of steps that accepted a drafted token there, of those that accepted its parent."""
    draft_ms: float | None = None
    verify_ms: float | None = None
    rest_ms: float | None = None
    screened_steps: int = 0
    """Steps behind the prompt that did not read the whole output head (`lm_head_screen`)."""
    mean_rescored: float | None = None
    """Tokens whose logits such a step computed exactly, on average, for all sequences of the step together."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second, cached ones not counted."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0

    @property
    def speculative_steps(self) -> int:
        return sum(self.accept_histogram)

    @property
    def speculative_tokens(self) -> int:
        return sum(count * number for number, count in enumerate(self.accept_histogram, 1))
