"""Limits the work of rendering one conversation, counted in characters and items, and its time."""

from __future__ import annotations

import threading
import time
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

SPARE_SIZE = 2**22  # size that one value may have beyond a multiple of the conversation's
DEADLINE_S = 10.0
_ITEM_COST = 8  # what one item of a list or dict counts, in characters


class LimitError(SecurityError):
    """A template does more work than any chat needs."""


class Allowance(threading.local):
    """The work and the time that the rendering in this thread may still spend.

    `size` is the largest size of one value, `left` the size of all values still to be made, `deadline` a `monotonic()`.
    """

    size: int = SPARE_SIZE
    left: int = 16 * SPARE_SIZE
    deadline: float = float("inf")

    def start(self, conversation: object) -> None:
        """Set the limits for one rendering of a conversation."""
        self.size = SPARE_SIZE + 4 * self.measure(conversation, limit=2**31)
        self.left, self.deadline = 16 * self.size, time.monotonic() + DEADLINE_S

    def spend(self, size: int) -> None:
        """Count `size` characters that the template makes. Raises LimitError if they are too many or the time is up."""
        self.left -= size
        if self.left < 0:
            raise LimitError("it makes too much text or takes too many turns")
        if time.monotonic() > self.deadline:
            raise LimitError(f"it takes longer than {DEADLINE_S:g} s")

    def measure(self, value: object, limit: int | None = None) -> int:
        """Return the size of a value in characters; nested values count as often as they occur.

        Raises LimitError if it exceeds `limit` (default: `self.size`), SecurityError for a namespace inside the value.
        """
        limit = self.size if limit is None else limit
        total, pending = 0, [value]
        while pending:
            item = pending.pop()
            total += _ITEM_COST + (len(item) if isinstance(item, str) else 0)
            if total > limit:
                raise LimitError(f"it makes a value of more than {limit} characters")
            if isinstance(item, dict):
                pending += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                pending += item
            elif isinstance(item, Namespace) and item is not value:
                raise SecurityError("a namespace may not be kept inside another value")
        return total

    def keep(self, value: Any) -> Any:
        """Measure and count a value, and return it."""
        self.measure(value)
        self.spend(len(value) if isinstance(value, str) else _ITEM_COST)
        if isinstance(value, (list, tuple, dict)):
            self.spend(len(value) * _ITEM_COST)
        return value
