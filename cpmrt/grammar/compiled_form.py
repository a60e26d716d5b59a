"""Keeps a compiled form: compiled several times if several answers use it, as copies of one wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakSet

from cpmrt.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

CompileBeside = Callable[[], "Future[LLMatcher | RequestError] | None"]
"""Begins to compile a form once more, and returns the future of its matcher; None if that cannot begin now."""


class Origin:
    """A compiled form in its initial state, which stays unchanged; answers work on copies.

    The copies share a cache of what they find out about the form, under a lock, so no two of them work at a time.
    """

    def __init__(self, first: LLMatcher):
        self._first = first
        self._users = WeakSet[object]()

    @property
    def num_users(self) -> int:
        """The number of users that have taken a copy and still exist."""
        return len(self._users)

    def copy_for(self, user: object) -> LLMatcher:
        """Return a copy of the matcher for `user`, which counts as in use while that object exists."""
        self._users.add(user)
        return self._first.deep_copy()


class CompiledForm:
    """The origins of a form; each answer gets the one that the fewest answers use now. For any thread.

    If all origins are in use, the form is compiled once more in the background (`compile_beside`), until there are
    `most` origins.
    """

    def __init__(self, first: LLMatcher, most: int, compile_beside: CompileBeside):
        self._origins, self._most, self._compile_beside = [Origin(first)], most, compile_beside
        self._coming: Future[LLMatcher | RequestError] | None = None
        self._lock = RLock()  # a signal handler may ask for an origin inside `origin`

    def origin(self) -> Origin:
        """Return the origin for one more answer."""
        with self._lock:
            self._take_in()
            least = min(self._origins, key=lambda origin: origin.num_users)
            if least.num_users and self._coming is None and len(self._origins) < self._most:
                self._coming = self._compile_beside()
            return least

    def _take_in(self) -> None:
        """Add the origin that was compiling, if it is done."""
        coming = self._coming
        if coming is None or not coming.done():
            return
        self._coming = None
        if coming.exception() is None and not isinstance(found := coming.result(), RequestError):
            self._origins.append(Origin(found))
        else:
            self._most = 0  # if it fails once, it always fails: do not try again
