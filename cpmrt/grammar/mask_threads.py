"""Computes the masks of several answers at the same time, in llguidance's threads, which run without Python's lock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from cpmrt.cores import usable_cores

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_THREADS = 8
_FEWEST_ANSWERS = 8
"""The fewest answers for which threads always pay: waking them takes as long as some masks, and a step of few rows has
time for all its masks."""
_LEAST_SECONDS = 4e-4
"""Masks expected to take this long together are worth the threads even for few answers: for instance in strings near
their maximal length."""


def default_num_threads() -> int:
    """Return half the number of cores that this process may use, at most 8: the rest of the engine needs some too."""
    return min(usable_cores() // 2, _MOST_THREADS)


class MaskThreads:
    """Computes masks of `vocab_size` tokens in `num_threads` threads; with fewer than two `pay` is never true."""

    def __init__(self, num_threads: int, vocab_size: int):
        self.num_threads, self._vocab_size = num_threads, vocab_size

    def pay(self, num_answers: int, num_masks: int, seconds: float) -> bool:
        """Whether threads are faster for so many masks than one after the other, which would take about `seconds`."""
        is_worth_it = num_answers >= _FEWEST_ANSWERS or seconds >= _LEAST_SECONDS
        return self.num_threads > 1 and num_masks > 1 and is_worth_it

    def masks(self, matchers: Sequence[LLMatcher]) -> list[bytes]:
        """Return for each matcher the bits of the tokens that may come next, as `LLMatcher.compute_bitmask` does.

        The bits of a matcher that fails are meaningless. Matchers of one origin should be neighbours in the list, so
        that they run in the same thread: they cannot work at the same time.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        bits = allocate_token_bitmask(len(matchers), self._vocab_size)
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, matcher in enumerate(matchers)], bits)
        return [row.tobytes() for row in bits]

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self.num_threads)
