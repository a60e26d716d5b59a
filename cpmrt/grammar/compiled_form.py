"""Keeps a form compiled: several times where several answers have it, since copies of one wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from cpmrt.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

CompileBeside = Callable[[], "Future[LLMatcher | RequestError] | None"]
"""Begins to compile a form once more, and returns what will have the matcher; None if that cannot be begun now."""


class Origin:
    """A compiled form in its first state, which nobody may change.

    Its copies share what they find out about the form on their way, under a lock: two of them never work at a time.
    """

    def __init__(self, first: LLMatcher):
        self._first = first
        self._users = WeakSet[object]()

    @property
    def num_users(self) -> int:
        """The number of those that have taken a copy and still exist."""
        return len(self._users)

    def copy_for(self, user: object) -> LLMatcher:
        """Return a matcher in the first state, which `user` keeps."""
        self._users.add(user)
        return self._first.deep_copy()


class CompiledForm:
    """Gives each answer of a form an origin: the one that the fewest answers use now. For any thread.

    While all are in use it has the form compiled again (`compile_beside`), in the background, until it has `most`.
    """

    def __init__(self, first: LLMatcher, most: int, compile_beside: CompileBeside):
        self._origins, self._most, self._compile_beside = [Origin(first)], most, compile_beside
        self._coming: Future[LLMatcher | RequestError] | None = None
        self._lock = Lock()

    def origin(self) -> Origin:
        """Return the origin for one more answer."""
        with self._lock:
            self._take_in()
            least = min(self._origins, key=lambda origin: origin.num_users)
            if least.num_users and self._coming is None and len(self._origins) < self._most:
                self._coming = self._compile_beside()
            return least

    def _take_in(self) -> None:
        """Add the origin that is compiled by now."""
        coming = self._coming
        if coming is None or not coming.done():
            return
        self._coming = None
        if coming.exception() is None and not isinstance(found := coming.result(), RequestError):
            self._origins.append(Origin(found))
        else:
            self._most = 0  # as it is once, it is always
