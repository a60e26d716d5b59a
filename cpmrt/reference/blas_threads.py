"""The number of threads that BLAS may use for a step.

The threads of a small product spend more time waiting for each other than computing. On a machine that has other work
to do they wait very long (measured on two busy cores: 2.5 against 35 tokens a second when decoding, 6 to 20
against 1.1 seconds of CPU for 1,168 tokens of a prompt).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from threadpoolctl import ThreadpoolController

_SMALL_MATRIX = 1 << 22


class BlasThreads:
    """Makes the context in which a step should run, with one BLAS thread for a small model."""

    def __init__(self, largest_matrix: int):
        """`largest_matrix`: elements of the model's largest weight."""
        self._controller = ThreadpoolController() if largest_matrix < _SMALL_MATRIX else None

    def for_step(self) -> AbstractContextManager[object]:
        """Return a context with one thread for a step of a small model, else with as many as BLAS chooses."""
        if self._controller is None:
            return nullcontext()
        limiter: AbstractContextManager[object] = self._controller.limit(limits=1, user_api="blas")
        return limiter
