"""Computes the masks of several answers at the same time, in threads of llguidance, which need no Python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from cpmrt.cores import usable_cores

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_THREADS = 8
_FEWEST_ANSWERS = 8
"""To wake the threads takes as long as some masks, and a step of few rows has time for them all."""
_LEAST_SECONDS = 4e-4
"""Masks that are expected to take so long pay, of however few answers: those of strings that are nearly full."""


def default_num_threads() -> int:
    """Return half the number of cores that this process may use, at most 8: the rest of the engine needs some too."""
    return min(usable_cores() // 2, _MOST_THREADS)


class MaskThreads:
    """Runs masks of `vocab_size` tokens in `num_threads` threads; fewer than two compute nothing at the same time."""

    def __init__(self, num_threads: int, vocab_size: int):
        self.num_threads, self._vocab_size = num_threads, vocab_size

    def pay(self, num_answers: int, num_masks: int, seconds: float) -> bool:
        """Tell whether so many masks are sooner there than one after the other, which would take about `seconds`."""
        is_worth_it = num_answers >= _FEWEST_ANSWERS or seconds >= _LEAST_SECONDS
        return self.num_threads > 1 and num_masks > 1 and is_worth_it

    def masks(self, matchers: Sequence[LLMatcher]) -> list[bytes]:
        """Return the bits of the tokens that may come next, as `LLMatcher.compute_bitmask` does for one.

        Those of a matcher that fails mean nothing. Neighbours in the list should be of one origin: they go to the same
        thread.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        bits = allocate_token_bitmask(len(matchers), self._vocab_size)
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, matcher in enumerate(matchers)], bits)
        return [row.tobytes() for row in bits]

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self.num_threads)
