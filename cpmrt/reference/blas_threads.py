"""How many threads BLAS may use for a step.

The threads of a small product spend more time waiting for each other than computing, and on a machine that has other
work to do they wait very long (measured on two busy cores: 2.5 against 35 tokens a second).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from threadpoolctl import ThreadpoolController

_SMALL_MATRIX = 1 << 22
_FEW_ROWS = 64


class BlasThreads:
    """Gives the context in which a step should run."""

    def __init__(self, largest_matrix: int):
        """`largest_matrix`: elements of the model's largest weight."""
        self._controller = ThreadpoolController() if largest_matrix < _SMALL_MATRIX else None

    def for_rows(self, num_rows: int) -> AbstractContextManager[object]:
        """One thread for a step of few rows of a small model, else as many as BLAS likes."""
        if self._controller is None or num_rows > _FEW_ROWS:
            return nullcontext()
        limiter: AbstractContextManager[object] = self._controller.limit(limits=1, user_api="blas")
        return limiter
