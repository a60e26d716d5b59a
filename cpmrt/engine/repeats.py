"""Tells whether the last tokens of a text came before, so that a lookup beside a draft finds what followed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cpmrt.config.speculation import LONGEST_MATCH


class RepeatedText:
    """The runs of LONGEST_MATCH tokens in a text that grows at its end; the newest is compared with those before it."""

    def __init__(self, token_ids: Iterable[int]):
        self._last: deque[int] = deque(maxlen=LONGEST_MATCH)
        self._runs = set[tuple[int, ...]]()
        self.is_repeated = False
        """Whether the last LONGEST_MATCH tokens came before: what followed them there is drafted next."""
        self.was_repeated = False
        """The value of `is_repeated` before the tokens that were added last."""
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        last, runs, self.was_repeated = self._last, self._runs, self.is_repeated
        for token in token_ids:
            last.append(token)
            run = tuple(last)
            self.is_repeated = run in runs
            if len(run) == LONGEST_MATCH:
                runs.add(run)
